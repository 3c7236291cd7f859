// SPDX-License-Identifier: Apache-2.0
/// @file
/// Parameters in Thrust's vectors: a store in CUDA memory.
///
///     thrust::device_vector<float> weights(1024, 1.0F), gradient(1024);
///     std::vector store{zero::ThrustParam("weights", {32, 32}, weights, gradient)};
///     zero::ZeroSharded optimizer{zero::cuda::FusedAdam{.lr = 1e-3}, store, comm};
///     // backward in `stream`, to gradient, or to optimizer.gradient(0, stream).values()
///     optimizer.step(stream);
///
/// Thrust's own algorithms run in a stream by `thrust::cuda::par_nosync.on(stream.get())`.
#pragma once

#include <thrust/device_vector.h>
#include <thrust/memory.h>

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zero/attributes.hpp"
#include "zero/element.hpp"
#include "zero/memory.hpp"
#include "zero/parameter.hpp"

namespace zero {

/// A parameter whose values, and gradient if there is one, are vectors of the caller's in device
/// memory. The vectors outlive it. Values stay where they are while an optimizer uses them: neither
/// resized nor swapped. A gradient vector may be resized, swapped or emptied between steps (empty:
/// there is none).
///
/// @tparam Vector `thrust::device_vector` or `thrust::universal_vector` of an `Element`
template <class Vector = thrust::device_vector<float>>
class ThrustParam {
 public:
  using element = typename Vector::value_type;
  static_assert(Element<element>,
                "zero: a thrust vector of this type can't be a parameter; use float, double, or a "
                "type of 16 bits that zero knows (see zero/element.hpp)");
  static constexpr MemorySpace memory_space = MemorySpace::cuda;

  /// @param shape whose product is the number of values
  ThrustParam(std::string name, std::vector<std::size_t> shape, Vector& values, Vector& gradient,
              Attributes attributes = {}, std::size_t group = 0)
      : ThrustParam(std::move(name), std::move(shape), values, &gradient, attributes, group) {}
  /// Without a gradient of its own: for stages 2 and 3, where backward writes to leases.
  ThrustParam(std::string name, std::vector<std::size_t> shape, Vector& values, std::nullptr_t,
              Attributes attributes = {}, std::size_t group = 0)
      : ThrustParam(std::move(name), std::move(shape), values, static_cast<Vector*>(nullptr),
                    attributes, group) {}

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] std::span<const std::size_t> shape() const noexcept { return shape_; }
  [[nodiscard]] std::span<element> values() const { return span_of(*values_); }
  [[nodiscard]] std::span<element> gradient() const {
    return gradient_ == nullptr ? std::span<element>() : span_of(*gradient_);
  }
  [[nodiscard]] const Attributes& attributes() const noexcept { return attributes_; }
  [[nodiscard]] std::size_t group() const noexcept { return group_; }

 private:
  ThrustParam(std::string name, std::vector<std::size_t> shape, Vector& values, Vector* gradient,
              Attributes attributes, std::size_t group)
      : name_(std::move(name)),
        shape_(std::move(shape)),
        values_(&values),
        gradient_(gradient),
        attributes_(attributes),
        group_(group) {}

  static std::span<element> span_of(Vector& vector) {
    return {thrust::raw_pointer_cast(vector.data()), vector.size()};
  }

  std::string name_;
  std::vector<std::size_t> shape_;
  Vector* values_;
  Vector* gradient_;
  Attributes attributes_;
  std::size_t group_;
};

static_assert(ParamStore<std::vector<ThrustParam<>>>);
static_assert(memory_space_of<ThrustParam<>> == MemorySpace::cuda);

}  // namespace zero
