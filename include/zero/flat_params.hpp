// SPDX-License-Identifier: Apache-2.0
/// @file
/// A store over one flat buffer of values and one of gradients.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/parameter.hpp"

namespace zero {

/// Parameters that lie one behind the other in a buffer of the caller's, as llm.c keeps them.
/// @tparam Ref what they are shown as; of memory of a device's see zero/cuda/flat_params.hpp
template <Element T = float, class Ref = ParamRef<T>>
class FlatParams {
 public:
  /// One tensor of the buffer.
  struct Entry {
    std::string name;
    std::vector<std::size_t> shape;
    Attributes attributes{};
    std::size_t group = 0;
  };

  /// Throws `UsageError` where the entries' sizes don't add up to the buffer's, or the two buffers
  /// differ in size. A tied entry takes no room: it lies where the one it is tied to lies.
  /// @param gradient may be empty: no gradients yet
  FlatParams(std::span<T> values, std::span<T> gradient, const std::vector<Entry>& entries)
      : values_(values), gradient_(gradient) {
    if (!gradient.empty() && gradient.size() != values.size()) {
      throw UsageError("FlatParams: the values buffer has " + std::to_string(values.size()) +
                       " elements but the gradient buffer " + std::to_string(gradient.size()));
    }
    std::size_t offset = 0;
    for (const Entry& entry : entries) {
      const auto& tied = entry.attributes.alias;
      if (tied && *tied < parameters_.size()) {
        const Ref first = parameters_[*tied];
        parameters_.emplace_back(entry.name, entry.shape, first.values().data(),
                                 first.gradient().data(), entry.attributes, entry.group);
        continue;
      }
      std::size_t elements = 1;
      for (const std::size_t extent : entry.shape) elements *= extent;
      if (elements > values.size() - offset) {
        throw UsageError("FlatParams: parameter '" + entry.name + "' ends behind the buffer of " +
                         std::to_string(values.size()) + " elements; check the shapes");
      }
      parameters_.emplace_back(entry.name, entry.shape, values.data() + offset,
                               gradient.empty() ? nullptr : gradient.data() + offset,
                               entry.attributes, entry.group);
      offset += elements;
    }
    if (offset != values.size()) {
      throw UsageError("FlatParams: the entries hold " + std::to_string(offset) +
                       " elements but the buffer " + std::to_string(values.size()));
    }
  }

  [[nodiscard]] std::span<T> flat_values() const noexcept { return values_; }
  [[nodiscard]] std::span<T> flat_gradient() const noexcept { return gradient_; }

  [[nodiscard]] auto begin() const noexcept { return parameters_.begin(); }
  [[nodiscard]] auto end() const noexcept { return parameters_.end(); }

 private:
  std::span<T> values_;
  std::span<T> gradient_;
  std::vector<Ref> parameters_;
};

static_assert(FlatParamStore<FlatParams<float>> && !FlatParamStore<std::vector<ParamRef<float>>>);

}  // namespace zero
