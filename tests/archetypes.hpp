// SPDX-License-Identifier: Apache-2.0
// For every concept a type that models it and offers nothing more: no default constructor, no
// copies where moves do, no comparison, no conversion. What works with these asks for no more than
// the concepts say.
// The first of a concept is the minimal model of its doc comment, word for word where it has one.
// What stands between two lines `//! [NAME]` is shown on the concept's page in docs/concepts/.
#pragma once

#include <zero/zero.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace archetypes {

/// Base of what can't be made from nothing.
struct NotFromNothing {
  NotFromNothing() = delete;
  explicit NotFromNothing(int) {}
};

/// Base of what can't be made from nothing, nor copied.
struct MoveOnly : NotFromNothing {
  using NotFromNothing::NotFromNothing;
  MoveOnly(MoveOnly&&) = default;
  MoveOnly& operator=(MoveOnly&&) = default;
  MoveOnly(const MoveOnly&) = delete;
  MoveOnly& operator=(const MoveOnly&) = delete;
};

// ---- Element

//! [Element]
/// Stored as bits, with no arithmetic of its own.
class BareElement {
 public:
  BareElement() = delete;

 private:
  friend zero::element_traits<BareElement>;
  explicit constexpr BareElement(float x) : x_(x) {}
  float x_;
};
//! [Element]

}  // namespace archetypes

//! [element_traits]
template <>
struct zero::element_traits<archetypes::BareElement> {
  static constexpr ElementType type = ElementType::float32;
  static constexpr const char* name = "bare";
  using arithmetic = float;
  static float load(archetypes::BareElement x) { return x.x_; }
  static archetypes::BareElement store(float x) { return archetypes::BareElement(x); }
};
//! [element_traits]

namespace archetypes {

// ---- Parameter

//! [Parameter]
struct Scalar {
  float* value;
  float* slope;
  std::string_view name() const { return "scalar"; }
  std::span<const std::size_t> shape() const { return {}; }
  std::span<float> values() const { return {value, 1}; }
  std::span<float> gradient() const { return {slope, 1}; }
};
//! [Parameter]

/// Converts to `To`, once, and is nothing else.
template <class To>
struct ConvertsTo {
  explicit ConvertsTo(To value) : value_(value) {}
  operator To() const { return value_; }  // NOLINT: implicit on purpose

 private:
  To value_;
};

/// What a framework has: memory that it owns.
template <class T = float>
struct Tensor {
  std::string name;
  std::vector<std::size_t> shape;
  std::vector<T> values;
  std::vector<T> gradient;
};

/// Neither copied nor assigned; group and attributes are left out.
class BareParameter {
 public:
  BareParameter() = delete;
  /// @param tensor anything with name, shape, values and gradient, which it views
  template <class Source>
    requires(!std::same_as<Source, BareParameter>)
  explicit BareParameter(Source& tensor)
      : name_(tensor.name),
        shape_(tensor.shape),
        values_(tensor.values),
        gradient_(tensor.gradient) {}
  BareParameter(BareParameter&&) = default;
  BareParameter& operator=(BareParameter&&) = delete;

  ConvertsTo<std::string_view> name() const { return ConvertsTo(name_); }
  ConvertsTo<std::span<const std::size_t>> shape() const { return ConvertsTo(shape_); }
  std::span<float> values() const { return values_; }
  std::span<float> gradient() const { return gradient_; }

 private:
  std::string_view name_;
  std::span<const std::size_t> shape_;
  std::span<float> values_;
  std::span<float> gradient_;
};

class BareRebindable {
 public:
  BareRebindable() = delete;
  explicit BareRebindable(Tensor<float>& tensor) : tensor_(&tensor), values_(tensor.values) {}
  BareRebindable(BareRebindable&&) = default;
  BareRebindable& operator=(BareRebindable&&) = delete;

  ConvertsTo<std::string_view> name() const { return ConvertsTo<std::string_view>(tensor_->name); }
  ConvertsTo<std::span<const std::size_t>> shape() const {
    return ConvertsTo<std::span<const std::size_t>>(tensor_->shape);
  }
  std::span<float> values() const { return values_; }
  std::span<float> gradient() const { return tensor_->gradient; }

  void rebind(std::span<float> values, std::shared_ptr<const void> owner) {
    values_ = values;
    owner_ = std::move(owner);
    tensor_->values = {};  // lets go of the old memory
  }

 private:
  Tensor<float>* tensor_;
  std::span<float> values_;
  std::shared_ptr<const void> owner_;
};

/// Its gradient may move, too.
class BareGradientRebindable : public BareRebindable {
 public:
  explicit BareGradientRebindable(Tensor<float>& tensor)
      : BareRebindable(tensor), tensor_(&tensor), gradient_(tensor.gradient) {}

  std::span<float> gradient() const { return gradient_; }
  void rebind_gradient(std::span<float> gradient, std::shared_ptr<const void> owner) {
    gradient_ = gradient;
    gradient_owner_ = std::move(owner);
    tensor_->gradient = {};
  }

 private:
  Tensor<float>* tensor_;
  std::span<float> gradient_;
  std::shared_ptr<const void> gradient_owner_;
};

/// Typed at run time: a lane of float and a lane of double.
class BareVariantParameter {
 public:
  using Values = std::variant<std::span<float>, std::span<double>>;
  using AnyTensor = std::variant<Tensor<float>, Tensor<double>>;
  BareVariantParameter() = delete;
  explicit BareVariantParameter(AnyTensor& tensor) : tensor_(&tensor) {}
  BareVariantParameter(BareVariantParameter&&) = default;
  BareVariantParameter& operator=(BareVariantParameter&&) = delete;

  std::string name() const {
    return std::visit([](const auto& t) { return t.name; }, *tensor_);
  }
  ConvertsTo<std::span<const std::size_t>> shape() const {
    return ConvertsTo<std::span<const std::size_t>>(
        std::visit([](const auto& t) { return std::span<const std::size_t>(t.shape); }, *tensor_));
  }
  Values values() const {
    return std::visit([](auto& t) { return Values(std::span(t.values)); }, *tensor_);
  }
  Values gradient() const {
    return std::visit([](auto& t) { return Values(std::span(t.gradient)); }, *tensor_);
  }

 private:
  AnyTensor* tensor_;
};

// ---- ParamStore

/// The iterator of `BareStore`: random access, and not one operator more.
template <class P>
class BareIterator {
 public:
  using iterator_concept = std::random_access_iterator_tag;
  using value_type = P;
  using difference_type = std::ptrdiff_t;

  BareIterator() = default;
  explicit BareIterator(P* at) : at_(at) {}
  P& operator*() const { return *at_; }
  P& operator[](difference_type n) const { return at_[n]; }
  BareIterator& operator++() { return *this += 1; }
  BareIterator& operator--() { return *this -= 1; }
  BareIterator operator++(int) { return BareIterator(at_++); }
  BareIterator operator--(int) { return BareIterator(at_--); }
  BareIterator& operator+=(difference_type n) {
    at_ += n;
    return *this;
  }
  BareIterator& operator-=(difference_type n) { return *this += -n; }
  friend BareIterator operator+(BareIterator a, difference_type n) { return a += n; }
  friend BareIterator operator+(difference_type n, BareIterator a) { return a += n; }
  friend BareIterator operator-(BareIterator a, difference_type n) { return a -= n; }
  friend difference_type operator-(BareIterator a, BareIterator b) { return a.at_ - b.at_; }
  friend auto operator<=>(BareIterator, BareIterator) = default;

 private:
  P* at_ = nullptr;
};

/// Neither copied nor moved (used as an lvalue), only read as non-const, with a sentinel for an end
/// and a signed size.
template <class P>
class BareStore {
 public:
  struct Sentinel {
    P* end;
    friend bool operator==(BareIterator<P> at, Sentinel s) { return at == BareIterator<P>(s.end); }
  };

  BareStore() = delete;
  template <class Tensors>
  explicit BareStore(Tensors& tensors) {
    parameters_.reserve(tensors.size());
    for (auto& tensor : tensors) parameters_.emplace_back(tensor);
  }
  BareStore(BareStore&&) = delete;

  BareIterator<P> begin() { return BareIterator<P>(parameters_.data()); }
  Sentinel end() { return {parameters_.data() + parameters_.size()}; }
  int size() { return static_cast<int>(parameters_.size()); }

 private:
  std::vector<P> parameters_;
};

/// A store that is one buffer.
class BareFlatStore : public BareStore<BareParameter> {
 public:
  /// @param tensors views in order into `values` and `gradient`
  template <class Tensors>
  BareFlatStore(Tensors& tensors, std::span<float> values, std::span<float> gradient)
      : BareStore(tensors), values_(values), gradient_(gradient) {}
  std::span<float> flat_values() { return values_; }
  std::span<float> flat_gradient() { return gradient_; }

 private:
  std::span<float> values_;
  std::span<float> gradient_;
};

// ---- UpdateRule

// clang-format off
//! [UpdateRule]
struct SignSgd {
  double lr = 1e-3;
  static constexpr std::array<std::string_view, 0> slots{};
  template <class Real> struct Scalars { Real lr; };
  template <class Real> ZERO_HOST_DEVICE Scalars<Real> scalars(std::int64_t) const {
    return {Real(lr)};
  }
  template <class X, class Real>
  ZERO_HOST_DEVICE static void update(X& value, const X& gradient, const Scalars<Real>& s) {
    value = value - s.lr * zero::sign(gradient);
  }
};
//! [UpdateRule]
// clang-format on

/// `zero::Sgd` with momentum in its bits, without `used_slots` and `validate`.
struct BareRule : NotFromNothing {
  explicit BareRule(double learning_rate, double momentum)
      : NotFromNothing(0), lr(learning_rate), mu(momentum) {}
  double lr, mu;
  static constexpr std::array<const char*, 1> slots{"velocity"};
  template <class Real>
  class Scalars : NotFromNothing {
   public:
    Scalars(Real learning_rate, Real momentum)
        : NotFromNothing(0), lr(learning_rate), mu(momentum) {}
    const Real lr, mu;
  };
  template <class Real>
  Scalars<Real> scalars(std::int64_t) const {
    return {static_cast<Real>(lr), static_cast<Real>(mu)};
  }
  template <class X, class Real>
  static void update(X& value, const X& gradient, X& velocity, const Scalars<Real>& s) {
    velocity = velocity * s.mu + gradient;
    value = value - velocity * s.lr;
  }
};

// ---- WholeTensorOptimizer

// clang-format off
//! [WholeTensorOptimizer]
struct NormalizedDescent {
  double lr = 1e-3;
  static constexpr std::array<std::string_view, 0> slots{};
  template <class T>
  void update(zero::TensorRef<T> tensor, std::array<std::span<T>, 0>, std::int64_t) const {
    double squares = 0;
    for (const T g : tensor.gradient) squares += double(g) * double(g);
    const T scale = squares > 0 ? T(lr / zero::sqrt(squares)) : T(0);
    for (std::size_t i = 0; i < tensor.values.size(); ++i) {
      tensor.values[i] -= scale * tensor.gradient[i];
    }
  }
};
//! [WholeTensorOptimizer]
// clang-format on

/// Scales a tensor's step by the size of its first extent.
struct BareWholeTensor : NotFromNothing {
  using NotFromNothing::NotFromNothing;
  static constexpr std::array<const char*, 1> slots{"velocity"};
  void update(zero::TensorRef<float> tensor, std::array<std::span<float>, 1> state,
              std::int64_t) const {
    const std::size_t extent = tensor.shape.empty() ? 1 : tensor.shape[0];
    for (std::size_t i = 0; i < tensor.values.size(); ++i) {
      state[0][i] += tensor.gradient[i];
      tensor.values[i] -= state[0][i] / static_cast<float>(extent);
    }
  }
};

// ---- MatrixProduct

// clang-format off
//! [MatrixProduct]
struct NaiveProduct {
  template <class T>
  void multiply(std::size_t m, std::size_t n, std::size_t k, const T* a, const T* b,
                zero::Transpose transpose_b, T* c) const {
    const bool transposed = transpose_b == zero::Transpose::yes;
    for (std::size_t i = 0; i < m; ++i) {
      for (std::size_t j = 0; j < n; ++j) {
        T sum = 0;
        for (std::size_t p = 0; p < k; ++p) {
          sum += a[i * k + p] * (transposed ? b[j * k + p] : b[p * n + j]);
        }
        c[i * n + j] = sum;
      }
    }
  }
};
//! [MatrixProduct]
// clang-format on

/// For floats alone, and made from something.
struct BareProduct : NotFromNothing {
  using NotFromNothing::NotFromNothing;
  void multiply(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b,
                zero::Transpose transpose_b, float* c) const {
    NaiveProduct().multiply(m, n, k, a, b, transpose_b, c);
  }
};

// ---- Communicator

//! [Request]
/// Over when it is started.
struct SoloRequest : MoveOnly {
  using MoveOnly::MoveOnly;
  void wait() {}
  void wait(std::chrono::nanoseconds) {}
  bool done() { return true; }
};
//! [Request]

//! [operations]
/// What a rank alone receives is what it sends, perhaps in place.
template <class T>
SoloRequest solo_copy(std::span<const T> input, std::span<T> output) {
  if (!input.empty()) std::memmove(output.data(), input.data(), input.size_bytes());
  return SoloRequest(0);
}

// Each operation alone.
struct SoloRanked {
  int rank() const { return 0; }
  int size() const { return 1; }
};
struct SoloAllReduce {
  template <class T>
  SoloRequest all_reduce(std::span<T>, zero::ReduceOp) {
    return SoloRequest(0);
  }
};
struct SoloReduceScatter {
  template <class T>
  SoloRequest reduce_scatter(std::span<const T> input, std::span<T> output, zero::ReduceOp) {
    return solo_copy(input, output);
  }
};
struct SoloReduceScatterV {
  template <class T>
  SoloRequest reduce_scatter_v(std::span<const T> input, std::span<T> output,
                               std::span<const std::size_t>, zero::ReduceOp) {
    return solo_copy(input, output);
  }
};
struct SoloAllGather {
  template <class T>
  SoloRequest all_gather(std::span<const T> input, std::span<T> output) {
    return solo_copy(input, output);
  }
};
struct SoloAllGatherV {
  template <class T>
  SoloRequest all_gather_v(std::span<const T> input, std::span<T> output,
                           std::span<const std::size_t>) {
    return solo_copy(input, output);
  }
};
struct SoloAllToAll {
  template <class T>
  SoloRequest all_to_all(std::span<const T> input, std::span<T> output) {
    return solo_copy(input, output);
  }
};
struct SoloAllToAllV {
  template <class T>
  SoloRequest all_to_all_v(std::span<const T> input, std::span<const std::size_t>,
                           std::span<T> output, std::span<const std::size_t>) {
    return solo_copy(input, output);
  }
};
struct SoloBroadcast {
  template <class T>
  SoloRequest broadcast(std::span<T>, int) {
    return SoloRequest(0);
  }
};
struct SoloBarrier {
  SoloRequest barrier() { return SoloRequest(0); }
};
struct SoloHostExchange {
  SoloRequest exchange(std::span<const std::byte> mine, std::span<std::byte> all) {
    return solo_copy(mine, all);
  }
};
struct SoloAbortable {
  void abort(std::string) {}
};
struct SoloBatching {
  struct Nothing {};
  Nothing batch() { return {}; }
};
struct SoloCapable {
  static constexpr zero::MemorySpace memory_space = zero::MemorySpace::host;
  static constexpr bool supports(zero::ElementType) { return true; }
  static constexpr bool supports(zero::ReduceOp) { return true; }
};
//! [operations]

//! [Communicator]
/// A world of one rank: nothing to sum, nobody to wait for.
struct SoloCommunicator : MoveOnly,
                          SoloRanked,
                          SoloAllReduce,
                          SoloReduceScatter,
                          SoloReduceScatterV,
                          SoloAllGather,
                          SoloAllGatherV,
                          SoloAllToAll,
                          SoloAllToAllV,
                          SoloBroadcast,
                          SoloBarrier,
                          SoloHostExchange,
                          SoloAbortable,
                          SoloBatching,
                          SoloCapable {
  using MoveOnly::MoveOnly;
};
//! [Communicator]

//! [SharedMemoryCommunicator]
/// The meeting of a world of one.
struct SoloMeeting : SoloRequest {
  explicit SoloMeeting(const void* published) : SoloRequest(0), published_(published) {}
  std::span<const void* const> peers() { return {&published_, 1}; }
  std::span<const void* const> peers(std::chrono::nanoseconds) { return peers(); }
  void leave() {}

 private:
  const void* published_;
};

struct SoloSharedCommunicator : SoloCommunicator {
  using SoloCommunicator::SoloCommunicator;
  SoloMeeting meet(const char*, const void* published) { return SoloMeeting(published); }
};
//! [SharedMemoryCommunicator]

/// A request of several ranks, without what `InProcessRequest` has beyond the concept.
template <class R>
class BareRequest {
 public:
  BareRequest() = delete;
  explicit BareRequest(R inner) : inner_(std::move(inner)) {}
  void wait() { inner_.wait(); }
  void wait(std::chrono::nanoseconds timeout) { inner_.wait(timeout); }
  bool done() { return inner_.done(); }

 protected:
  R inner_;
};

class BareMeeting : public BareRequest<zero::InProcessMeeting> {
 public:
  using BareRequest::BareRequest;
  std::span<const void* const> peers() { return inner_.peers(); }
  std::span<const void* const> peers(std::chrono::nanoseconds timeout) {
    return inner_.peers(timeout);
  }
  void leave() { inner_.leave(); }
};

/// Several ranks, each operation with a request type of its own, as far as the concept goes.
class BareCommunicator {
  template <int operation>
  struct Started : BareRequest<zero::InProcessRequest> {
    using BareRequest::BareRequest;
  };
  using Op = zero::ReduceOp;
  using Counts = std::span<const std::size_t>;

 public:
  BareCommunicator() = delete;
  explicit BareCommunicator(const zero::InProcessCommunicator& inner) : inner_(inner) {}
  BareCommunicator(BareCommunicator&&) = default;
  BareCommunicator& operator=(BareCommunicator&&) = delete;

  static constexpr zero::MemorySpace memory_space = zero::MemorySpace::host;
  static constexpr bool supports(zero::ElementType) { return true; }
  static constexpr bool supports(zero::ReduceOp) { return true; }
  int rank() const { return inner_.rank(); }
  int size() const { return inner_.size(); }

  template <class T>
  Started<0> all_reduce(std::span<T> data, Op op) {
    return Started<0>(inner_.all_reduce(data, op));
  }
  template <class T>
  Started<1> reduce_scatter(std::span<const T> input, std::span<T> output, Op op) {
    return Started<1>(inner_.reduce_scatter(input, output, op));
  }
  template <class T>
  Started<2> reduce_scatter_v(std::span<const T> input, std::span<T> output, Counts counts, Op op) {
    return Started<2>(inner_.reduce_scatter_v(input, output, counts, op));
  }
  template <class T>
  Started<3> all_gather(std::span<const T> input, std::span<T> output) {
    return Started<3>(inner_.all_gather(input, output));
  }
  template <class T>
  Started<4> all_gather_v(std::span<const T> input, std::span<T> output, Counts counts) {
    return Started<4>(inner_.all_gather_v(input, output, counts));
  }
  template <class T>
  Started<5> all_to_all(std::span<const T> input, std::span<T> output) {
    return Started<5>(inner_.all_to_all(input, output));
  }
  template <class T>
  Started<6> all_to_all_v(std::span<const T> input, Counts send, std::span<T> output,
                          Counts receive) {
    return Started<6>(inner_.all_to_all_v(input, send, output, receive));
  }
  template <class T>
  Started<7> broadcast(std::span<T> data, int root) {
    return Started<7>(inner_.broadcast(data, root));
  }
  Started<8> barrier() { return Started<8>(inner_.barrier()); }
  Started<9> exchange(std::span<const std::byte> mine, std::span<std::byte> all) {
    return Started<9>(inner_.exchange(mine, all));
  }
  void abort(std::string reason) { inner_.abort(reason); }
  MoveOnly batch() { return MoveOnly(0); }

 protected:
  zero::InProcessCommunicator inner_;
};

class BareSharedCommunicator : public BareCommunicator {
 public:
  using BareCommunicator::BareCommunicator;
  BareMeeting meet(const char* operation, const void* published) {
    return BareMeeting(inner_.meet(operation, published));
  }
};

// ---- PartitionPolicy

//! [CuttingPartition]
struct FirstRankOnly {
  static constexpr bool cuts_tensors = true;
  constexpr std::size_t cut(std::size_t n, std::size_t, int, int rank) const {
    return rank == 0 ? 0 : n;
  }
};
//! [CuttingPartition]

/// Everything on one rank (the last where there are fewer), which it must be told.
struct BareCuttingPartition : NotFromNothing {
  explicit BareCuttingPartition(int rank) : NotFromNothing(0), owner(rank) {}
  int owner;
  static constexpr bool cuts_tensors = true;
  std::size_t cut(std::size_t n, std::size_t, int world, int rank) const {
    return rank <= std::min(owner, world - 1) ? 0 : n;
  }
};

/// Round after round, beginning with the last rank.
struct BareWholeTensorPartition : NotFromNothing {
  using NotFromNothing::NotFromNothing;
  static constexpr bool cuts_tensors = false;
  void assign(std::span<const std::size_t> elements, std::span<std::size_t> loads,
              std::span<int> owners) const {
    for (std::size_t i = 0; i < elements.size(); ++i) {
      const std::size_t rank = loads.size() - 1 - i % loads.size();
      loads[rank] += elements[i];
      owners[i] = static_cast<int>(rank);
    }
  }
};

// ---- BucketViewPolicy

//! [BucketViewPolicy]
struct SmallBuckets {
  static constexpr zero::Residency values = zero::Residency::caller;
  static constexpr zero::Residency gradients = zero::Residency::caller;
  std::size_t bucket_bytes = 1024;
};
//! [BucketViewPolicy]

/// Moves values; its size is a number of another type.
struct BareArenaView : NotFromNothing {
  explicit BareArenaView(int bytes)
      : NotFromNothing(0), bucket_bytes(static_cast<std::uint16_t>(bytes)) {}
  static constexpr zero::Residency values = zero::Residency::arena;
  static constexpr zero::Residency gradients = zero::Residency::caller;
  std::uint16_t bucket_bytes;
};

struct BareGradientArenaView : BareArenaView {
  using BareArenaView::BareArenaView;
  static constexpr zero::Residency gradients = zero::Residency::arena;
};

// ---- StagePolicy

/// The constants need not be of type `bool`.
struct BareStage : NotFromNothing {
  using NotFromNothing::NotFromNothing;
  static constexpr std::true_type shards_state{};
  static constexpr std::false_type shards_gradients{};
  static constexpr std::false_type shards_values{};
};

// ---- PrecisionPolicy

//! [PrecisionPolicy]
struct OwnPrecision {
  template <class T>
  using Master = T;
  template <class T>
  using Slot = T;
  template <class T>
  using Wire = T;
  static constexpr zero::Rounding rounding = zero::Rounding::nearest;
};
//! [PrecisionPolicy]

struct BarePrecision : NotFromNothing, OwnPrecision {
  using NotFromNothing::NotFromNothing;
};

/// Rounds stochastically, so it has a seed.
struct BareNoisyPrecision : BarePrecision {
  using BarePrecision::BarePrecision;
  static constexpr zero::Rounding rounding = zero::Rounding::stochastic;
  ConvertsTo<std::uint64_t> seed{7};
};

// ---- Observer

//! [Observer]
struct BucketCounter {
  std::size_t updated = 0;
  void begin(const zero::Event&) {}
  void end(const zero::Event& event) { updated += event.phase == zero::Phase::update; }
};
//! [Observer]

struct BareObserver : MoveOnly {
  using MoveOnly::MoveOnly;
  void begin(const zero::Event&) {}
  void end(const zero::Event&) {}
};

}  // namespace archetypes
