// SPDX-License-Identifier: Apache-2.0
// Makes two optimizers use the same pages, one after the other.
#pragma once

#include <cstddef>
#include <memory_resource>
#include <stdexcept>
#include <utility>
#include <vector>
#include <zero/memory.hpp>

namespace bench {

/// Hands out arrays that the benchmark owns, in order. A second optimizer that is given a resource
/// over the same arrays, or a loop over them, then has the same pages: how those happen to lie in
/// memory can't favour one of them, and memory is needed once.
class GivenMemory final : public std::pmr::memory_resource {
 public:
  explicit GivenMemory(std::vector<zero::HostArray<float>*> arrays) : arrays_(std::move(arrays)) {}

 private:
  void* do_allocate(std::size_t bytes, std::size_t) override {
    if (next_ == arrays_.size() || bytes > arrays_[next_]->bytes()) {
      throw std::runtime_error("GivenMemory: " + std::to_string(bytes) +
                               " bytes are more than was prepared");
    }
    return arrays_[next_++]->data();
  }
  void do_deallocate(void*, std::size_t, std::size_t) override {}
  [[nodiscard]] bool do_is_equal(const memory_resource& other) const noexcept override {
    return this == &other;
  }

  std::vector<zero::HostArray<float>*> arrays_;
  std::size_t next_ = 0;
};

}  // namespace bench
