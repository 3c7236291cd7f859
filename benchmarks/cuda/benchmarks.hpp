// SPDX-License-Identifier: Apache-2.0
// What is measured on a GPU. Each prints its rows.
#pragma once

namespace bench {

/// The fused kernels' bytes per second, as a fraction of what a copy within the device reaches.
void update(bool tiny);
/// Whole steps on a world of one.
void step(bool tiny);
/// The pass over gradients that finds their norm and what is not finite.
void norm(bool tiny);
/// What a model and its optimizer take of the device, replicated and sharded over ranks that share
/// it.
void memory(bool tiny);

}  // namespace bench
