// SPDX-License-Identifier: Apache-2.0
// Whole steps on a world of one: what a step costs beside its update, on the device and the host.
#include <cstddef>
#include <string>
#include <vector>
#include <zero/cuda.cuh>

#include "benchmarks.hpp"
#include "device.hpp"
#include "models.hpp"
#include "rows.hpp"

namespace bench {

namespace {

/// @param clip whether the norm is found, too
void step_rows(const Model& model, bool clip, bool tiny) {
  const std::string name =
      std::string(clip ? "step/adam fp32, clipped/" : "step/adam fp32/") + model.name;
  trim_pool();
  // Read: values, gradients and two slots, gradients once more for the norm; written: all but them.
  const std::size_t moved = model.elements() * sizeof(float) * (clip ? 8 : 7);
  const std::size_t needed = model.elements() * sizeof(float) * 4 + moved;
  if (needed > device_memory().free / 10 * 9) {
    return print_skipped(name, "needs " + std::to_string(needed >> 20) + " MiB of device memory");
  }
  zero::cuda::run_ranks(1, [&](zero::cuda::InProcessCommunicator& comm) {
    DeviceModel<float> memory(model);
    DeviceCopy copy(moved);
    const zero::cuda::StreamView stream = comm.stream();
    zero::ZeroSharded optimizer{zero::cuda::FusedAdam{}, memory.store(), comm,
                                zero::Settings{.check_values = false}};
    if (clip) optimizer.clip_grad_norm(1.0);
    std::vector<double> host_seconds;
    const auto step = [&] {
      host_seconds.push_back(seconds([&] { (void)optimizer.step(stream); }));
    };
    const Pairs pairs = run_device_pairs(stream, step, [&] { copy(stream); }, tiny ? 1 : 15);
    const auto bytes = static_cast<double>(moved);
    print_row(name, "of a copy's speed", pairs.speed_ratio(), {},
              rate(bytes, pairs.subject) + ", copy " + rate(bytes, pairs.reference));
    host_seconds.erase(host_seconds.begin());
    for (double& s : host_seconds) s *= 1e6;
    print_row(name + "/host", "us", spread_of(host_seconds), {}, "until step() returns");
    stream.synchronize();
  });
}

}  // namespace

void step(bool tiny) {
  for (const Model& model : update_models(tiny)) {
    step_rows(model, false, tiny);
    step_rows(model, true, tiny);
  }
}

}  // namespace bench
