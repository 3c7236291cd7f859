// SPDX-License-Identifier: Apache-2.0
/// @file
/// Everything about checkpoints. Needs the target `zero::checkpoint`: nlohmann/json and xxHash.
#pragma once

#include "zero/checkpoint/checkpoint.hpp"     // IWYU pragma: export
#include "zero/checkpoint/consolidate.hpp"    // IWYU pragma: export
#include "zero/checkpoint/convert.hpp"        // IWYU pragma: export
#include "zero/checkpoint/info.hpp"           // IWYU pragma: export
#include "zero/checkpoint/load.hpp"           // IWYU pragma: export
#include "zero/checkpoint/safetensors.hpp"    // IWYU pragma: export
#include "zero/checkpoint/save.hpp"           // IWYU pragma: export
#include "zero/checkpoint/shaped_params.hpp"  // IWYU pragma: export
#include "zero/checkpoint/torch.hpp"          // IWYU pragma: export
