// SPDX-License-Identifier: Apache-2.0
/// @file
/// Gradients of a dlib network marked ready while it back-propagates. dlib has no hooks, but layers
/// are types of ours: one of its own with a longer `backward` is one.
#pragma once

#include <dlib/dnn/core.h>

#include <cstddef>
#include <functional>
#include <utility>

namespace zero_dlib {

/// `dlib::fc_`, `dlib::con_`, … that calls `on_gradient` as soon as its parameters' gradient is
/// there, if somebody has set it. A copy of a network calls the same.
/// @tparam Layer one that isn't computed in place (`backward`, not `backward_inplace`)
template <class Layer>
struct Marking : Layer {
  using Layer::Layer;
  std::function<void()> on_gradient;

  template <class Subnet>
  void backward(const dlib::tensor& output_gradient, Subnet& below, dlib::tensor& params_gradient) {
    Layer::backward(output_gradient, below, params_gradient);
    if (on_gradient) on_gradient();
  }
};

/// From now on each `Marking` layer calls `mark` with its parameter's index in
/// `parameters_of(net)`, from inside `net.compute_parameter_gradients`. What `mark` refers to must
/// outlive those calls.
template <class Net, class Mark>
void mark_gradients(Net& net, Mark mark) {
  std::size_t index = 0;
  dlib::visit_layers_backwards(net, [&](std::size_t, auto& layer) {
    if constexpr (requires { layer.layer_details().get_layer_params(); }) {
      auto& details = layer.layer_details();
      if (details.get_layer_params().size() == 0) return;
      if constexpr (requires { details.on_gradient; }) {
        details.on_gradient = [mark, index] { mark(index); };
      }
      ++index;
    }
  });
}

}  // namespace zero_dlib
