// SPDX-License-Identifier: Apache-2.0
// libtorch's modules as stores: what is stepped, when gradients go, and what replicas share.
#include "interop/torch.hpp"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/bucket_view/no_view.hpp"
#include "zero/bucket_view/param_and_grad_view.hpp"
#include "zero/bucket_view/param_view.hpp"
#include "zero/optim/adam.hpp"
#include "zero/optim/sgd.hpp"
#include "zero/stage.hpp"
#include "zero/zero_sharded.hpp"

namespace {

using on_torch::batch;
using on_torch::bytes_of;
using on_torch::Net;
using on_torch::on_ranks;
using on_torch::require;
using zero::BasicTorchParams;
using zero::TorchHooks;
using zero::TorchParams;

/// A few steps of training with hooks; what the parameters are then, on rank 0, which all ranks
/// have.
template <class... Policy>
std::string trained(int world, Policy... policies) {
  std::vector<std::string> values(static_cast<std::size_t>(world));
  on_ranks(world, [&](zero::InProcessCommunicator& comm) {
    const auto net = std::make_shared<Net>();
    BasicTorchParams<float> params{*net};
    zero::ZeroSharded optimizer{zero::AdamW{.lr = 0.05}, params, comm, policies...};
    const TorchHooks hooks{optimizer};
    for (int step = 0; step < 4; ++step) {
      net->zero_grad(true);
      net->forward(batch(comm.rank(), step)).pow(2).mean().backward();
      optimizer.step();
    }
    require(optimizer.steps(0) == 4, "stepped four times");
    values[static_cast<std::size_t>(comm.rank())] = bytes_of(net->parameters());
  });
  for (const std::string& other : values) CHECK(other == values[0]);
  return values[0];
}

}  // namespace

TEST_CASE("A module's parameters are a store") {
  const auto net = std::make_shared<Net>();
  net->first->bias.requires_grad_(false);
  TorchParams params{*net};
  REQUIRE(params.size() == 6);
  std::vector<std::string> names;
  for (const zero::TorchParam& param : params) names.push_back(param.name());
  CHECK(names == std::vector<std::string>{"scale", "unused", "first.weight", "first.bias",
                                          "second.weight", "second.bias"});
  CHECK(params[0].shape().empty());
  CHECK(std::vector<std::size_t>(params[2].shape().begin(), params[2].shape().end()) ==
        std::vector<std::size_t>{7, 3});
  CHECK(params[3].attributes().frozen);
  CHECK_FALSE(params[2].attributes().frozen);
  const auto values = std::get<std::span<float>>(params[2].values());
  CHECK(values.data() == net->first->weight.data_ptr<float>());
  CHECK(values.size() == 21);
  CHECK(std::get<std::span<float>>(params[2].gradient()).empty());
  net->forward(batch(0, 0)).sum().backward();
  CHECK(std::get<std::span<float>>(params[2].gradient()).data() ==
        net->first->weight.grad().data_ptr<float>());
  CHECK(std::get<std::span<float>>(params[1].gradient()).empty());
}

TEST_CASE("At stage 3 a unit is there from acquire to release, with the same bits") {
  const std::string replicated = trained(2, zero::Replicated{});
  std::string values;
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    const auto net = std::make_shared<Net>();
    BasicTorchParams<float> params{*net};
    for (auto& param : params) {
      if (param.name().starts_with("second")) param.attributes().unit = 1;
    }
    zero::ZeroSharded optimizer{zero::AdamW{.lr = 0.05}, params, comm, zero::Stage3{}};
    const TorchHooks hooks{optimizer};
    for (int step = 0; step < 4; ++step) {
      for (const int unit : {0, 1}) optimizer.acquire(unit);
      net->forward(batch(comm.rank(), step)).pow(2).mean().backward();
      for (const int unit : {0, 1}) optimizer.release(unit);
      optimizer.step();
    }
    for (const int unit : {0, 1}) optimizer.acquire(unit);
    if (comm.rank() == 0) values = bytes_of(net->parameters());
    for (const int unit : {0, 1}) optimizer.release(unit);
  });
  CHECK(values == replicated);
}

TEST_CASE("Sharded training has the replicated one's bits, in every stage and view") {
  for (const int world : {1, 2, 3}) {
    const std::string replicated = trained(world, zero::Replicated{});
    CHECK(trained(world) == replicated);
    CHECK(trained(world, zero::ParamView{64}) == replicated);
    CHECK(trained(world, zero::NoView{}) == replicated);
    CHECK(trained(world, zero::ParamAndGradView{}) == replicated);
    CHECK(trained(world, zero::Stage2{}) == replicated);
  }
}

TEST_CASE("Tensors of all types are stepped as plain memory is") {
  for (const int world : {1, 2, 3}) {
    on_ranks(world, [&](zero::InProcessCommunicator& comm) {
      const auto types = {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16};
      std::vector<torch::Tensor> tensors;
      std::vector<at::Tensor> copies, gradients;
      for (const auto type : types) {
        for (const std::vector<std::int64_t>& shape :
             {std::vector<std::int64_t>{}, {0, 3}, {5, 7}, {129}}) {
          torch::Tensor tensor = torch::empty(shape, torch::TensorOptions(type));
          on_torch::fill(tensor, static_cast<unsigned>(tensors.size()));
          tensors.push_back(tensor.requires_grad_());
          copies.push_back(tensor.detach().clone());
          gradients.push_back(torch::empty_like(copies.back()));
        }
      }
      TorchParams params{tensors};
      using Raw = std::variant<std::span<float>, std::span<double>, std::span<c10::Half>,
                               std::span<c10::BFloat16>>;
      struct Plain {
        std::string label;
        std::vector<std::size_t> extents;
        Raw memory, slope;
        [[nodiscard]] const std::string& name() const { return label; }
        [[nodiscard]] std::span<const std::size_t> shape() const { return extents; }
        [[nodiscard]] Raw values() const { return memory; }
        [[nodiscard]] Raw gradient() const { return slope; }
      };
      const auto span_of = [](const at::Tensor& tensor) -> Raw {
        const auto count = static_cast<std::size_t>(tensor.numel());
        switch (tensor.scalar_type()) {
          case torch::kFloat: return std::span(tensor.data_ptr<float>(), count);
          case torch::kDouble: return std::span(tensor.data_ptr<double>(), count);
          case torch::kHalf: return std::span(tensor.data_ptr<c10::Half>(), count);
          default: return std::span(tensor.data_ptr<c10::BFloat16>(), count);
        }
      };
      std::vector<Plain> plain;
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        const auto& shape = params[i].shape();
        plain.push_back({params[i].name(),
                         {shape.begin(), shape.end()},
                         span_of(copies[i]),
                         span_of(gradients[i])});
      }
      zero::ZeroSharded optimizer{zero::AdamW{.lr = 0.05}, params, comm};
      zero::ZeroSharded reference{zero::AdamW{.lr = 0.05}, plain, comm};
      for (int step = 0; step < 3; ++step) {
        for (std::size_t i = 0; i < tensors.size(); ++i) {
          on_torch::fill(gradients[i], static_cast<unsigned>(100 * step + comm.rank()) +
                                           static_cast<unsigned>(i));
          tensors[i].mutable_grad() = gradients[i].clone();
        }
        optimizer.step();
        reference.step();
        require(bytes_of(tensors) == bytes_of(copies), "tensors are stepped as memory is");
      }
      require(optimizer.steps() == 3, "three steps");
    });
  }
}

TEST_CASE("Hooks mark each gradient once, as backward makes it") {
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    const auto net = std::make_shared<Net>();
    BasicTorchParams<float> params{*net};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 0.5}, params, comm, zero::Stage2{}};
    {
      const TorchHooks hooks{optimizer};
      net->forward(batch(comm.rank(), 0)).sum().backward();
      // Stage 2 has taken what was marked, and let go of it.
      for (std::size_t i = 0; i < params.size(); ++i) {
        require(!params[i].tensor().grad().defined(), params[i].name() + " was taken");
      }
      const ranks::Failure twice =
          ranks::attempt([&] { net->forward(batch(0, 0)).sum().backward(); });
      require(twice.kind == ranks::Failure::Kind::usage, "a second backward is refused");
      require(twice.text.find("marked") != std::string::npos, twice.text);
      optimizer.step();
      require(optimizer.steps(2) == 1 && optimizer.steps(1) == 0, "the unused one is not stepped");
    }
    net->zero_grad(true);
    net->forward(batch(comm.rank(), 1)).sum().backward();
    require(params[2].tensor().grad().defined(), "without hooks nothing is marked");
    optimizer.step();
    require(optimizer.steps(2) == 2, "step takes what is there");
  });
}

TEST_CASE("Several backward passes make one step where they are accumulated") {
  const auto run = [](bool in_passes) {
    std::string values;
    on_ranks(2, [&](zero::InProcessCommunicator& comm) {
      const auto net = std::make_shared<Net>();
      BasicTorchParams<float> params{*net};
      zero::ZeroSharded optimizer{zero::Sgd{.lr = 0.5}, params, comm};
      const TorchHooks hooks{optimizer};
      const torch::Tensor a = net->forward(batch(comm.rank(), 0)).sum();
      const torch::Tensor b = net->forward(batch(comm.rank(), 1)).sum();
      if (in_passes) {
        {
          const auto scope = optimizer.accumulate(zero::Accumulation::local);
          a.backward();
        }
        b.backward();
      } else {
        (a + b).backward();
      }
      optimizer.step();
      if (comm.rank() == 0) values = bytes_of(net->parameters());
    });
    return values;
  };
  CHECK(run(true) == run(false));
}

TEST_CASE("A gradient that a rank lacks counts as zeros, one that all lack is not stepped") {
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    const auto net = std::make_shared<Net>();
    BasicTorchParams<float> params{*net};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, params, comm,
                                zero::Settings{.gradient_scale = 1}};
    const TorchHooks hooks{optimizer};
    if (comm.rank() == 1) (net->unused * torch::arange(5)).sum().backward();
    const torch::Tensor before = net->unused.detach().clone();
    const std::string first = bytes_of({net->first->weight});
    optimizer.step();
    require(torch::equal(net->unused.detach(), before - torch::arange(5)), "one rank's gradient");
    require(bytes_of({net->first->weight}) == first && optimizer.steps(2) == 0, "nobody's");
  });
}

TEST_CASE("Tied tensors are stepped once, by the sum of their gradients") {
  // One tensor under two names, or two tensors over one storage.
  struct Tied : torch::nn::Module {
    torch::Tensor encoder, decoder;
    explicit Tied(bool by_storage) {
      encoder = register_parameter("encoder", torch::arange(6, torch::kFloat).view({2, 3}));
      if (by_storage) {
        decoder = register_parameter("decoder", torch::zeros({2, 3}));
        decoder.set_data(encoder.data());
      } else {
        decoder = register_parameter("decoder", encoder);
      }
    }
  };
  for (const bool by_storage : {false, true}) {
    for (const bool moves_gradients : {false, true}) {
      on_ranks(2, [&](zero::InProcessCommunicator& comm) {
        const auto module = std::make_shared<Tied>(by_storage);
        BasicTorchParams<float> params{*module};
        require(params.size() == 2 && params[1].attributes().alias == 0, "tied");
        const auto train = [&](auto view) {
          zero::ZeroSharded optimizer{zero::Sgd{.lr = 0.5}, params, comm, view};
          const TorchHooks hooks{optimizer};
          for (int step = 1; step <= 2; ++step) {
            module->zero_grad(step == 2);
            (module->encoder * 2 + module->decoder * 4).sum().backward();
            optimizer.step();
          }
          require(optimizer.layout().elements(0) == 6, "one place");
        };
        if (moves_gradients) {
          train(zero::ParamAndGradView{});
        } else {
          train(zero::Stage2{});
        }
        const torch::Tensor wanted = torch::arange(6, torch::kFloat).view({2, 3}) - 6;
        require(torch::equal(module->encoder.detach(), wanted), "the sum of both uses");
        require(torch::equal(module->decoder.detach(), wanted), "seen through both names");
      });
    }
  }
}

TEST_CASE("Ties' gradients are added even where autograd gives them one memory") {
  for (const bool moves_gradients : {false, true}) {
    on_ranks(2, [&](zero::InProcessCommunicator& comm) {
      torch::Tensor a = torch::zeros({6}).requires_grad_(), b = torch::zeros({6}).requires_grad_();
      b.set_data(a.data());
      BasicTorchParams<float> params{std::vector<torch::Tensor>{a, b}};
      const auto train = [&](auto view) {
        zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, params, comm, view};
        // As autograd leaves them for a.view({2, 3}) + b.view({2, 3}).
        const torch::Tensor gradient = torch::full({6}, 2, torch::kFloat);
        a.mutable_grad() = gradient.view({6});
        b.mutable_grad() = gradient.view({6});
        optimizer.step();
      };
      if (moves_gradients) {
        train(zero::ParamAndGradView{});
      } else {
        train(zero::ParamView{});
      }
      require(torch::equal(a.detach(), torch::full({6}, -4.F)), "the sum of both uses");
    });
  }
}

TEST_CASE("Gradients come back into their buckets after they were set to none") {
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    const auto net = std::make_shared<Net>();
    BasicTorchParams<float> params{*net};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, params, comm, zero::ParamAndGradView{}};
    const float* const place = net->scale.grad().data_ptr<float>();
    net->zero_grad(true);
    require(std::get<std::span<float>>(params[0].gradient()).empty(), "none is none");
    const float before = net->scale.item<float>();
    (net->scale * 3).backward();
    optimizer.step();
    require(net->scale.grad().data_ptr<float>() == place, "back in its place");
    require(net->scale.item<float>() == before - 3, "stepped by it");
    require(optimizer.steps(2) == 0, "what stays none is not stepped");
  });
}

TEST_CASE("A graph of gradients ends where they come back into their buckets") {
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    const auto net = std::make_shared<Net>();
    BasicTorchParams<float> params{*net};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, params, comm, zero::ParamAndGradView{}};
    net->zero_grad(true);
    const float before = net->scale.item<float>();
    const torch::Tensor unused = net->unused.detach().clone();
    (net->scale * net->scale).backward({}, true, /*create_graph=*/true);
    net->unused.mutable_grad() = torch::ones({5, 1});  // of another shape, but as many
    optimizer.step();
    require(net->scale.item<float>() == before - 2 * before, "stepped");
    require(!net->scale.grad().requires_grad(), "numbers alone");
    require(torch::equal(net->unused.detach(), unused - 1), "read in order");
  });
}

TEST_CASE("An optimizer that is made in inference mode trains outside of it") {
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    const auto net = std::make_shared<Net>();
    BasicTorchParams<float> params{*net};
    zero::ZeroSharded optimizer = [&] {
      const c10::InferenceMode mode;
      return zero::ZeroSharded{zero::Sgd{.lr = 1}, params, comm, zero::ParamAndGradView{}};
    }();
    const float before = net->scale.item<float>();
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      (net->scale * 3).backward();
      const c10::InferenceMode mode;
      optimizer.step();
    }
    require(net->scale.item<float>() == before - 6, "twice");
  });
}

TEST_CASE("A gradient that a function leaves undefined is none") {
  struct First : torch::autograd::Function<First> {
    static torch::Tensor forward(torch::autograd::AutogradContext*, torch::Tensor a,
                                 torch::Tensor b) {
      return a + b;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list gradients) {
      return {gradients[0], torch::Tensor()};
    }
  };
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    torch::Tensor a = torch::zeros({2}).requires_grad_(), b = torch::zeros({2}).requires_grad_();
    BasicTorchParams<float> params{std::vector<torch::Tensor>{a, b}};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, params, comm};
    const TorchHooks hooks{optimizer};
    First::apply(a, b).sum().backward();
    optimizer.step();
    require(optimizer.steps(0) == 1 && optimizer.steps(1) == 0, "one of two is stepped");
  });
}

TEST_CASE("A gradient of other strides is read row by row") {
  on_ranks(2, [&](zero::InProcessCommunicator& comm) {
    torch::Tensor tensor = torch::zeros({2, 3}).requires_grad_();
    BasicTorchParams<float> params{std::vector<torch::Tensor>{tensor}};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, params, comm};
    tensor.mutable_grad() = torch::arange(6, torch::kFloat).view({3, 2}).t();
    optimizer.step();
    require(torch::equal(tensor.detach(), -torch::arange(6, torch::kFloat).view({3, 2}).t()),
            "element by element");
  });
}

TEST_CASE("A graph of before a step can't be used after it") {
  on_ranks(1, [&](zero::InProcessCommunicator& comm) {
    const auto net = std::make_shared<Net>();
    BasicTorchParams<float> params{*net};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 1}, params, comm};
    const torch::Tensor loss = net->forward(batch(0, 0)).sum();
    loss.backward({}, true);
    optimizer.step();
    std::string text;
    try {
      loss.backward();
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    }
    require(text.find("modified by an inplace operation") != std::string::npos, text);
  });
}

TEST_CASE("Replicas begin alike, and buffers are those of one rank") {
  for (const int root : {0, 2}) {
    on_ranks(3, [&](zero::InProcessCommunicator& comm) {
      const auto net = std::make_shared<Net>();
      const auto seed = static_cast<unsigned>(comm.rank());
      for (const torch::Tensor& parameter : net->parameters()) on_torch::fill(parameter, seed);
      net->register_buffer("mean", torch::full({3}, comm.rank(), torch::kFloat));
      net->register_buffer("odd", torch::full({2, 2}, comm.rank(), torch::kInt8).t());
      net->register_buffer("flag", torch::full({}, comm.rank() == 1, torch::kBool));
      net->register_buffer("count", torch::full({}, 1000 + comm.rank(), torch::kLong));
      net->register_buffer("none", torch::zeros({0}));
      TorchParams params{*net};
      zero::broadcast_values(params, comm, root);
      zero::broadcast_buffers(*net, comm, root);
      for (const torch::Tensor& parameter : net->parameters()) {
        const torch::Tensor wanted = torch::empty_like(parameter);
        on_torch::fill(wanted, static_cast<unsigned>(root));
        require(torch::equal(parameter.detach(), wanted.detach()), "the root's values");
      }
      const auto buffers = net->named_buffers();
      require(torch::equal(buffers["mean"], torch::full({3}, root, torch::kFloat)), "mean");
      require(torch::equal(buffers["odd"], torch::full({2, 2}, root, torch::kInt8)), "odd");
      require(buffers["flag"].item<bool>() == (root == 1), "flag");
      require(buffers["count"].item<std::int64_t>() == 1000 + root, "count");
    });
  }
}

TEST_CASE("Mean gradients serve an optimizer that knows of no ranks") {
  for (const std::size_t bucket : {std::size_t{1}, std::size_t{1} << 20}) {
    on_ranks(4, [&](zero::InProcessCommunicator& comm) {
      std::vector<torch::Tensor> tensors{torch::zeros({3}), torch::zeros({2, 2}, torch::kDouble),
                                         torch::zeros({5}), torch::zeros({2}), torch::zeros({0})};
      for (torch::Tensor& tensor : tensors) tensor.requires_grad_();
      tensors[3].requires_grad_(false);
      TorchParams params{tensors};
      tensors[0].mutable_grad() = torch::full({3}, comm.rank() + 1, torch::kFloat);
      if (comm.rank() == 3) tensors[1].mutable_grad() = torch::full({2, 2}, 8, torch::kDouble);
      tensors[4].mutable_grad() = torch::zeros({0});
      zero::average_gradients(params, comm, bucket);
      require(torch::equal(tensors[0].grad(), torch::full({3}, 2.5F)), "the mean");
      require(torch::equal(tensors[1].grad(), torch::full({2, 2}, 2, torch::kDouble)),
              "with zeros");
      require(!tensors[2].grad().defined() && !tensors[3].grad().defined(), "none stays none");
    });
  }
}
