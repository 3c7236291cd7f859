// SPDX-License-Identifier: Apache-2.0
// What libtorch's users may hand over, or do to a module behind its optimizer's back.
#include "interop/torch.hpp"

#include <c10/core/InferenceMode.h>
#include <torch/nn/modules/embedding.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/optim/sgd.hpp"
#include "zero/stage.hpp"
#include "zero/zero_sharded.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;
using on_torch::batch;
using on_torch::bytes_of;
using on_torch::Net;
using on_torch::on_ranks;
using on_torch::require;
using zero::TorchHooks;
using Params = zero::BasicTorchParams<float>;
using Named = Params::Named;

/// What making a store of it throws.
std::string refusal_of(const torch::Tensor& tensor) {
  const ranks::Failure failure = ranks::attempt(
      [&] { const Params params{Named{{"fine", torch::zeros({2})}, {"wrong", tensor}}}; });
  CHECK(failure.kind == ranks::Failure::Kind::usage);
  CHECK_THAT(failure.text, ContainsSubstring("'wrong'"));
  return failure.text;
}

/// Two ranks, each with a net, an optimizer and hooks, after a step; then `body(net, params,
/// optimizer, comm)`.
template <class Body>
void after_a_step(Body body) {
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    const auto net = std::make_shared<Net>();
    Params params{*net};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, params, comm};
    {
      const TorchHooks hooks{optimizer};
      net->forward(batch(comm.rank(), 0)).sum().backward();
      optimizer.step();
      net->zero_grad(true);
    }
    body(net, params, optimizer, comm);
  });
}

/// All ranks refuse the step in these words, and nothing changes.
template <class Optimizer>
void check_refused(Optimizer& optimizer, const Net& net, const std::vector<std::string>& words) {
  const std::string before = bytes_of(net.parameters());
  const ranks::Failure failure = ranks::attempt([&] { optimizer.step(); });
  require(failure.kind == ranks::Failure::Kind::usage, "refused: " + failure.text);
  for (const std::string& word : words) {
    require(failure.text.find(word) != std::string::npos, word + " in: " + failure.text);
  }
  require(bytes_of(net.parameters()) == before, "nothing has changed");
}

}  // namespace

TEST_CASE("Tensors that can't be stepped are refused by name") {
  CHECK_THAT(refusal_of(torch::Tensor()), ContainsSubstring("undefined"));
  CHECK_THAT(refusal_of(torch::empty({3}, torch::kMeta)),
             ContainsSubstring("meta") && ContainsSubstring("host memory"));
  CHECK_THAT(refusal_of(torch::zeros({2, 3}).to_sparse()), ContainsSubstring("sparse"));
  CHECK_THAT(refusal_of(torch::zeros({2, 3}).t()),
             ContainsSubstring("not contiguous") && ContainsSubstring("[1, 3]"));
  CHECK_THAT(refusal_of(torch::zeros({4}).slice(0, 0, 4, 2)), ContainsSubstring("not contiguous"));
  CHECK_THAT(refusal_of(torch::zeros({2}, torch::kLong)),
             ContainsSubstring("Long") && ContainsSubstring("float32"));
  CHECK_THAT(refusal_of(torch::zeros({2}, torch::kDouble)), ContainsSubstring("Double"));
  CHECK_THAT(refusal_of(torch::ones({2}).requires_grad_() * 2), ContainsSubstring("no leaf"));
  const auto made_in_inference = [] {
    const c10::InferenceMode mode;
    return torch::ones({2}).requires_grad_();
  };
  CHECK_THAT(refusal_of(made_in_inference()), ContainsSubstring("inference mode"));
}

TEST_CASE("Storage that is shared in part is refused, and whole with half a gradient") {
  const torch::Tensor all = torch::zeros({6});
  on_ranks(1, [&](zero::InProcessCommunicator& comm) {
    Params params{Named{{"left", all.slice(0, 0, 4).detach().requires_grad_()},
                        {"right", all.slice(0, 2, 6).detach().requires_grad_()}}};
    const ranks::Failure failure = ranks::attempt(
        [&] { const zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, params, comm}; });
    require(failure.kind == ranks::Failure::Kind::usage, "refused");
    require(failure.text.find("overlaps") != std::string::npos, failure.text);
  });
  const ranks::Failure failure = ranks::attempt(
      [&] { const Params params{Named{{"a", all}, {"b", all.detach().requires_grad_()}}}; });
  CHECK(failure.kind == ranks::Failure::Kind::usage);
  CHECK_THAT(failure.text, ContainsSubstring("share their storage"));
}

TEST_CASE("Frozen tensors may share their storage") {
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    const torch::Tensor frozen = torch::ones({3});
    torch::Tensor trained = torch::ones({4}).requires_grad_();
    Params params{Named{{"a", frozen}, {"b", frozen.detach()}, {"c", trained}}};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, params, comm};
    trained.sum().backward();
    optimizer.step();
    require(torch::equal(frozen, torch::ones({3})), "frozen");
    require(torch::equal(trained.detach(), torch::zeros({4})), "trained");
  });
}

TEST_CASE("A sparse gradient is refused on all ranks, in backward and in step") {
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(5, 2).sparse(comm.rank() == 1));
    on_torch::fill(embedding->weight, 1);
    Params params{*embedding};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, params, comm};
    const auto backward = [&] { embedding->forward(torch::tensor({1, 3})).sum().backward(); };
    const auto refused = [&](const ranks::Failure& failure) {
      require(failure.kind == ranks::Failure::Kind::usage, "refused: " + failure.text);
      require(failure.text.find("'weight' has a gradient that lies in a sparse layout") !=
                  std::string::npos,
              failure.text);
    };
    {
      const TorchHooks hooks{optimizer};
      const ranks::Failure failure = ranks::attempt(backward);
      if (comm.rank() == 1) refused(failure);
    }
    const std::string before = bytes_of({embedding->weight});
    refused(ranks::attempt([&] { optimizer.step(); }));
    require(bytes_of({embedding->weight}) == before, "nothing has changed");
    // What is put right steps.
    embedding->weight.mutable_grad() = torch::ones({5, 2});
    optimizer.step();
    require(optimizer.steps() == 1, "stepped");
  });
}

TEST_CASE("A gradient that is changed after backward is refused, since it may have been sent") {
  after_a_step([](auto& net, Params&, auto& optimizer, auto& comm) {
    const TorchHooks hooks{optimizer};
    net->forward(batch(comm.rank(), 1)).sum().backward();
    if (comm.rank() == 1) net->first->weight.mutable_grad().mul_(0.5);  // as clip_grad_norm_ does
    check_refused(optimizer, *net, {"'first.weight'", "changed after backward", "clip_grad_norm"});
    optimizer.step();  // what is there now, marked or not
  });
}

TEST_CASE("At stage 3 a backward without its values is refused") {
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    const auto net = std::make_shared<Net>();
    Params params{net};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, params, comm, zero::Stage3{}};
    const TorchHooks hooks{optimizer};
    const ranks::Failure failure =
        ranks::attempt([&] { net->forward(batch(comm.rank(), 0)).sum().backward(); });
    require(failure.kind == ranks::Failure::Kind::usage, "refused: " + failure.text);
    require(failure.text.find("unit 0 is not acquired") != std::string::npos, failure.text);
  });
}

TEST_CASE("A gradient of another type or size is refused") {
  after_a_step([](auto& net, Params&, auto& optimizer, auto&) {
    net->unused.mutable_grad() = torch::ones({5}, torch::kDouble);
    check_refused(optimizer, *net, {"'unused'", "Double", "Float"});
    net->unused.mutable_grad() = torch::ones({5}).slice(0, 0, 4);
    check_refused(optimizer, *net, {"'unused'", "[4]", "[5]"});
  });
}

TEST_CASE("A gradient that is replaced after a backward with hooks is refused") {
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    const auto net = std::make_shared<Net>();
    Params params{*net};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, params, comm};
    const TorchHooks hooks{optimizer};
    for (const bool to_none : {false, true}) {
      net->zero_grad(true);
      net->forward(batch(comm.rank(), 0)).sum().backward();
      torch::Tensor& gradient = net->scale.mutable_grad();
      const torch::Tensor keeps_its_place = gradient;
      gradient = to_none ? torch::Tensor() : gradient * 0.5;
      check_refused(optimizer, *net, {"'scale'", "where it was when it was marked"});
    }
    net->zero_grad(true);
    net->forward(batch(comm.rank(), 0)).sum().backward();
    optimizer.step();
    require(optimizer.steps() == 1, "stepped");
  });
}

TEST_CASE("A parameter that the module gets later is refused until it is added") {
  after_a_step([](auto& net, Params& params, auto& optimizer, auto& comm) {
    if (comm.rank() == 1) net->register_parameter("late", torch::ones({3}));
    check_refused(optimizer, *net, {"'late'", "append_new"});
    if (comm.rank() == 0) net->register_parameter("late", torch::ones({3}));
    require(params.append_new(1) == 1 && params.append_new(1) == 0, "one more");
    check_refused(optimizer, *net, {"add_param_group"});
    optimizer.add_param_group(zero::Sgd{.lr = 0.5});
    const TorchHooks hooks{optimizer};
    torch::Tensor late = net->named_parameters()["late"];
    (late * 4).sum().backward();
    optimizer.step();
    require(torch::equal(late.detach(), torch::full({3}, -1.F)), "stepped by its group's options");
  });
}

TEST_CASE("A parameter that is gone, or trained after all, is refused") {
  after_a_step([](auto& net, Params&, auto& optimizer, auto&) {
    net->unregister_module("first");
    check_refused(optimizer, *net, {"has 4 parameters", "had 6"});
  });
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    const auto net = std::make_shared<Net>();
    net->unused.requires_grad_(false);
    Params params{*net};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, params, comm};
    if (comm.rank() == 0) net->unused.requires_grad_(true);
    check_refused(optimizer, *net, {"'unused'", "requires gradients now"});
  });
}

TEST_CASE("A module may have several optimizers of different tensors, but not of the same") {
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    const auto net = std::make_shared<Net>();
    Params weights{Named{{"first", net->first->weight}, {"second", net->second->weight}}};
    Params biases{Named{{"first", net->first->bias}, {"second", net->second->bias}}};
    zero::ZeroSharded fast{zero::Sgd{.lr = 1}, weights, comm};
    zero::ZeroSharded slow{zero::Sgd{.lr = 0.5}, biases, comm};
    const TorchHooks of_fast{fast}, of_slow{slow};
    net->forward(batch(comm.rank(), 0)).sum().backward();
    const torch::Tensor bias = net->second->bias.detach().clone();
    fast.step();
    require(torch::equal(bias, net->second->bias.detach()), "not of the first optimizer");
    slow.step();
    require(torch::equal(bias - 2 * net->scale.detach(), net->second->bias.detach()),
            "of the second");
  });
  after_a_step([](auto& net, Params& params, auto& optimizer, auto& comm) {
    zero::ZeroSharded second{zero::Sgd{.lr = 1}, params, comm};
    check_refused(optimizer, *net, {"no longer where they were"});
    net->scale.backward();
    second.step();
    require(second.steps() == 1, "the last one made has the parameters");
  });
}

TEST_CASE("Values that a module moved are noticed") {
  after_a_step([](auto& net, Params&, auto& optimizer, auto&) {
    net->unused.set_data(torch::zeros({5}));
    check_refused(optimizer, *net, {"'unused'", "no longer where they were"});
  });
  after_a_step([](auto& net, Params&, auto& optimizer, auto&) {
    net->to(torch::kDouble);
    const ranks::Failure failure = ranks::attempt([&] { optimizer.step(); });
    require(failure.kind == ranks::Failure::Kind::usage, "refused: " + failure.text);
  });
}

TEST_CASE("A module and its gradients outlive their optimizer") {
  const auto net = std::make_shared<Net>();
  on_ranks(1, [&](zero::InProcessCommunicator& comm) {
    Params params{*net};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, params, comm};
    const TorchHooks hooks{optimizer};
    net->forward(batch(0, 0)).sum().backward();
    optimizer.step();
  });
  net->zero_grad(true);
  net->forward(batch(0, 1)).sum().backward();  // no hook is left
  CHECK(net->scale.grad().defined());
}

TEST_CASE("Hooks whose optimizer is gone say so") {
  on_ranks(1, [&](zero::InProcessCommunicator& comm) {
    const auto net = std::make_shared<Net>();
    Params params{*net};
    using Optimizer = decltype(zero::ZeroSharded{zero::Sgd{.lr = 1}, params, comm});
    auto optimizer = std::make_unique<Optimizer>(zero::Sgd{.lr = 1}, params, comm);
    const TorchHooks hooks{*optimizer};
    optimizer.reset();
    const ranks::Failure failure = ranks::attempt([&] { net->scale.backward(); });
    require(failure.kind == ranks::Failure::Kind::usage, "refused: " + failure.text);
    require(failure.text.find("is gone") != std::string::npos, failure.text);
  });
}

TEST_CASE("Modules that differ between ranks are refused on all") {
  on_ranks(3, [&](zero::InProcessCommunicator& comm) {
    const auto net = std::make_shared<Net>();
    if (comm.rank() == 2) net->register_parameter("more", torch::ones({1}));
    net->register_buffer("mean", torch::zeros({comm.rank() == 1 ? 2 : 3}));
    Params params{*net};
    const auto refused = [&](const ranks::Failure& failure, int rank) {
      require(failure.kind == ranks::Failure::Kind::usage, "refused: " + failure.text);
      require(failure.text.find("between ranks 0 and " + std::to_string(rank)) != std::string::npos,
              failure.text);
    };
    refused(ranks::attempt([&] { zero::broadcast_values(params, comm); }), 2);
    refused(ranks::attempt([&] { zero::broadcast_buffers(*net, comm); }), 1);
    // As many elements, of another shape, and a tie that one rank has.
    const auto same = std::make_shared<Net>();
    same->register_buffer("mean", torch::zeros({6}).view({comm.rank() == 2 ? 3 : 2, -1}));
    refused(ranks::attempt([&] { zero::broadcast_buffers(*same, comm); }), 2);
    const torch::Tensor a = torch::zeros({6}).requires_grad_();
    const torch::Tensor b = torch::zeros({6}).requires_grad_();
    Params flat{Named{{"a", comm.rank() == 1 ? torch::zeros({2, 3}).requires_grad_() : a}}};
    refused(ranks::attempt([&] { zero::broadcast_values(flat, comm); }), 1);
    Params tied{Named{{"a", a}, {"b", comm.rank() == 2 ? a : b}}};
    refused(ranks::attempt([&] { zero::broadcast_values(tied, comm); }), 2);
    refused(ranks::attempt([&] { zero::average_gradients(tied, comm); }), 2);
  });
}

TEST_CASE("What one rank's mean gradients can't take is refused on all, and all can go on") {
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    torch::Tensor tensor = torch::zeros({2}).requires_grad_();
    Params params{Named{{"tensor", tensor}}};
    tensor.mutable_grad() = torch::ones({2});
    if (comm.rank() == 1) tensor.mutable_grad() = torch::ones({2}).to_sparse();
    const ranks::Failure failure = ranks::attempt([&] { zero::average_gradients(params, comm); });
    require(failure.kind == ranks::Failure::Kind::usage, "refused");
    require(failure.text.find("'tensor' has a gradient that lies in a sparse") != std::string::npos,
            failure.text);
    tensor.mutable_grad() = torch::full({2}, comm.rank(), torch::kFloat);
    zero::average_gradients(params, comm);
    require(torch::equal(tensor.grad(), torch::full({2}, 0.5F)), "the same step's on all ranks");
  });
}

TEST_CASE("A buffer that can't be sent is refused by name, on all ranks") {
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    const auto refused = [&](const torch::Tensor& buffer) {
      const auto net = std::make_shared<Net>();
      net->register_buffer("wrong", comm.rank() == 0 ? torch::empty({2}) : buffer);
      const ranks::Failure failure = ranks::attempt([&] { zero::broadcast_buffers(*net, comm); });
      require(failure.kind == ranks::Failure::Kind::usage, "refused: " + failure.text);
      require(failure.text.find("'wrong'") != std::string::npos, failure.text);
    };
    refused(torch::empty({2}, torch::kMeta));
    refused(torch::zeros({1}).expand({2}));
  });
}
