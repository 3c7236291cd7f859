// SPDX-License-Identifier: Apache-2.0
// Models' tensors in device memory, each an allocation of its own as frameworks have it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>
#include <zero/cuda/memory.hpp>
#include <zero/cuda/param_ref.hpp>

namespace bench {

struct Model {
  std::string name;
  std::vector<std::size_t> tensors;  ///< elements of each

  [[nodiscard]] std::size_t elements() const {
    std::size_t sum = 0;
    for (const std::size_t tensor : tensors) sum += tensor;
    return sum;
  }
};

/// BERT-large without a head: 391 tensors, 335,141,888 parameters.
[[nodiscard]] Model bert_large();

/// What `step` and `update` are measured on.
/// @param tiny for a run on a processor, that shows no more than that the code runs
[[nodiscard]] std::vector<Model> update_models(bool tiny);
[[nodiscard]] std::vector<Model> memory_models(bool tiny);

/// Values and gradients, all about 0.01.
template <class T>
class DeviceModel {
 public:
  explicit DeviceModel(const Model& model) {
    for (const std::size_t elements : model.tensors) {
      values_.emplace_back(elements);
      gradients_.emplace_back(elements);
      fill(values_.back());
      fill(gradients_.back());
      store_.emplace_back("tensor " + std::to_string(store_.size()),
                          std::vector<std::size_t>{elements}, values_.back().data(),
                          gradients_.back().data());
    }
    zero::cuda::StreamView().synchronize();
  }

  [[nodiscard]] std::vector<zero::cuda::ParamRef<T>>& store() { return store_; }
  [[nodiscard]] T* values(std::size_t tensor) { return values_[tensor].data(); }
  [[nodiscard]] const T* gradient(std::size_t tensor) const { return gradients_[tensor].data(); }

  /// 0x3c3c3c3c and 0x3c3c are 0.0115 and the like in float, bfloat16 and float16.
  template <class U>
  static void fill(zero::cuda::DeviceArray<U>& array) {
    zero::cuda::check(cudaMemset(array.data(), 0x3c, array.bytes()), "cudaMemset");
  }

 private:
  std::vector<zero::cuda::DeviceArray<T>> values_{}, gradients_{};
  std::vector<zero::cuda::ParamRef<T>> store_{};
};

}  // namespace bench
