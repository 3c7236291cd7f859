// SPDX-License-Identifier: Apache-2.0
// Arrays of address space: memory comes by writing and goes by being released, and nothing else
// is touched.
#include "zero/detail/reserved_array.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <new>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "catch.hpp"
#include "zero/bfloat16.hpp"
#include "zero/config.hpp"
#include "zero/memory.hpp"

#if ZERO_RESERVED_MEMORY
#include <unistd.h>
#endif

namespace {

using zero::detail::ReservedArray;

constexpr std::size_t mebibyte = std::size_t{1} << 20U;
constexpr std::size_t largest_page = 65536 / sizeof(float);  // in elements; huge ones apart

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool is_instrumented = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr bool is_instrumented = true;
#else
constexpr bool is_instrumented = false;
#endif
#else
constexpr bool is_instrumented = false;
#endif

/// What this process has in memory, in bytes; nothing where the system doesn't say.
std::optional<std::size_t> resident_bytes() {
#if ZERO_RESERVED_MEMORY
  std::ifstream file("/proc/self/statm");
  std::size_t size = 0, resident = 0;
  if (file >> size >> resident) return resident * static_cast<std::size_t>(::getpagesize());
#endif
  return std::nullopt;
}

template <class T>
bool all_are(std::span<T> elements, float value) {
  return std::all_of(elements.begin(), elements.end(), [&](T x) {
    return zero::element_traits<std::remove_const_t<T>>::load(x) == value;
  });
}

template <class T>
void fill(std::span<T> elements, float value) {
  std::fill(elements.begin(), elements.end(), zero::element_traits<T>::store(value));
}

static_assert(!std::is_copy_constructible_v<ReservedArray<float>>);
static_assert(std::is_nothrow_move_constructible_v<ReservedArray<float>>);
static_assert(std::is_nothrow_move_assignable_v<ReservedArray<float>>);

}  // namespace

TEST_CASE("reserved arrays read as zeros and keep what is written", "[memory]") {
  const auto check = [](auto element, std::size_t count) {
    using T = decltype(element);
    CAPTURE(count, sizeof(T));
    ReservedArray<T> array(count);
    REQUIRE(array.size() == count);
    CHECK(array.bytes() == count * sizeof(T));
    CHECK(array.span().size() == count);
    CHECK(reinterpret_cast<std::uintptr_t>(array.data()) % zero::array_alignment == 0);
    CHECK(all_are(std::as_const(array).span(), 0));
    fill(array.span(), 3);
    CHECK(all_are(array.span(), 3));
  };
  for (const std::size_t count : {1U, 7U, 1024U, 1025U, 100'001U, 1'048'576U, 1'100'003U}) {
    check(float{}, count);
    check(double{}, count);
    check(zero::bfloat16{}, count);
  }
}

TEST_CASE("reserved arrays: what is released reads as zeros, and its neighbours don't",
          "[memory]") {
  constexpr std::size_t count = 9 * mebibyte / sizeof(float) + 5;
  ReservedArray<float> array(count);
  const std::span<float> all = array.span();
  const std::pair<std::size_t, std::size_t> intervals[] = {{0, count},         {0, 1},
                                                           {count - 1, count}, {5, 5},
                                                           {1023, 1025},       {1000, 700'001},
                                                           {1024, 2048},       {333'333, 1'999'999},
                                                           {count / 2, count}, {65'536, 1'048'576}};
  for (const auto& [begin, end] : intervals) {
    CAPTURE(begin, end);
    fill(all, 2);
    array.release(begin, end);
    CHECK(all_are(all.first(begin), 2));
    CHECK(all_are(all.subspan(end), 2));
    // What lies on a page at either end, whose size is the system's, may be either.
    const std::span<float> released = all.subspan(begin, end - begin);
    if (ReservedArray<float>::releases && released.size() > 2 * largest_page) {
      CHECK(all_are(released.subspan(largest_page, released.size() - 2 * largest_page), 0));
    }
    std::size_t others = 0;
    for (const float x : released) others += x != 0 && x != 2 ? 1U : 0U;
    CHECK(others == 0);
    fill(released, 4);  // it can be used again
    CHECK(all_are(released, 4));
    CHECK(array.data() == all.data());
  }
}

TEST_CASE("reserved arrays have memory only where they were written", "[memory]") {
  if (!ReservedArray<float>::releases) return;
  const std::optional<std::size_t> before = resident_bytes();
  if (!before || is_instrumented) {
    WARN("the system or a sanitizer hides what memory is there: not tested");
    return;
  }
  constexpr std::size_t size = 1024 * mebibyte / sizeof(float);
  // Pieces that start and end on no page, as buckets do; each but the last is released at once.
  constexpr std::size_t piece = 25 * mebibyte / sizeof(float) + 12'345;
  constexpr std::size_t pieces = 6;
  ReservedArray<float> array(size);
  const auto grown = [&] {
    const std::size_t now = resident_bytes().value_or(0);
    return now > *before ? now - *before : 0;
  };
  CHECK(grown() < 2 * mebibyte);
  for (std::size_t i = 0; i < pieces; ++i) {
    fill(array.span().subspan(i * piece, piece), 1);
    CHECK(grown() > piece * sizeof(float) - mebibyte);
    CHECK(grown() < piece * sizeof(float) + 10 * mebibyte);
    array.release(i * piece, (i + 1) * piece);
    CHECK(grown() < 8 * mebibyte);
  }
  fill(array.span().first(pieces * piece), 1);
  array.release(0, pieces * piece);
  CHECK(grown() < 8 * mebibyte);
}

TEST_CASE("reserved arrays move, with their memory", "[memory]") {
  ReservedArray<float> array(3'000'000);
  fill(array.span(), 5);
  float* const data = array.data();
  ReservedArray<float> other = std::move(array);
  CHECK(array.size() == 0);  // NOLINT(bugprone-use-after-move)
  CHECK(array.data() == nullptr);
  CHECK(other.data() == data);
  CHECK(all_are(other.span(), 5));
  ReservedArray<float> third(10);
  third = std::move(other);
  CHECK(third.data() == data);
  CHECK(third.size() == 3'000'000);
  array = std::move(third);
  CHECK(all_are(array.span(), 5));
  third = ReservedArray<float>();
  CHECK(third.size() == 0);
}

TEST_CASE("reserved arrays of nothing, and of too much", "[memory]") {
  ReservedArray<float> none(0);
  CHECK(none.size() == 0);
  CHECK(none.bytes() == 0);
  CHECK(none.data() == nullptr);
  CHECK(none.span().empty());
  none.release(0, 0);
  CHECK(ReservedArray<double>().size() == 0);

  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  CHECK_THROWS_AS(ReservedArray<double>(most), std::bad_alloc);
  CHECK_THROWS_AS(ReservedArray<double>(most / sizeof(double)), std::bad_alloc);
  if (ReservedArray<float>::releases) {  // elsewhere an allocator may call this an error
    CHECK_THROWS_AS(ReservedArray<float>(most / 32), std::bad_alloc);
  }
}
