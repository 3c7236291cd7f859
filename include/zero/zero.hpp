// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a user of the library needs, without any other package: include this. Beyond it stand
/// `zero/comm/mpi.hpp`, ranks as processes; `zero/views.hpp` and `zero/describe.hpp`, a layout as
/// range-v3 views and in words; `zero/comm/fault_injector.hpp`, for tests of what is built on
/// communicators; and `zero/interop/`, for other libraries.
#pragma once

#include "zero/bfloat16.hpp"                         // IWYU pragma: export
#include "zero/bucket_view/no_view.hpp"              // IWYU pragma: export
#include "zero/bucket_view/param_and_grad_view.hpp"  // IWYU pragma: export
#include "zero/bucket_view/param_view.hpp"           // IWYU pragma: export
#include "zero/comm/hybrid.hpp"                      // IWYU pragma: export
#include "zero/comm/in_process.hpp"                  // IWYU pragma: export
#include "zero/config.hpp"                           // IWYU pragma: export
#include "zero/error.hpp"                            // IWYU pragma: export
#include "zero/estimate.hpp"                         // IWYU pragma: export
#include "zero/flat_params.hpp"                      // IWYU pragma: export
#include "zero/float16.hpp"                          // IWYU pragma: export
#include "zero/join.hpp"                             // IWYU pragma: export
#include "zero/layout.hpp"                           // IWYU pragma: export
#include "zero/math.hpp"                             // IWYU pragma: export
#include "zero/matrix_product.hpp"                   // IWYU pragma: export
#include "zero/optim/adam.hpp"                       // IWYU pragma: export
#include "zero/optim/lamb.hpp"                       // IWYU pragma: export
#include "zero/optim/muon.hpp"                       // IWYU pragma: export
#include "zero/optim/sgd.hpp"                        // IWYU pragma: export
#include "zero/parameter.hpp"                        // IWYU pragma: export
#include "zero/partition/balanced.hpp"               // IWYU pragma: export
#include "zero/partition/contiguous.hpp"             // IWYU pragma: export
#include "zero/rounding.hpp"                         // IWYU pragma: export
#include "zero/shaped_param.hpp"                     // IWYU pragma: export
#include "zero/zero_sharded.hpp"                     // IWYU pragma: export
