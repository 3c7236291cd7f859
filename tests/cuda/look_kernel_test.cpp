// SPDX-License-Identifier: Apache-2.0
/// @file
/// The one pass over gradients finds what the host finds: the same exact sum of squares, to the
/// bit, and the same NaNs and infinities.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "catch.hpp"
#include "device_array.hpp"
#include "zero/bfloat16.hpp"
#include "zero/cuda/detail/look.cuh"
#include "zero/detail/findings.hpp"
#include "zero/detail/square_sum.hpp"
#include "zero/float16.hpp"

namespace {

namespace gpu = zero::cuda::detail;
using zero::detail::ExactSum;
using zero::detail::SquareSum;

/// Gradients of several parameters, each somewhere.
template <class T>
class Gradients {
 public:
  using A = zero::arithmetic_t<T>;

  void add(const std::vector<T>& numbers) {
    gradients_.emplace_back(numbers, gradients_.size() % 5);
    fragments_.push_back({.values = nullptr,
                          .gradient = gradients_.back().data(),
                          .begin = sums_.size(),
                          .elements = numbers.size(),
                          .parameter_begin = 0,
                          .parameter = 0});
    for (const T x : numbers) sums_.push_back(zero::detail::load_element(x));
  }
  /// A parameter without a gradient: memory that no one may read, and no sums.
  void add_none(std::size_t elements) {
    fragments_.push_back({.values = nullptr,
                          .gradient = nullptr,
                          .begin = sums_.size(),
                          .elements = elements,
                          .parameter_begin = 0,
                          .parameter = 0});
    sums_.resize(sums_.size() + elements);
  }

  template <class Look>
  gpu::DeviceDigits look(bool at_sums, const gpu::DeviceDigits& before, const Look& look) const {
    const DeviceArray<gpu::DeviceFragment<T>> fragments(fragments_);
    const DeviceArray<gpu::Chunk> chunks(gpu::make_chunks<T>(fragments_));
    const DeviceArray<A> sums(sums_);
    const DeviceArray<gpu::DeviceDigits> digits(std::vector<gpu::DeviceDigits>{before});
    look(gpu::LookTask<T>{.fragments = fragments.data(),
                          .chunks = chunks.data(),
                          .chunk_count = chunks.size(),
                          .sums = at_sums ? sums.data() : nullptr,
                          .digits = digits.data()});
    return digits.host()[0];
  }
  [[nodiscard]] ExactSum squares(bool at_sums) const {
    return gpu::to_exact_sum(look(at_sums, {}, [](const gpu::LookTask<T>& task) {
      gpu::add_squares(task, zero::cuda::StreamView{});
    }));
  }
  [[nodiscard]] bool finite(bool at_sums) const {
    const auto found = look(at_sums, {}, [](const gpu::LookTask<T>& task) {
      gpu::find_not_finite(task, zero::cuda::StreamView{});
    });
    CHECK(std::all_of(std::begin(found.digit), std::end(found.digit),
                      [](unsigned long long digit) { return digit == 0; }));
    return found.flags == 0;
  }
  /// The same by the host.
  [[nodiscard]] ExactSum expected() const {
    SquareSum sum;
    sum.add(std::span<const A>(sums_));
    return sum;
  }
  [[nodiscard]] bool expected_finite() const {
    return zero::detail::all_finite(std::span<const A>(sums_));
  }
  void check() const {
    for (const bool at_sums : {false, true}) {
      INFO("sums " << at_sums);
      CHECK(squares(at_sums) == expected());
      CHECK(finite(at_sums) == expected_finite());
    }
  }

 private:
  std::vector<DeviceArray<T>> gradients_;
  std::vector<gpu::DeviceFragment<T>> fragments_;
  std::vector<A> sums_;
};

/// `count` numbers of either sign with binary exponents in [from, to).
template <class T>
std::vector<T> random_numbers(std::size_t count, int from, int to, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> fraction(1, 2);
  std::vector<T> numbers;
  for (std::size_t i = 0; i < count; ++i) {
    const int exponent = from + int(random() % unsigned(to - from));
    const double x = std::ldexp(random() % 2 == 0 ? fraction(random) : -fraction(random), exponent);
    numbers.push_back(zero::element_traits<T>::store(zero::arithmetic_t<T>(x)));
  }
  return numbers;
}

template <class T>
void add_usual(Gradients<T>& gradients) {
  for (const std::size_t length : {1U, 0U, 5U, 63U, 1000U, 9001U}) {
    gradients.add(random_numbers<T>(length, -14, 3, unsigned(length)));
  }
}

}  // namespace

TEMPLATE_TEST_CASE("Squares sum up to the host's bits", "", float, double, zero::bfloat16,
                   zero::float16) {
  Gradients<TestType> gradients;
  add_usual(gradients);
  gradients.add_none(100);
  gradients.add(std::vector<TestType>(3000, zero::detail::zero_of<TestType>()));
  add_usual(gradients);
  gradients.check();
}

TEMPLATE_TEST_CASE("So do numbers of any magnitude", "", float, double, zero::bfloat16) {
  constexpr bool narrow = std::is_same_v<zero::arithmetic_t<TestType>, float>;
  Gradients<TestType> gradients;
  gradients.add(random_numbers<TestType>(5000, narrow ? -149 : -1074, narrow ? 127 : 511, 1));
  gradients.add(random_numbers<TestType>(200, narrow ? -149 : -1074, narrow ? -126 : -1022, 2));
  gradients.check();
}

TEST_CASE("A bin that is full is handed over in time") {
  for (int exponent = 1; exponent <= 8; ++exponent) {
    const double limit = std::ldexp(1.0, exponent);
    Gradients<float> floats;
    floats.add(std::vector<float>(20000, std::nextafter(float(limit), 0.0F)));
    floats.check();
    Gradients<double> doubles;
    doubles.add(std::vector<double>(20000, std::sqrt(std::nextafter(limit, 0.0))));
    doubles.check();
  }
}

TEMPLATE_TEST_CASE("NaNs and infinities are found wherever they are", "", float, double,
                   zero::float16) {
  using A = zero::arithmetic_t<TestType>;
  using Limits = std::numeric_limits<A>;
  for (const std::size_t at : {0U, 1U, 500U, 9000U}) {
    for (const A x : {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN()}) {
      auto numbers = random_numbers<TestType>(9001, -5, 5, 1);
      numbers[at] = zero::element_traits<TestType>::store(x);
      Gradients<TestType> gradients;
      gradients.add(numbers);
      gradients.check();
      numbers[9000 - at] = zero::element_traits<TestType>::store(Limits::infinity());
      gradients.add(numbers);
      gradients.check();
    }
  }
}

TEST_CASE("A double whose square is infinite is finite itself") {
  Gradients<double> gradients;
  gradients.add({1.0, 1e200});
  gradients.check();
  CHECK(gradients.finite(true));
  CHECK(gradients.squares(true).value() == std::numeric_limits<double>::infinity());
}

TEST_CASE("Blocks in any number and order add up to the same bits") {
  Gradients<float> gradients;
  for (int i = 0; i < 3; ++i) add_usual(gradients);
  for (const unsigned blocks : {1U, 2U, 5U, 100U}) {
    scramble_blocks(blocks);
    const auto digits = gradients.look(true, {}, [&](const gpu::LookTask<float>& task) {
      gpu::launch("add_squares", &gpu::add_squares_kernel<float>, {blocks, gpu::reducing_threads},
                  zero::cuda::StreamView{}, task);
    });
    scramble_blocks(0);
    CHECK(gpu::to_exact_sum(digits) == gradients.expected());
  }
}

TEST_CASE("A digit that is full hands over to the next one") {
  // Denormal numbers have no bin, so that each is added to its digit at once.
  Gradients<float> gradients;
  gradients.add(random_numbers<float>(3000, -140, -126, 1));
  gpu::DeviceDigits full{};
  for (int d = 0; d < 60; ++d) full.digit[d] = (1ULL << 63) - 1;
  ExactSum expected = gpu::to_exact_sum(full);
  expected.add(gradients.expected());
  const auto digits = gradients.look(true, full, [](const gpu::LookTask<float>& task) {
    gpu::add_squares(task, zero::cuda::StreamView{});
  });
  CHECK(gpu::to_exact_sum(digits) == expected);
  for (const unsigned long long digit : digits.digit) CHECK(digit >> 63 == 0);
}
