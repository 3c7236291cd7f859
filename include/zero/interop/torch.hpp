// SPDX-License-Identifier: Apache-2.0
/// @file
/// libtorch: all that zero has for it. Needs libtorch, from 1.13 on (CMake: `zero::torch`).
///
/// @code
/// zero::run_ranks(2, [](zero::InProcessCommunicator& comm) {
///   Net net;                                                  // a torch::nn::Module
///   zero::TorchParams params{*net};
///   zero::broadcast_values(params, comm);                     // all ranks start as rank 0
///   zero::ZeroSharded optimizer{zero::AdamW{.lr = 1e-3}, params, comm};
///   zero::TorchHooks hooks{optimizer};                        // gradients go as they are made
///   for (auto& [input, target] : batches_of(comm.rank())) {
///     net->zero_grad();
///     loss_of(net, input, target).backward();
///     optimizer.step();
///   }
/// });
/// @endcode
#pragma once

// IWYU pragma: begin_exports
#include "zero/broadcast.hpp"
#include "zero/interop/torch/element.hpp"
#include "zero/interop/torch/hooks.hpp"
#include "zero/interop/torch/optimizer.hpp"
#include "zero/interop/torch/param.hpp"
#include "zero/interop/torch/params.hpp"
#include "zero/interop/torch/replica.hpp"
#include "zero/interop/torch/slots.hpp"
// IWYU pragma: end_exports
