// SPDX-License-Identifier: Apache-2.0
// What the example's adapter makes of dlib's networks: which parameters, whose memory, when it
// refuses.
#include "params.hpp"

#include <dlib/dnn/input.h>
#include <dlib/dnn/layers.h>
#include <dlib/dnn/loss.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>
#include <zero/zero.hpp>

#include "catch.hpp"
#include "marking.hpp"

namespace {

using Image = dlib::matrix<float, 4, 4>;
template <unsigned long outputs, class Below>
using Fc = dlib::add_layer<zero_dlib::Marking<dlib::fc_<outputs, dlib::FC_HAS_BIAS>>, Below>;

// Layers without parameters, tags, skips, repeats, and a layer that marks nothing.
template <class Below>
using Block = Fc<6, dlib::relu<Below>>;
using Body = dlib::repeat<2, Block, dlib::tag1<Fc<6, dlib::input<Image>>>>;
using Net = dlib::loss_multiclass_log<dlib::fc<3, dlib::add_prev1<Body>>>;

static_assert(zero::ParamStore<std::vector<zero_dlib::LayerParams>>);
static_assert(!zero::RebindableParameter<zero_dlib::LayerParams>);

const std::vector<Image> images = [] {
  std::vector<Image> some(4);
  float grey = 0;
  for (Image& image : some) {
    for (float& pixel : image) pixel = (grey += 0.01F);
  }
  return some;
}();
const std::vector<unsigned long> labels{0, 1, 2, 1};

template <class N>
double backward(N& net) {
  return net.compute_parameter_gradients(images.begin(), images.end(), labels.begin());
}

std::vector<float> copy(std::span<const float> of) { return {of.begin(), of.end()}; }

std::string refusal(Net& net) {
  try {
    static_cast<void>(zero_dlib::parameters_of(net));
  } catch (const zero::UsageError& error) {
    return error.what();
  }
  return "none";
}

}  // namespace

TEST_CASE("each layer's parameters, from input to output") {
  Net net;
  net(images[0]);
  const auto parameters = zero_dlib::parameters_of(net);

  REQUIRE(parameters.size() == 4);
  const std::vector<std::vector<std::size_t>> shapes{{17, 6}, {7, 6}, {7, 6}, {7, 3}};
  for (std::size_t i = 0; i < 4; ++i) {
    CAPTURE(i);
    const auto shape = parameters[i].shape();
    REQUIRE(shape.size() == 4);
    CHECK(shape[0] == shapes[i][0]);
    CHECK(shape[1] * shape[2] * shape[3] == shapes[i][1]);
    CHECK(parameters[i].values().size() == shapes[i][0] * shapes[i][1]);
    for (std::size_t j = 0; j < i; ++j) {
      CHECK(parameters[i].name() != parameters[j].name());
      CHECK(parameters[i].values().data() != parameters[j].values().data());
    }
  }
  CHECK(parameters[3].name() == "layer1");
  CHECK(parameters[3].values().data() ==
        dlib::layer<1>(net).layer_details().get_layer_params().host());
}

TEST_CASE("what a step writes is what the network computes with") {
  Net net;
  net(images[0]);
  const auto parameters = zero_dlib::parameters_of(net);
  for (const auto& parameter : parameters) std::ranges::fill(parameter.values(), 0.0F);
  const auto biases = parameters[3].values().last(3);
  biases[2] = 1;
  CHECK(net(images[0]) == 2);
  biases[1] = 2;
  CHECK(net(images[0]) == 1);
}

TEST_CASE("gradients are there after backward, and again after a release") {
  Net net;
  net(images[0]);
  const auto parameters = zero_dlib::parameters_of(net);
  for (const auto& parameter : parameters) CHECK(parameter.gradient().empty());
  const double loss = backward(net);
  std::vector<std::vector<float>> first;
  for (const auto& parameter : parameters) {
    first.push_back(copy(parameter.gradient()));
    REQUIRE(first.back().size() == parameter.values().size());
    CHECK(std::ranges::any_of(first.back(), [](float g) { return g != 0; }));
    parameter.release_gradient();
    CHECK(parameter.gradient().empty());
  }
  CHECK(backward(net) == loss);
  for (std::size_t i = 0; i < 4; ++i) CHECK(copy(parameters[i].gradient()) == first[i]);
}

TEST_CASE("a layer whose learning rate multiplier is 0 is frozen") {
  Net net;
  net(images[0]);
  dlib::set_learning_rate_multiplier(dlib::layer<1>(net).layer_details(), 0);
  const auto parameters = zero_dlib::parameters_of(net);
  CHECK(parameters[3].attributes().frozen);
  for (std::size_t i = 0; i < 3; ++i) CHECK_FALSE(parameters[i].attributes().frozen);
}

TEST_CASE("a network that has seen nothing is refused, with what to do") {
  Net net;
  CHECK(refusal(net).find("call net(image)") != std::string::npos);
  net(images[0]);
  CHECK(refusal(net) == "none");
  Net copy = net;
  CHECK(refusal(copy) == "none");

  // A new head on a trained body: some layers have parameters.
  Net half_new;
  half_new.subnet().subnet() = net.subnet().subnet();
  CHECK(refusal(half_new).find("call net(image)") != std::string::npos);
  half_new(images[0]);
  CHECK(zero_dlib::parameters_of(half_new).size() == 4);
}

TEST_CASE("layers mark their gradients when these are complete, the output's first") {
  Net net;
  net(images[0]);
  const auto parameters = zero_dlib::parameters_of(net);
  std::vector<std::size_t> marked;
  std::vector<std::vector<float>> then(4);
  zero_dlib::mark_gradients(net, [&](std::size_t i) {
    marked.push_back(i);
    then[i] = copy(parameters[i].gradient());
  });
  backward(net);
  CHECK(marked == std::vector<std::size_t>{2, 1, 0});  // 3 is no Marking layer
  for (const std::size_t i : marked) CHECK(then[i] == copy(parameters[i].gradient()));
}
