// SPDX-License-Identifier: Apache-2.0
/// @file
/// A checkpoint in one file: whole tensors of true shapes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/checkpoint.hpp"
#include "zero/checkpoint/info.hpp"
#include "zero/checkpoint/safetensors.hpp"
#include "zero/detail/checkpoint_writer.hpp"
#include "zero/detail/checksum.hpp"
#include "zero/detail/element_bytes.hpp"
#include "zero/element.hpp"

namespace zero::detail {

/// Written array after array, in any order of arrays; each in the order of its elements.
class SingleFile {
 public:
  /// @param type_of the element type of an array, given parameter and array
  template <class F>
  SingleFile(const std::filesystem::path& path, CheckpointInfo info, const F& type_of)
      : info_(std::move(info)),
        tensor_of_(info_.parameters.size() * arrays(), none),
        file_(path, entries(type_of), metadata(info_)) {}

  /// `f(parameter, array)` for all arrays, in the order of the file.
  template <class F>
  void for_each_array(F&& f) const {
    for (const auto& [parameter, array] : order_) f(parameter, array);
  }
  [[nodiscard]] std::size_t elements(std::size_t parameter) const {
    return info_.parameters[parameter].elements();
  }

  /// The next bytes of an array, which begin with its element `begin`.
  void write(std::size_t parameter, std::size_t array, std::size_t begin, std::size_t width,
             std::span<const std::byte> bytes) {
    const std::size_t tensor = tensor_of_[parameter * arrays() + array];
    if (begin == 0) sum_ = Checksum();
    sum_.add(bytes);
    file_.file().write_at(file_.data_begin() + file_.tensors()[tensor].begin + begin * width,
                          bytes);
    if (begin + bytes.size() / width == elements(parameter)) file_.set_checksum(tensor, sum_);
  }
  void commit() { (void)file_.commit(); }

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);
  [[nodiscard]] std::size_t arrays() const noexcept {
    return first_slot_array + info_.slots.size();
  }

  /// Wider elements first, so that each lies on a multiple of its size.
  template <class F>
  [[nodiscard]] std::vector<TensorEntry> entries(const F& type_of) {
    std::vector<TensorEntry> tensors;
    for (const std::size_t width : {8, 4, 2}) {
      for (std::size_t i = 0; i < info_.parameters.size(); ++i) {
        for (std::size_t a = 0; a < arrays(); ++a) {
          if (!has_array(info_.parameters[i], a) || bytes_of(type_of(i, a)) != width) continue;
          tensor_of_[i * arrays() + a] = tensors.size();
          order_.emplace_back(i, a);
          tensors.push_back(entry_of(array_name(info_, i, a), type_of(i, a),
                                     info_.parameters[i].shape,
                                     tensors.empty() ? 0 : tensors.back().end));
        }
      }
    }
    return tensors;
  }
  [[nodiscard]] static std::map<std::string, std::string> metadata(const CheckpointInfo& info) {
    std::string text = to_json(info).dump();
    Checksum sum;
    sum.add(std::as_bytes(std::span(text)));
    // What reads weights out of such files asks for a "format", and knows this one.
    return {{"format", "pt"}, {info_key, std::move(text)}, {info_checksum_key, sum.text()}};
  }

  CheckpointInfo info_;
  std::vector<std::size_t> tensor_of_;
  std::vector<std::pair<std::size_t, std::size_t>> order_{};
  SummedFile file_;
  Checksum sum_{};
};

}  // namespace zero::detail
