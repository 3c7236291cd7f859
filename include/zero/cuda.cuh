// SPDX-License-Identifier: Apache-2.0
/// @file
/// zero on CUDA devices: all of it but NCCL (zero/comm/nccl.cuh). For files that nvcc compiles.
#pragma once

#include "zero/cuda/communicator.hpp"
#include "zero/cuda/detail/device_step.cuh"
#include "zero/cuda/element.hpp"
#include "zero/cuda/error.hpp"
#include "zero/cuda/flat_params.hpp"
#include "zero/cuda/in_process.cuh"
#include "zero/cuda/memory.hpp"
#include "zero/cuda/optim.cuh"
#include "zero/cuda/param_ref.hpp"
#include "zero/cuda/shaped_param.hpp"
#include "zero/cuda/step.hpp"
#include "zero/cuda/stream.hpp"
#include "zero/cuda/tensor_optimizer.hpp"
#include "zero/zero.hpp"
