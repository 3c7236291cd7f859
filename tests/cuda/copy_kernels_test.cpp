// SPDX-License-Identifier: Apache-2.0
/// @file
/// Copies between parameters and buckets, for fragments of any length and alignment; uploads and
/// clearing.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "catch.hpp"
#include "device_array.hpp"
#include "zero/bfloat16.hpp"
#include "zero/cuda/detail/copy.cuh"
#include "zero/float16.hpp"

namespace {

namespace gpu = zero::cuda::detail;
using zero::cuda::StreamView;

/// The i-th of some numbers that differ from their neighbours, and need rounding in 16 bits.
template <class T>
T number(std::size_t i) {
  return zero::element_traits<T>::store(zero::arithmetic_t<T>(1.0 + double(i % 5003) / 3));
}

/// Parameters that lie in a bucket one after the other, some without a gradient.
template <class T>
struct Parameters {
  /// @param apart elements by which arrays are moved off vectors' boundaries
  explicit Parameters(std::size_t apart) {
    for (const std::size_t length : {5U, 1U, 0U, 64U, 9000U, 777U, 8192U}) {
      std::vector<T> from(length), to(length);
      for (std::size_t i = 0; i < length; ++i) from[i] = number<T>(elements + i);
      gradients.emplace_back(from, gradients.size() * apart % 9);
      values.emplace_back(to, (gradients.size() * apart + apart) % 9);
      const bool absent = length == 64;
      fragments.push_back({.values = values.back().data(),
                           .gradient = absent ? nullptr : gradients.back().data(),
                           .begin = elements,
                           .elements = length,
                           .parameter_begin = 0,
                           .parameter = 0});
      for (std::size_t i = 0; i < length; ++i) {
        packed.push_back(absent ? zero::detail::zero_of<T>() : from[i]);
      }
      elements += apart == 0 ? (length + 7) / 8 * 8 : length;
      packed.resize(elements, number<T>(77));  // between parameters nothing is written
    }
  }
  /// Runs a copy into or out of `bucket`.
  template <class B, class Copy>
  void run(const DeviceArray<B>& bucket, const Copy& copy) const {
    const DeviceArray<gpu::DeviceFragment<T>> table(fragments);
    const DeviceArray<gpu::Chunk> chunks(gpu::make_chunks<T>(fragments));
    copy(gpu::CopyTask<T, B>{table.data(), chunks.data(), chunks.size(), bucket.data()});
    (void)table.host();  // waits before the tables are freed
  }

  std::size_t elements = 0;
  std::vector<DeviceArray<T>> gradients, values;
  std::vector<gpu::DeviceFragment<T>> fragments;
  std::vector<T> packed;
};

}  // namespace

TEMPLATE_TEST_CASE("Gradients are packed, zeros where there are none", "", float, double,
                   zero::bfloat16) {
  for (const std::size_t apart : {0U, 1U, 3U}) {
    const Parameters<TestType> parameters(apart);
    const DeviceArray<TestType> bucket(
        std::vector<TestType>(parameters.elements, number<TestType>(77)), apart);
    parameters.run(bucket, [](const auto& task) { gpu::pack_gradients(task, StreamView{}); });
    CHECK(same_bytes(bucket.host(), parameters.packed));
  }
}

TEMPLATE_TEST_CASE("Gradients of float are rounded to nearest on their way", "", zero::bfloat16,
                   zero::float16) {
  for (const std::size_t apart : {0U, 1U, 4U}) {
    const Parameters<float> parameters(apart);
    const auto rounded = [](float x) { return TestType(x); };
    std::vector<TestType> expected(parameters.elements);
    std::transform(parameters.packed.begin(), parameters.packed.end(), expected.begin(), rounded);
    const DeviceArray<TestType> bucket(
        std::vector<TestType>(parameters.elements, rounded(number<float>(77))), apart);
    parameters.run(bucket, [](const auto& task) { gpu::pack_gradients(task, StreamView{}); });
    CHECK(same_bytes(bucket.host(), expected));
  }
}

TEMPLATE_TEST_CASE("Values come out of a bucket and go into one", "", float, double,
                   zero::bfloat16) {
  for (const std::size_t apart : {0U, 1U, 3U}) {
    const Parameters<TestType> parameters(apart);
    const DeviceArray<TestType> full(parameters.packed, apart);
    parameters.run(full, [](const auto& task) { gpu::unpack_values(task, StreamView{}); });
    for (std::size_t p = 0; p < parameters.fragments.size(); ++p) {
      const auto from = parameters.packed.begin() + std::ptrdiff_t(parameters.fragments[p].begin);
      const std::vector<TestType> expected(from,
                                           from + std::ptrdiff_t(parameters.fragments[p].elements));
      CHECK(same_bytes(parameters.values[p].host(), expected));
    }
    const DeviceArray<TestType> again(
        std::vector<TestType>(parameters.elements, number<TestType>(77)), 2 * apart);
    parameters.run(again, [](const auto& task) { gpu::pack_values(task, StreamView{}); });
    CHECK(same_bytes(again.host(), parameters.packed));
  }
}

TEST_CASE("Uploaded bytes are the host's at the time of the call") {
  for (const std::size_t bytes : {0U, 1U, 3584U, 3585U, 10001U}) {
    std::vector<unsigned char> from(bytes);
    std::iota(from.begin(), from.end(), static_cast<unsigned char>(7));
    const auto expected = from;
    const DeviceArray<unsigned char> to(std::vector<unsigned char>(bytes), 3);
#if ZERO_CUDA_EMULATED
    zero_emulation::reset();
    zero_emulation::delay(1, 500);
#endif
    gpu::upload(to.data(), std::as_bytes(std::span(from)), StreamView{});
    std::fill(from.begin(), from.end(), static_cast<unsigned char>(0));
#if ZERO_CUDA_EMULATED
    CHECK(zero_emulation::counters().launches == (bytes + 3583) / 3584);
    CHECK(zero_emulation::counters().host_synchronizations == 0);
    zero_emulation::delay(1, 0);
#endif
    CHECK(to.host() == expected);
  }
}

TEST_CASE("Ranges are cleared, and nothing beside them") {
  constexpr std::size_t room = 200'000;
  const DeviceArray<unsigned char> memory(std::vector<unsigned char>(room, 1));
  std::vector<unsigned char> expected(room, 1);
  std::vector<gpu::ByteRange> ranges;
  std::size_t begin = 1;
  for (const std::size_t bytes : {1U, 0U, 15U, 16U, 48U, 100'003U, 65'536U}) {
    ranges.push_back({memory.data() + begin, bytes});
    std::fill_n(expected.begin() + std::ptrdiff_t(begin), bytes, static_cast<unsigned char>(0));
    begin += bytes + 1;
  }
  const auto pieces = gpu::cut(ranges);
  CHECK(pieces.size() > ranges.size());
  const DeviceArray<gpu::ByteRange> table(pieces);
  gpu::clear(table.data(), table.size(), StreamView{});
  CHECK(memory.host() == expected);
}
