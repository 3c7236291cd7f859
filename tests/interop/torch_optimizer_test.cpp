// SPDX-License-Identifier: Apache-2.0
// libtorch's optimizers with their state sharded, against the same ones over whole tensors: the
// same bits.
#include <zero/interop/torch/optimizer.hpp>
#include <zero/partition/balanced.hpp>
#include <zero/stage.hpp>
#include <zero/zero_sharded.hpp>

#include <ATen/Parallel.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "../ranks.hpp"
#include "catch.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;
using ::torch::optim::Adagrad, ::torch::optim::Adam, ::torch::optim::AdamW, ::torch::optim::RMSprop,
    ::torch::optim::SGD;
using zero::TorchOptimizer, zero::TorchSlots;

// ---- An optimizer of a user's

struct LionOptions : ::torch::optim::OptimizerCloneableOptions<LionOptions> {
  LionOptions(double rate) : lr_(rate) {}
  TORCH_ARG(double, lr);
};
struct LionState : ::torch::optim::OptimizerCloneableParamState<LionState> {
  TORCH_ARG(at::Tensor, exp_avg);
};

/// Chen et al., arXiv:2302.06675, without decay.
/// @tparam by_row keeps too little state for `TorchSlots`
template <bool by_row>
class BasicLion : public ::torch::optim::Optimizer {
 public:
  BasicLion(std::vector<at::Tensor> parameters, LionOptions defaults)
      : Optimizer(std::move(parameters), std::make_unique<LionOptions>(defaults)) {}
  BasicLion(std::vector<::torch::optim::OptimizerParamGroup> groups, LionOptions defaults)
      : Optimizer(std::move(groups), std::make_unique<LionOptions>(defaults)) {}

  at::Tensor step(LossClosure = nullptr) override {
    const at::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      const double lr = static_cast<LionOptions&>(group.options()).lr();
      TORCH_CHECK(lr < 100, "a rate that only a step refuses");
      for (at::Tensor& parameter : group.params()) {
        const at::Tensor gradient = parameter.grad();
        if (!gradient.defined()) continue;
        auto& state = state_[zero::detail::torch_state_key(*this, parameter)];
        if (state == nullptr) {
          auto first = std::make_unique<LionState>();
          first->exp_avg(by_row ? at::zeros({parameter.size(0), 1}, parameter.options())
                                : at::zeros_like(parameter));
          state = std::move(first);
        }
        at::Tensor& exp_avg = static_cast<LionState&>(*state).exp_avg();
        parameter.add_(exp_avg.mul(0.9).add(gradient, 0.1).sign(), -lr);
        // In new memory, which zero must bring back to where it keeps the state.
        exp_avg = exp_avg.mul(0.99).add(by_row ? gradient.mean(-1, true) : gradient, 0.01);
      }
    }
    return {};
  }
};
using Lion = BasicLion<false>;
using LionByRow = BasicLion<true>;

}  // namespace

template <bool by_row>
struct zero::TorchSlots<BasicLion<by_row>> {
  using Options = LionOptions;
  using State = LionState;
  static constexpr std::array<std::string_view, 1> slots{"exp_avg"};
  static std::array<at::Tensor*, 1> tensors(State& state) { return {&state.exp_avg()}; }
};

namespace {

// ---- Parameters, typed at run time

at::Tensor draw(at::IntArrayRef shape, at::ScalarType type, unsigned seed) {
  std::mt19937 random(seed);
  at::Tensor drawn = at::empty(shape, at::kDouble);
  const std::span numbers(drawn.data_ptr<double>(), static_cast<std::size_t>(drawn.numel()));
  for (double& x : numbers) x = static_cast<double>(random()) / 4294967296. - 0.5;
  return drawn.to(type);
}

class Param {
 public:
  Param(std::string name, at::Tensor values, std::size_t group)
      : name_(std::move(name)), tensor_(std::move(values)), group_(group) {
    for (const std::int64_t extent : tensor_.sizes()) {
      shape_.push_back(static_cast<std::size_t>(extent));
    }
  }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return shape_; }
  [[nodiscard]] std::size_t group() const { return group_; }
  [[nodiscard]] auto values() const { return span_of(tensor_); }
  [[nodiscard]] auto gradient() const { return span_of(tensor_.grad()); }
  [[nodiscard]] at::Tensor tensor() const { return tensor_; }
  void set_gradient(const at::Tensor& gradient) { tensor_.mutable_grad() = gradient; }

 private:
  [[nodiscard]] std::variant<std::span<float>, std::span<double>> span_of(
      const at::Tensor& t) const {
    const std::size_t n = t.defined() ? static_cast<std::size_t>(t.numel()) : 0;
    if (tensor_.scalar_type() == at::kDouble) {
      return std::span<double>(n == 0 ? nullptr : t.data_ptr<double>(), n);
    }
    return std::span<float>(n == 0 ? nullptr : t.data_ptr<float>(), n);
  }
  std::string name_;
  at::Tensor tensor_;
  std::size_t group_;
  std::vector<std::size_t> shape_{};
};
using Store = std::vector<Param>;

constexpr std::size_t steps = 5, most_ranks = 4;
constexpr std::size_t late = 4, rare = 5, wide = 6;  ///< parameters

/// One parameter has more elements than libtorch gives one thread, one has none.
Store make_store() {
  Store store;
  const auto add = [&](const char* name, at::IntArrayRef shape, at::ScalarType type,
                       std::size_t group) {
    store.emplace_back(name, draw(shape, type, static_cast<unsigned>(store.size())), group);
  };
  add("matrix", {13, 7}, at::kDouble, 1);
  add("scalar", {}, at::kFloat, 1);
  add("empty", {0, 3}, at::kFloat, 0);
  add("deep", {2, 3, 5}, at::kFloat, 0);
  add("late", {5}, at::kDouble, 0);
  add("rare", {9}, at::kFloat, 1);
  add("wide", {70'001}, at::kFloat, 0);
  return store;
}

/// An undefined tensor where this rank has no gradient: of the last two before "wide", sometimes.
at::Tensor gradient_of(const Store& store, std::size_t i, std::size_t rank, std::size_t ranks,
                       std::size_t step) {
  static const auto all = [] {
    std::vector<at::Tensor> drawn;
    unsigned seed = 100;
    const Store shapes = make_store();
    for (std::size_t k = 0; k < most_ranks * steps; ++k) {
      for (const Param& parameter : shapes) {
        const at::Tensor tensor = parameter.tensor();
        drawn.push_back(draw(tensor.sizes(), tensor.scalar_type(), seed++));
      }
    }
    return drawn;
  }();
  if (i == late && step < 2) return {};
  if (i == rare && (step == 1 || rank != ranks - 1)) return {};
  return all[(rank * steps + step) * store.size() + i];
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         (a.numel() == 0 ||
          std::memcmp(a.contiguous().data_ptr(), b.contiguous().data_ptr(), a.nbytes()) == 0);
}

/// The mean as zero forms it: a sum in the order of ranks, times 1 / K.
void give_mean_gradients(Store& store, std::size_t ranks, std::size_t step) {
  for (std::size_t i = 0; i < store.size(); ++i) {
    at::Tensor sum;
    for (std::size_t r = 0; r < ranks; ++r) {
      const at::Tensor gradient = gradient_of(store, i, r, ranks, step);
      if (gradient.defined()) sum = sum.defined() ? sum + gradient : gradient.clone();
    }
    if (sum.defined()) sum.mul_(1. / static_cast<double>(ranks));
    store[i].set_gradient(sum);
  }
}

template <class O>
using Options = typename TorchSlots<O>::Options;

template <class O>
Options<O>& options_of(O& optimizer, std::size_t group) {
  return static_cast<Options<O>&>(optimizer.param_groups()[group].options());
}

/// libtorch's own, over all parameters.
template <class O>
O plain_optimizer(const Store& store, const std::vector<TorchOptimizer<O>>& groups) {
  std::vector<std::vector<at::Tensor>> tensors(groups.size());
  for (const Param& parameter : store) tensors[parameter.group()].push_back(parameter.tensor());
  O plain(std::vector<::torch::optim::OptimizerParamGroup>(tensors.begin(), tensors.end()),
          groups[0].options);
  for (std::size_t g = 0; g < groups.size(); ++g) options_of(plain, g) = groups[g].options;
  return plain;
}

/// What differs between a parameter's state in two optimizers.
template <class O>
std::string state_difference(O& a, const Param& in_a, O& b, const Param& in_b) {
  const auto state_in = [](O& optimizer, const at::Tensor& tensor) {
    const auto found = optimizer.state().find(zero::detail::torch_state_key(optimizer, tensor));
    return found == optimizer.state().end()
               ? nullptr
               : static_cast<typename TorchSlots<O>::State*>(found->second.get());
  };
  auto* const mine = state_in(a, in_a.tensor());
  auto* const theirs = state_in(b, in_b.tensor());
  if ((mine == nullptr) != (theirs == nullptr)) return in_a.name() + ": no state; ";
  if (mine == nullptr) return {};
  if constexpr (requires { mine->step(); }) {
    if (mine->step() != theirs->step()) return in_a.name() + ": another step; ";
  }
  for (std::size_t s = 0; s < TorchSlots<O>::slots.size(); ++s) {
    const at::Tensor kept = *TorchSlots<O>::tensors(*mine)[s];
    const at::Tensor own = *TorchSlots<O>::tensors(*theirs)[s];
    // RMSprop, centred: a momentum buffer that nobody uses.
    if (!own.defined() && kept.defined() && kept.abs().sum().item<double>() == 0) continue;
    if (!same_bits(kept, own)) return in_a.name() + ": another state; ";
  }
  return {};
}

/// Trains at `ranks` ranks and with libtorch alone; tells what differs.
template <class O, class Stage = zero::Stage1>
std::string difference(const std::vector<TorchOptimizer<O>>& groups, std::size_t ranks,
                       Stage stage = {}) {
  const auto reduce_lr = [](Options<O>& options) { options.lr(options.lr() * 0.25); };
  Store whole = make_store();
  O plain = plain_optimizer(whole, groups);
  for (std::size_t step = 0; step < steps; ++step) {
    if (step == 3) reduce_lr(options_of(plain, 1));
    give_mean_gradients(whole, ranks, step);
    plain.step();
  }

  std::vector<std::string> found(ranks);
  std::vector<std::size_t> kept(ranks);
  ranks::rethrow_any(ranks::run(static_cast<int>(ranks), [&](zero::InProcessCommunicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    Store store = make_store();
    zero::ZeroSharded sharded{zero::Groups<TorchOptimizer<O>>{groups}, store, comm,
                              zero::BalancedPartition{}, stage};
    for (std::size_t step = 0; step < steps; ++step) {
      if (step == 3) reduce_lr(sharded.groups()[1].options);
      for (std::size_t i = 0; i < store.size(); ++i) {
        store[i].set_gradient(gradient_of(store, i, rank, ranks, step));
      }
      sharded.step();
    }
    for (std::size_t i = 0; i < store.size(); ++i) {
      if (same_bits(store[i].tensor(), whole[i].tensor())) continue;
      found[rank] += store[i].name() + ": other values; ";
    }
    O part = zero::torch_optimizer(sharded);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      for (const at::Tensor& tensor : part.param_groups()[g].params()) {
        const auto at = std::ranges::find_if(
            store, [&](const Param& p) { return p.tensor().is_same(tensor) && p.group() == g; });
        if (at == store.end()) {
          found[rank] += "a tensor that is not in the store; ";
          continue;
        }
        ++kept[rank];
        found[rank] += state_difference(
            part, *at, plain, whole[static_cast<std::size_t>(std::distance(store.begin(), at))]);
      }
      if (options_of(part, g).lr() != options_of(plain, g).lr()) found[rank] += "another lr; ";
    }
  }));
  std::string all;
  std::size_t everything = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    if (!found[r].empty()) all += "rank " + std::to_string(r) + ": " + found[r];
    everything += kept[r];
  }
  const std::size_t nonempty = whole.size() - 1;
  if (everything < nonempty || everything > whole.size()) all += "state is kept twice, or not";
  return all;
}

template <class O>
void check(std::vector<TorchOptimizer<O>> groups) {
  at::set_num_threads(1);
  for (std::size_t ranks = 1; ranks <= most_ranks; ++ranks) {
    CAPTURE(ranks);
    CHECK(difference(groups, ranks) == "");
  }
}

}  // namespace

TEST_CASE("torch optimizer: Adam's bits") {
  using A = ::torch::optim::AdamOptions;
  check<Adam>({{A(.01).weight_decay(.1)}, {A().betas({.8, .99}).eps(1e-6)}});
  check<Adam>({{A(.01)}, {A(.02).amsgrad(true)}});
}

TEST_CASE("torch optimizer: AdamW's bits") {
  using A = ::torch::optim::AdamWOptions;
  check<AdamW>({{A(.01)}, {A(.02).amsgrad(true).weight_decay(.3)}});
}

TEST_CASE("torch optimizer: SGD's bits") {
  using S = ::torch::optim::SGDOptions;
  check<SGD>({{S(.1)}, {S(.2).weight_decay(.1)}});
  check<SGD>({{S(.1).momentum(.9).nesterov(true)}, {S(.2).momentum(.8).dampening(.5)}});
  check<SGD>({{S(.1)}, {S(.2).momentum(.8).dampening(.5).weight_decay(.1)}});
}

TEST_CASE("torch optimizer: RMSprop's bits") {
  using R = ::torch::optim::RMSpropOptions;
  check<RMSprop>({{R(.01)}, {R(.02).momentum(.9).weight_decay(.1)}});
  check<RMSprop>({{R(.01).centered(true)}, {R(.02).centered(true).momentum(.9).alpha(.9)}});
}

TEST_CASE("torch optimizer: Adagrad's bits") {
  using A = ::torch::optim::AdagradOptions;
  check<Adagrad>({{A(.1).lr_decay(.1).initial_accumulator_value(.5)},
                  {A().initial_accumulator_value(.5).weight_decay(.1)}});
}

TEST_CASE("torch optimizer: the bits of a user's optimizer") {
  check<Lion>({{LionOptions(.1)}, {LionOptions(.2)}});
}

TEST_CASE("torch optimizer: stage 2, the same bits") {
  at::set_num_threads(1);
  using A = ::torch::optim::AdamOptions;
  CHECK(difference<Adam>({{A(.01).weight_decay(.1)}, {A().amsgrad(true)}}, 3, zero::Stage2{}) ==
        "");
}

TEST_CASE("torch optimizer: several threads of libtorch's, the same bits") {
  at::set_num_threads(2);
  using A = ::torch::optim::AdamOptions;
  CHECK(difference<Adam>({{A(.01).weight_decay(.1)}, {A().amsgrad(true)}}, 2) == "");
  at::set_num_threads(1);
}

TEST_CASE("torch optimizer: a group added on the way") {
  at::set_num_threads(1);
  using A = ::torch::optim::AdamOptions;
  constexpr std::size_t ranks = 2;
  const Store all = make_store();
  const auto first = [&] {
    Store store;
    for (std::size_t i = 0; i < wide; ++i) {
      store.emplace_back(all[i].name(), all[i].tensor().clone(), 0);
    }
    return store;
  };
  const auto added = [&] { return Param(all[wide].name(), all[wide].tensor().clone(), 1); };

  Store whole = first();
  Adam plain = plain_optimizer<Adam>(whole, {{A(.01)}});
  for (std::size_t step = 0; step < steps; ++step) {
    if (step == 2) {
      whole.push_back(added());
      plain.add_param_group({{whole.back().tensor()}, std::make_unique<A>(A(.1).weight_decay(.2))});
    }
    for (Param& parameter : whole) parameter.set_gradient(at::full_like(parameter.tensor(), 0.5));
    plain.step();
  }
  std::vector<std::string> found(ranks);
  ranks::rethrow_any(ranks::run(ranks, [&](zero::InProcessCommunicator& comm) {
    Store store = first();
    zero::ZeroSharded sharded{TorchOptimizer<Adam>{A(.01)}, store, comm, zero::BalancedPartition{}};
    for (std::size_t step = 0; step < steps; ++step) {
      if (step == 2) {
        store.push_back(added());
        sharded.add_param_group({A(.1).weight_decay(.2)});
      }
      for (Param& parameter : store) {
        parameter.set_gradient(at::full_like(parameter.tensor(), comm.rank() == 0 ? 0.75 : 0.25));
      }
      sharded.step();
    }
    for (std::size_t i = 0; i < store.size(); ++i) {
      if (same_bits(store[i].tensor(), whole[i].tensor())) continue;
      found[static_cast<std::size_t>(comm.rank())] += store[i].name() + "; ";
    }
  }));
  CHECK((found == std::vector<std::string>(ranks)));
}

TEST_CASE("torch optimizer: what libtorch writes of its part, libtorch goes on from") {
  at::set_num_threads(1);
  using A = ::torch::optim::AdamOptions;
  const std::vector<TorchOptimizer<Adam>> groups{{A(.01).weight_decay(.1)}, {A().amsgrad(true)}};
  Store store = make_store();
  zero::InProcessWorld world(1);
  zero::InProcessCommunicator comm = world.communicator(0);
  zero::ZeroSharded sharded{zero::Groups<TorchOptimizer<Adam>>{groups}, store, comm,
                            zero::BalancedPartition{}};
  const auto give_gradients = [](Store& to, std::size_t step) { give_mean_gradients(to, 1, step); };
  for (std::size_t step = 0; step < 3; ++step) {
    give_gradients(store, step);
    sharded.step();
  }
  Adam part = zero::torch_optimizer(sharded);
  std::stringstream file;
  ::torch::serialize::OutputArchive out;
  part.save(out);
  out.save_to(file);

  // Over the same parameters, the empty one included where it was.
  Store copies;
  std::vector<::torch::optim::OptimizerParamGroup> copied_groups;
  for (const auto& group : part.param_groups()) {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& tensor : group.params()) {
      copies.emplace_back(std::to_string(copies.size()), tensor.clone(), 0);
      tensors.push_back(copies.back().tensor());
      const auto original =
          std::ranges::find_if(store, [&](const Param& p) { return p.tensor().is_same(tensor); });
      tensors.back().mutable_grad() =
          gradient_of(store, static_cast<std::size_t>(original - store.begin()), 0, 1, 3);
    }
    copied_groups.emplace_back(tensors);
  }
  Adam again(copied_groups, groups[0].options);
  options_of(again, 1) = groups[1].options;
  ::torch::serialize::InputArchive in;
  in.load_from(file);
  again.load(in);
  again.step();

  give_gradients(store, 3);
  sharded.step();
  std::size_t copy = 0;
  for (const auto& group : part.param_groups()) {
    for (const at::Tensor& tensor : group.params()) {
      CHECK(same_bits(tensor, copies[copy++].tensor()));
    }
  }
  CHECK(copy >= store.size() - 1);

  sharded.groups()[1].maximize = true;
  CHECK_THROWS_WITH(zero::torch_optimizer(sharded),
                    ContainsSubstring("group 1") && ContainsSubstring("maximize"));
}

TEST_CASE("torch optimizer: parameters in plain memory have views") {
  std::vector<float> values{1, 2, 3, 4, 5, 6}, gradient(6, 1);
  std::vector<zero::ParamRef<float>> store{{"w", {2, 3}, values.data(), gradient.data()}};
  zero::InProcessWorld world(1);
  zero::InProcessCommunicator comm = world.communicator(0);
  zero::ZeroSharded sharded{TorchOptimizer<Adam>{}, store, comm, zero::BalancedPartition{}};
  CHECK(zero::torch_optimizer(sharded).state().empty());
  sharded.step();
  Adam part = zero::torch_optimizer(sharded);
  const at::Tensor tensor = part.param_groups().at(0).params().at(0);
  CHECK(tensor.data_ptr() == values.data());
  CHECK(tensor.sizes() == at::IntArrayRef({2, 3}));
  REQUIRE(part.state().size() == 1);
  // A copy: libtorch's steps leave zero's state alone.
  auto& state = static_cast<::torch::optim::AdamParamState&>(*part.state().begin()->second);
  CHECK(state.step() == 1);
  CHECK(std::ranges::all_of(sharded.state()[0].values, [](float x) { return x == 0.1F; }));
  state.exp_avg().fill_(7);
  CHECK(sharded.state()[0].values[0] == 0.1F);
}

TEST_CASE("torch optimizer: what a step throws on one rank, the others learn of") {
  at::set_num_threads(1);
  const auto thrown = ranks::run(2, [&](zero::InProcessCommunicator& comm) {
    Store store = make_store();
    std::vector<TorchOptimizer<Lion>> groups{{LionOptions(.1)}, {LionOptions(.2)}};
    zero::ZeroSharded sharded{zero::Groups<TorchOptimizer<Lion>>{groups}, store, comm,
                              zero::BalancedPartition{}, zero::Stage1{}};
    if (comm.rank() == 0) sharded.groups()[0].options.lr(100);
    give_mean_gradients(store, 1, 0);
    sharded.step();
  });
  CHECK_THROWS_AS(std::rethrow_exception(thrown[0]), c10::Error);
  const ranks::Failure failure = ranks::failure_of(thrown[1]);
  CHECK(failure.kind == ranks::Failure::Kind::communicator);
  CHECK_THAT(failure.text, ContainsSubstring("only a step refuses"));
}

// ---- update, called as the engine calls it

namespace {

template <class O, class T>
struct Tensor {
  std::vector<std::size_t> shape{2, 3};
  std::vector<T> values = std::vector<T>(6, T(0.5));
  std::array<std::vector<T>, TorchSlots<O>::slots.size()> state{};

  void step(const TorchOptimizer<O>& optimizer, const std::vector<T>& gradient, std::int64_t t) {
    std::array<std::span<T>, TorchSlots<O>::slots.size()> used{};
    for (std::size_t s = 0; s < optimizer.used_slots(); ++s) {
      state[s].resize(6);
      used[s] = state[s];
    }
    optimizer.update(zero::TensorRef<T>{shape, values, gradient, {}}, used, t);
  }
};

template <class O>
void check_gradient_stays(TorchOptimizer<O> optimizer) {
  for (const bool maximize : {false, true}) {
    optimizer.maximize = maximize;
    Tensor<O, float> tensor;
    const std::vector<float> gradient{1, -2, 3, -4, 5, 0};
    const std::vector<float> before = gradient;
    for (int t = 1; t <= 3; ++t) {
      tensor.step(optimizer, gradient, t);
      CHECK(gradient == before);
    }
    CHECK(tensor.values[0] != 0.5F);
  }
}

}  // namespace

TEST_CASE("torch optimizer: gradients are only read") {
  check_gradient_stays<Adam>({::torch::optim::AdamOptions().amsgrad(true).weight_decay(.1)});
  check_gradient_stays<AdamW>({::torch::optim::AdamWOptions().amsgrad(true)});
  check_gradient_stays<SGD>({::torch::optim::SGDOptions(.1)});
  check_gradient_stays<SGD>({::torch::optim::SGDOptions(.1).momentum(.9)});
  check_gradient_stays<SGD>({::torch::optim::SGDOptions(.1).momentum(.9).nesterov(true)});
  check_gradient_stays<RMSprop>({::torch::optim::RMSpropOptions().centered(true).momentum(.9)});
  check_gradient_stays<Adagrad>({::torch::optim::AdagradOptions().lr_decay(.1)});
}

TEST_CASE("torch optimizer: maximize goes the other way") {
  const ::torch::optim::SGDOptions options = ::torch::optim::SGDOptions(.1).momentum(.9);
  Tensor<SGD, double> up, down;
  for (int t = 1; t <= 3; ++t) {
    up.step({options, true}, std::vector<double>(6, 2), t);
    down.step({options}, std::vector<double>(6, -2), t);
  }
  CHECK(up.values == down.values);
  CHECK(up.values[0] > 0.5);
}

TEST_CASE("torch optimizer: state of another shape than its parameter is refused") {
  Tensor<LionByRow, float> tensor;
  CHECK_THROWS_AS(tensor.step({LionOptions(.1)}, std::vector<float>(6, 1), 1), zero::UsageError);
  CHECK_THROWS_WITH(
      tensor.step({LionOptions(.1)}, std::vector<float>(6, 1), 1),
      ContainsSubstring("'exp_avg'") && ContainsSubstring("[2, 3]") && ContainsSubstring("[2, 1]"));
}

TEST_CASE("torch optimizer: options that libtorch refuses are refused in its words") {
  using A = ::torch::optim::AdamOptions;
  CHECK_THROWS_AS(TorchOptimizer<Adam>{A(-1)}.validate(), zero::UsageError);
  CHECK_THROWS_AS(TorchOptimizer<Adam>{A(std::nan(""))}.validate(), zero::UsageError);
  CHECK_THROWS_AS(TorchOptimizer<SGD>{::torch::optim::SGDOptions(.1).nesterov(true)}.validate(),
                  zero::UsageError);
  CHECK_THROWS_AS(TorchOptimizer<RMSprop>{::torch::optim::RMSpropOptions().alpha(-1)}.validate(),
                  zero::UsageError);
  CHECK_THROWS_AS(TorchOptimizer<Adagrad>{::torch::optim::AdagradOptions().lr_decay(-1)}.validate(),
                  zero::UsageError);
  std::string text;
  try {
    TorchOptimizer<Adam>{A(-1)}.validate();
  } catch (const zero::UsageError& error) {
    text = error.what();
  }
  CHECK(text == "TorchOptimizer: Invalid learning rate: -1");

  // In a step all ranks refuse, and nothing has changed.
  std::vector<std::array<float, 2>> values(2, {1, 2});
  const auto thrown = ranks::run(2, [&](zero::InProcessCommunicator& comm) {
    std::array<float, 2>& mine = values[static_cast<std::size_t>(comm.rank())];
    std::array<float, 2> gradient{1, 1};
    std::vector<zero::ParamRef<float>> store{{"w", mine, gradient}};
    zero::ZeroSharded sharded{TorchOptimizer<Adam>{A(.1)}, store, comm, zero::BalancedPartition{}};
    sharded.groups()[0].options.eps(-1);
    sharded.step();
  });
  for (const std::exception_ptr& exception : thrown) {
    const ranks::Failure failure = ranks::failure_of(exception);
    CHECK(failure.kind == ranks::Failure::Kind::usage);
    CHECK_THAT(failure.text, ContainsSubstring("group 0") && ContainsSubstring("epsilon"));
  }
  CHECK((values == std::vector<std::array<float, 2>>(2, {1, 2})));
}
