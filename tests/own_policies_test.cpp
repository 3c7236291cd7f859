// SPDX-License-Identifier: Apache-2.0
// The example's own partitions and view: what they say is where things lie, and no bit depends on
// them.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include <zero/zero.hpp>

#include "../examples/own_policies.hpp"
#include "catch.hpp"
#include "ranks.hpp"

namespace {

// Where things lie.

/// Elements of parameters that rank owns in lane 0; a shard also counts padding.
template <class Partition>
constexpr std::size_t owned(const zero::Layout<Partition>& layout, int rank) {
  std::size_t sum = 0;
  layout.for_each_owned(
      0, rank, [&](const zero::Fragment& f, std::size_t, std::size_t) { sum += f.elements; });
  return sum;
}

template <class Partition>
constexpr zero::Layout<Partition> layout_of(const std::vector<std::size_t>& sizes, int world,
                                            std::size_t bucket_bytes = std::size_t{1} << 20) {
  std::vector<zero::LayoutParameter> parameters(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) parameters[i].elements = sizes[i];
  const std::array<zero::LayoutLane, 1> lanes{{{4, bucket_bytes}}};
  return zero::Layout<Partition>(parameters, lanes, world);
}

template <class Partition>
constexpr bool owns(const std::vector<std::size_t>& sizes, const std::vector<std::size_t>& wanted,
                    std::size_t bucket_bytes = std::size_t{1} << 20) {
  const auto layout = layout_of<Partition>(sizes, static_cast<int>(wanted.size()), bucket_bytes);
  for (std::size_t rank = 0; rank < wanted.size(); ++rank) {
    if (owned(layout, static_cast<int>(rank)) != wanted[rank]) return false;
  }
  return true;
}

static_assert(owns<HalfOnRankZero>({560}, {80, 160, 160, 160}));
static_assert(owns<HalfOnRankZero>({280, 0, 280}, {80, 160, 160, 160}), "tensors don't matter");
static_assert(owns<HalfOnRankZero>({560}, {560}), "alone it has no other work");
static_assert(owns<HalfOnRankZero>({560}, {11 * 16 + 8, 11 * 32 + 24}, 192), "bucket by bucket");
static_assert(owns<HalfOnRankZero>({5}, {0, 4, 1, 0}), "slices begin on 16 bytes");
static_assert(owns<RoundRobin>({7, 11, 0, 13, 17}, {7 + 13, 11 + 17, 0}));
static_assert(owns<RoundRobin>({7, 11, 0, 13, 17}, {7, 11, 0, 13, 17, 0}));
static_assert(owns<RoundRobin>({7, 11, 0, 13, 17}, {7 + 0 + 17, 11 + 13}, 16));

// What comes out.

/// A tensor whose memory may move, all of it.
class Tensor : public ranks::Tensor<float> {
 public:
  Tensor(std::string name, std::vector<std::size_t> shape)
      : ranks::Tensor<float>(std::move(name), std::move(shape)),
        gradient_memory_(values().size()),
        gradient_(gradient_memory_) {}
  Tensor(Tensor&&) = default;

  [[nodiscard]] std::span<float> gradient() const { return gradient_; }
  void rebind_gradient(std::span<float> gradient, std::shared_ptr<const void> owner) {
    gradient_ = gradient;
    gradient_owner_ = std::move(owner);
    std::vector<float>().swap(gradient_memory_);
  }

 private:
  std::vector<float> gradient_memory_;
  std::shared_ptr<const void> gradient_owner_{};
  std::span<float> gradient_;
};
static_assert(zero::RebindableGradient<Tensor>);

using Model = std::vector<Tensor>;

Model model() {
  const std::vector<std::vector<std::size_t>> shapes{{7, 9}, {0}, {1}, {129}, {3, 0, 5}, {31, 11}};
  Model tensors;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    tensors.emplace_back("t" + std::to_string(i), shapes[i]);
  }
  ranks::Draw draw(1);
  for (Tensor& tensor : tensors) draw.fill(tensor.values());
  return tensors;
}

constexpr int steps = 3;

/// The gradients of one rank in one step, of all tensors one behind the other.
std::vector<float> gradients(int rank, int step) {
  std::vector<float> all(7 * 9 + 1 + 129 + 31 * 11);
  ranks::Draw(static_cast<std::uint32_t>(100 * (rank + 1) + step)).fill(std::span(all));
  return all;
}

void set_gradients(Model& tensors, std::span<const float> all) {
  for (Tensor& tensor : tensors) {
    const std::span<float> gradient = tensor.gradient();
    std::copy_n(all.begin(), gradient.size(), gradient.begin());
    all = all.subspan(gradient.size());
  }
}

std::string values_of(const Model& tensors) {
  std::string all;
  for (const Tensor& tensor : tensors) all += ranks::bytes_of(tensor.values());
  return all;
}

/// Steps with whole tensors: one rank, which gets the ranks' gradients summed in their order.
template <class Opt>
std::string serial(int world, const Opt& options) {
  std::string after;
  zero::run_ranks(1, [&](zero::InProcessCommunicator& comm) {
    Model tensors = model();
    zero::ZeroSharded optimizer{options,        tensors,
                                comm,           zero::BalancedPartition{},
                                zero::NoView{}, zero::Settings{.gradient_scale = 1.0 / world}};
    for (int step = 0; step < steps; ++step) {
      std::vector<float> sum = gradients(0, step);
      for (int rank = 1; rank < world; ++rank) {
        const std::vector<float> other = gradients(rank, step);
        for (std::size_t e = 0; e < sum.size(); ++e) sum[e] += other[e];
      }
      set_gradients(tensors, sum);
      optimizer.step();
    }
    after = values_of(tensors);
  });
  return after;
}

template <class Way, class Opt, class Partition>
void check(const Opt& options, Partition partition) {
  for (int world = 1; world <= 8; ++world) {
    const std::string wanted = serial(world, options);
    for (const std::size_t bucket :
         {std::size_t{1}, std::size_t{512}, std::size_t{1} << 20, std::size_t{zero::PerTensor{}}}) {
      std::vector<std::string> after(static_cast<std::size_t>(world));
      std::vector<std::size_t> kept(after.size()), planned(after.size());
      zero::run_ranks(world, [&](zero::InProcessCommunicator& in_process) {
        auto comm = Way::wrap(in_process);
        Model tensors = model();
        auto optimizer = Way::optimizer(options, tensors, comm, {}, bucket, partition);
        for (int step = 0; step < steps; ++step) {
          set_gradients(tensors, gradients(comm.rank(), step));
          optimizer.step();
        }
        const auto rank = static_cast<std::size_t>(comm.rank());
        after[rank] = values_of(tensors);
        for (const auto& slice : optimizer.state()) {
          if (slice.slot == Opt::slots[0]) kept[rank] += slice.elements.size();
        }
        planned[rank] = owned(optimizer.layout(), comm.rank());
      });
      INFO(world << " ranks, buckets of " << bucket << " bytes");
      for (std::size_t rank = 0; rank < after.size(); ++rank) {
        INFO("rank " << rank);
        REQUIRE(after[rank] == wanted);
        if (Way::stage::shards_state) REQUIRE(kept[rank] == planned[rank]);
      }
    }
  }
}

template <class View>
using WaysOf =
    std::tuple<ranks::Way<true, zero::Stage1, View>, ranks::Way<false, zero::Stage1, View>>;

using Ways = decltype(std::tuple_cat(WaysOf<zero::NoView>{}, WaysOf<GradView>{},
                                     std::tuple<ranks::Way<true, zero::Replicated, GradView>,
                                                ranks::Way<false, zero::Replicated, GradView>>{}));

}  // namespace

TEMPLATE_LIST_TEST_CASE("a partition that cuts by speed changes no bit", "", Ways) {
  check<TestType>(zero::Adam{.lr = 0.1}, HalfOnRankZero{});
}

TEMPLATE_LIST_TEST_CASE("a partition of whole tensors changes no bit", "", Ways) {
  check<TestType>(zero::Adam{.lr = 0.1}, RoundRobin{});
}

TEMPLATE_LIST_TEST_CASE("nor under an optimizer that needs whole tensors", "", Ways) {
  check<TestType>(zero::Lamb{.lr = 0.1}, RoundRobin{});
}

TEMPLATE_LIST_TEST_CASE("a view of gradients alone changes no bit", "", WaysOf<GradView>) {
  check<TestType>(zero::Adam{.lr = 0.1}, zero::ContiguousPartition{});
}
