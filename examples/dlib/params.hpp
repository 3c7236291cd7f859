// SPDX-License-Identifier: Apache-2.0
/// @file
/// The parameters of a dlib network as a zero::ParamStore.
#pragma once

#include <dlib/dnn/core.h>

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <vector>
#include <zero/zero.hpp>

#ifdef DLIB_USE_CUDA
#error "dlib with CUDA moves tensors between host and device behind pointers: build it without"
#endif

namespace zero_dlib {

/// One layer's parameters: weights and biases lie in one tensor. It has no `rebind`, since a dlib
/// tensor can't be told which memory to use (zero::NoView, the default).
struct LayerParams {
  std::string label;  ///< "layer3" is what dlib::layer<3>(net) has
  std::array<std::size_t, 4> extents;
  dlib::tensor* params;
  dlib::tensor* params_gradient;
  zero::Attributes traits;

  [[nodiscard]] const std::string& name() const { return label; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return extents; }
  [[nodiscard]] std::span<float> values() const { return {params->host(), params->size()}; }
  [[nodiscard]] std::span<float> gradient() const {
    return {params_gradient->host(), params_gradient->size()};
  }
  [[nodiscard]] const zero::Attributes& attributes() const { return traits; }
  void release_gradient() const {  // at stage 2; the next backward makes it anew
    dynamic_cast<dlib::resizable_tensor&>(*params_gradient).clear();
  }
};

/// All layers' from input to output, for a network with a loss layer; frozen where the learning
/// rate multiplier is 0 (other multipliers are for dlib's solvers). It points into `net`: don't
/// assign, move or load that while it is in use.
/// @throw zero::UsageError before the first forward pass, in which dlib makes parameters
template <class Net>
[[nodiscard]] std::vector<LayerParams> parameters_of(Net& net) {
  if (net.subnet().get_output().size() == 0) {
    throw zero::UsageError(
        "zero_dlib::parameters_of: the network has no parameters yet, dlib makes them in the first "
        "forward pass: call net(image), or net.forward(tensor), before");
  }
  std::vector<LayerParams> all;
  dlib::visit_layers_backwards(net, [&all](std::size_t i, auto& layer) {
    if constexpr (requires { layer.layer_details().get_layer_params(); }) {
      dlib::tensor& t = layer.layer_details().get_layer_params();
      if (t.size() == 0) return;  // a layer without any
      const std::array extents{std::size_t(t.num_samples()), std::size_t(t.k()),
                               std::size_t(t.nr()), std::size_t(t.nc())};
      const double rate = dlib::get_learning_rate_multiplier(layer.layer_details());
      all.push_back({"layer" + std::to_string(i), extents, &t, &layer.get_parameter_gradient(),
                     zero::Attributes{.frozen = rate == 0}});
    }
  });
  return all;
}

}  // namespace zero_dlib
