// SPDX-License-Identifier: Apache-2.0
// What docs/concepts/ shows: that the minimal models of archetypes.hpp model their concepts, those
// that stand here do, too, and a ZeroSharded takes each of them. A page shows what stands between
// two lines `//! [NAME]`.
#include <zero/matrix_product.hpp>
#include <zero/zero.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "archetypes.hpp"
#include "catch.hpp"

// NOLINTBEGIN(google-build-using-namespace): a page shows models without a prefix
using namespace archetypes;
// NOLINTEND(google-build-using-namespace)

namespace {

/// Whether `f(comm)` is true on both of two ranks.
template <class F>
bool on_two_ranks(F f) {
  std::array<bool, 2> holds{};
  zero::run_ranks(2, [&](zero::InProcessCommunicator& comm) {
    holds[static_cast<std::size_t>(comm.rank())] = f(comm);
  });
  return holds[0] && holds[1];
}

template <class Values>
bool all_are(const Values& values, float x) {
  return std::ranges::all_of(values, [x](float value) { return value == x; });
}

}  // namespace

// ---- element.md

//! [own element]
namespace framework {
struct Bf16 {
  std::uint16_t bits;
};
}  // namespace framework

template <>
struct zero::element_traits<framework::Bf16> {
  static constexpr ElementType type = ElementType::bfloat16;
  static constexpr std::string_view name = "framework::Bf16";
  using arithmetic = float;
  static float load(framework::Bf16 x) { return float(bfloat16::from_bits(x.bits)); }
  static framework::Bf16 store(float x) { return {bfloat16(x).bits}; }
};
static_assert(zero::Element<framework::Bf16>);
//! [own element]
static_assert(zero::Element<BareElement>);

TEST_CASE("element.md") {
  CHECK(on_two_ranks([](zero::InProcessCommunicator& comm) {
    //! [use Element]
    std::vector<framework::Bf16> weights(8), gradient(8);
    std::vector store{zero::ParamRef("weights", weights, gradient)};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 0.5}, store, comm};
    std::ranges::fill(gradient, framework::Bf16{0x3f80});  // 1
    optimizer.step();  // weights: -0.5, with a master copy in float and sums in float
    //! [use Element]
    return weights[7].bits == zero::bfloat16(-0.5F).bits;
  }));
}

// ---- parameter.md

static_assert(zero::Parameter<Scalar>);
static_assert(!zero::RebindableParameter<Scalar> && !zero::RebindableGradient<Scalar>);

namespace {

//! [RebindableParameter]
struct Movable {
  std::string label;
  std::array<std::size_t, 1> extents;
  std::span<float> weights, slopes;
  std::shared_ptr<const void> weights_owner, slopes_owner;

  std::string_view name() const { return label; }
  std::span<const std::size_t> shape() const { return extents; }
  std::span<float> values() const { return weights; }
  std::span<float> gradient() const { return slopes; }
  void rebind(std::span<float> moved, std::shared_ptr<const void> owner) {
    weights = moved;
    weights_owner = std::move(owner);  // lets go of the old memory
  }
  void rebind_gradient(std::span<float> moved, std::shared_ptr<const void> owner) {
    slopes = moved;
    slopes_owner = std::move(owner);
  }
};
static_assert(zero::RebindableParameter<Movable> && zero::RebindableGradient<Movable>);
//! [RebindableParameter]

}  // namespace

TEST_CASE("parameter.md") {
  CHECK(on_two_ranks([](zero::InProcessCommunicator& comm) {
    //! [use Parameter]
    float value = 1, slope = 0;
    std::vector store{Scalar{&value, &slope}};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 0.5}, store, comm};
    slope = 1;         // backward
    optimizer.step();  // value: 0.5
    //! [use Parameter]
    return value == 0.5F;
  }));
  CHECK(on_two_ranks([](zero::InProcessCommunicator& comm) {
    //! [use RebindableParameter]
    auto weights = std::make_shared<std::vector<float>>(9, 1.0F);
    auto slopes = std::make_shared<std::vector<float>>(9, 0.0F);
    std::vector store{Movable{"movable", {9}, *weights, *slopes, weights, slopes}};
    weights.reset();  // the parameter has the last handle on its memory
    slopes.reset();

    zero::ZeroSharded optimizer{zero::Sgd{.lr = 0.5}, store, comm, zero::ParamAndGradView{}};
    std::ranges::fill(store[0].gradient(), 1.0F);  // backward writes into a bucket
    optimizer.step();                              // and the values are in one: 0.5
    //! [use RebindableParameter]
    return all_are(store[0].values(), 0.5F);
  }));
}

// ---- store.md

namespace {

//! [FlatParamStore]
struct Flat {
  std::span<float> all_values, all_gradients;
  std::vector<zero::ParamRef<float>> parameters;  // views into these, one behind the other

  auto begin() const { return parameters.begin(); }
  auto end() const { return parameters.end(); }
  std::span<float> flat_values() const { return all_values; }
  std::span<float> flat_gradient() const { return all_gradients; }
};
static_assert(zero::FlatParamStore<Flat>);
//! [FlatParamStore]

//! [own tensors]
struct Layer {  // knows nothing of zero
  std::string label;
  std::size_t rows, columns;
  std::vector<float> data, grad;
};
zero::ParamRef<float> as_parameter(Layer& layer) {
  return {layer.label, {layer.rows, layer.columns}, layer.data.data(), layer.grad.data()};
}
//! [own tensors]

static_assert(zero::ParamStore<std::vector<Scalar>> && !zero::FlatParamStore<std::vector<Scalar>>);

}  // namespace

TEST_CASE("store.md") {
  CHECK(on_two_ranks([](zero::InProcessCommunicator& comm) {
    std::vector<Layer> layers{{"first", 2, 3, std::vector<float>(6), std::vector<float>(6, 1.0F)},
                              {"second", 1, 3, std::vector<float>(3), std::vector<float>(3, 1.0F)}};
    //! [use ParamStore]
    auto store = layers | std::views::transform(as_parameter);
    static_assert(zero::ParamStore<decltype(store)>);
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 0.5}, store, comm};
    //! [use ParamStore]
    optimizer.step();
    return all_are(layers[0].data, -0.5F) && all_are(layers[1].data, -0.5F);
  }));
  CHECK(on_two_ranks([](zero::InProcessCommunicator& comm) {
    //! [use FlatParamStore]
    std::vector<float> values(9), gradient(9, 1.0F);
    Flat store{values,
               gradient,
               {{"first", {2, 3}, values.data(), gradient.data()},
                {"second", {1, 3}, values.data() + 6, gradient.data() + 6}}};
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 0.5}, store, comm};
    optimizer.step();  // buckets are sent from `gradient` and fetched into `values`
    //! [use FlatParamStore]
    return all_are(values, -0.5F);
  }));
}

// ---- optimizer.md

static_assert(zero::NamesSlots<SignSgd> && zero::Optimizer<SignSgd>);
static_assert(zero::UpdateRule<SignSgd, float> && zero::UpdateRule<SignSgd, double>);
static_assert(zero::Optimizer<NormalizedDescent> && zero::WholeTensorOptimizer<NormalizedDescent>);

TEST_CASE("optimizer.md") {
  CHECK(on_two_ranks([](zero::InProcessCommunicator& comm) {
    std::vector<float> weights(9), gradient(9, 3.0F);
    std::vector store{zero::ParamRef("weights", weights, gradient)};
    //! [use UpdateRule]
    zero::ZeroSharded optimizer{SignSgd{.lr = 0.5}, store, comm};
    optimizer.step();
    optimizer.group(0).lr *= 0.5;  // a schedule
    //! [use UpdateRule]
    return weights[8] == -0.5F;
  }));
  CHECK(on_two_ranks([](zero::InProcessCommunicator& comm) {
    std::vector<float> weights(4), gradient(4, 3.0F);
    std::vector store{zero::ParamRef("weights", weights, gradient)};
    //! [use WholeTensorOptimizer]
    zero::ZeroSharded optimizer{NormalizedDescent{.lr = 0.5}, store, comm,
                                zero::BalancedPartition{}};
    optimizer.step();  // one rank updates the tensor, the others fetch it
    //! [use WholeTensorOptimizer]
    return weights[3] == -0.25F;
  }));
}

// ---- communicator.md

static_assert(zero::Request<SoloRequest> && zero::Communicator<SoloCommunicator, double>);
static_assert(zero::Meeting<SoloMeeting> && zero::SharedMemoryCommunicator<SoloSharedCommunicator>);

TEST_CASE("communicator.md") {
  std::vector<float> weights(9), gradient(9, 1.0F);
  std::vector store{zero::ParamRef("weights", weights, gradient)};
  //! [use Communicator]
  SoloCommunicator comm(0);  // an lvalue is used where it is, and must outlive the optimizer
  zero::ZeroSharded optimizer{zero::Sgd{.lr = 0.5}, store, comm};
  //! [use Communicator]
  optimizer.step();
  CHECK(weights[8] == -0.5F);
}

// ---- partition.md

static_assert(zero::CuttingPartition<FirstRankOnly> && zero::PartitionPolicy<FirstRankOnly>);

namespace {

//! [WholeTensorPartition]
struct RoundRobin {
  static constexpr bool cuts_tensors = false;
  constexpr void assign(std::span<const std::size_t> elements, std::span<std::size_t> loads,
                        std::span<int> owners) const {
    for (std::size_t i = 0; i < elements.size(); ++i) {
      const std::size_t rank = i % loads.size();
      loads[rank] += elements[i];
      owners[i] = static_cast<int>(rank);
    }
  }
};
static_assert(zero::WholeTensorPartition<RoundRobin> && zero::PartitionPolicy<RoundRobin>);
//! [WholeTensorPartition]

}  // namespace

TEST_CASE("partition.md") {
  CHECK(on_two_ranks([](zero::InProcessCommunicator& comm) {
    std::vector<float> weights(9), gradient(9, 1.0F);
    std::vector store{zero::ParamRef("weights", weights, gradient)};
    //! [use CuttingPartition]
    zero::ZeroSharded optimizer{zero::Adam{}, store, comm, FirstRankOnly{}};
    const bool has_state = !optimizer.state().empty();  // on rank 0 alone
    //! [use CuttingPartition]
    const zero::ZeroSharded whole{zero::Adam{}, store, comm, RoundRobin{}};
    const bool has_tensor = !whole.state().empty();
    return has_state == (comm.rank() == 0) && has_tensor == has_state;
  }));
}

// ---- bucket_view.md

static_assert(zero::BucketViewPolicy<SmallBuckets>);

TEST_CASE("bucket_view.md") {
  CHECK(on_two_ranks([](zero::InProcessCommunicator& comm) {
    std::vector<float> weights(1024), gradient(1024, 1.0F);
    std::vector store{zero::ParamRef("weights", weights, gradient)};
    //! [use BucketViewPolicy]
    zero::ZeroSharded optimizer{zero::Sgd{.lr = 0.5}, store, comm, SmallBuckets{512}};
    const std::size_t buckets = optimizer.layout().buckets(0);  // 8: of 1024 floats 128 each
    //! [use BucketViewPolicy]
    return buckets == 8;
  }));
}

// ---- stage.md

namespace {

//! [StagePolicy]
struct StateAlone {  // what zero::Stage1 is
  static constexpr bool shards_state = true;
  static constexpr bool shards_gradients = false;
  static constexpr bool shards_values = false;
};
static_assert(zero::StagePolicy<StateAlone>);
//! [StagePolicy]

}  // namespace

TEST_CASE("stage.md") {
  CHECK(on_two_ranks([](zero::InProcessCommunicator& comm) {
    std::vector<float> weights(1024), gradient(1024, 1.0F);
    std::vector store{zero::ParamRef("weights", weights, gradient)};
    //! [use StagePolicy]
    const zero::ZeroSharded sharded{zero::Adam{}, store, comm, StateAlone{}};
    const zero::ZeroSharded whole{zero::Adam{}, store, comm, zero::Replicated{}};
    // Of two moments in float rank r of K keeps its part, or all:
    const std::size_t part = sharded.memory().state;  // 8 * 1024 / K
    const std::size_t all = whole.memory().state;     // 8 * 1024
    //! [use StagePolicy]
    return part * static_cast<std::size_t>(comm.size()) == all && all == 8 * 1024;
  }));
}

// ---- precision.md

static_assert(zero::PrecisionPolicy<OwnPrecision> && zero::PrecisionPolicy<OwnPrecision, double>);

TEST_CASE("precision.md") {
  CHECK(on_two_ranks([](zero::InProcessCommunicator& comm) {
    std::vector<float> weights(1024), gradient(1024, 1.0F);
    std::vector store{zero::ParamRef("weights", weights, gradient)};
    zero::ZeroSharded plain{zero::Sgd{.lr = 0.5}, store, comm, OwnPrecision{}};
    plain.step();
    const bool stepped = all_are(weights, -0.5F);
    //! [use PrecisionPolicy]
    // Adam's two moments in bfloat16, stochastically rounded with this seed: 4 bytes an element.
    zero::ZeroSharded optimizer{zero::Adam{}, store, comm, zero::Bfloat16Slots{.seed = 17}};
    //! [use PrecisionPolicy]
    return stepped && optimizer.memory().state * static_cast<std::size_t>(comm.size()) == 4 * 1024;
  }));
}

// ---- observer.md

static_assert(zero::Observer<BucketCounter>);

TEST_CASE("observer.md") {
  CHECK(on_two_ranks([](zero::InProcessCommunicator& comm) {
    std::vector<float> weights(1024), gradient(1024, 1.0F);
    std::vector store{zero::ParamRef("weights", weights, gradient)};
    //! [use Observer]
    zero::ZeroSharded optimizer{zero::Adam{}, store, comm, BucketCounter{}, SmallBuckets{512}};
    optimizer.step();
    const std::size_t updated = optimizer.observer().updated;  // 8 buckets
    //! [use Observer]
    return updated == 8;
  }));
}

// ---- matrix_product.md

static_assert(zero::MatrixProduct<NaiveProduct, float> &&
              zero::MatrixProduct<NaiveProduct, double>);

TEST_CASE("matrix_product.md") {
  const std::array<float, 6> a{1, 2, 3, 4, 5, 6};
  const auto multiplied = [&](const auto& product) {
    std::array<float, 4> c{};
    product.multiply(2, 2, 3, a.data(), a.data(), zero::Transpose::yes, c.data());
    return c;
  };
  CHECK(multiplied(NaiveProduct{}) == std::array<float, 4>{14, 32, 32, 77});
  CHECK(multiplied(NaiveProduct{}) == multiplied(zero::PlainProduct{}));
}
