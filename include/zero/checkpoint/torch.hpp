// SPDX-License-Identifier: Apache-2.0
/// @file
/// The state of PyTorch's optimizers, read and written.
///
/// A file is a safetensors file of the flattened `state_dict()` of a `torch.optim` optimizer, which
/// that of a `ZeroRedundancyOptimizer` is, too, after `consolidate_state_dict()`:
///  1. a tensor `state.INDEX.KEY` for each of `state_dict()["state"][INDEX][KEY]`: `step` (one
///     number), `exp_avg`, `exp_avg_sq`, `max_exp_avg_sq`, `momentum_buffer` (shaped as the
///     parameter). What is None is left out.
///  2. metadata `param_groups`: `state_dict()["param_groups"]` as JSON.
///
/// `examples/checkpoint/torch_state.py` writes and reads it in Python.
///
/// Which parameter an index means is said by `param_names`, where the file has it: names are the
/// same as ours. Without, parameters are matched group by group, in order: those of PyTorch's group
/// with ours of the same group in the store's order that are not tied, and not frozen either unless
/// PyTorch lists as many with the frozen ones.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "zero/checkpoint/checkpoint.hpp"
#include "zero/checkpoint/convert.hpp"
#include "zero/checkpoint/info.hpp"
#include "zero/checkpoint/load.hpp"
#include "zero/checkpoint/safetensors.hpp"
#include "zero/detail/checkpoint_file.hpp"
#include "zero/detail/checkpoint_pieces.hpp"
#include "zero/detail/checkpoint_writer.hpp"
#include "zero/detail/checksum.hpp"
#include "zero/detail/element_bytes.hpp"
#include "zero/detail/torch_groups.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"
#include "zero/optim/adam.hpp"
#include "zero/optim/sgd.hpp"

namespace zero {

namespace detail {

inline constexpr const char* torch_groups_key = "param_groups";

/// Reads such a file as a checkpoint of an optimizer's own parameters, without their values.
class TorchReader {
 public:
  /// @param info of the optimizer that it will be loaded into
  /// Throws `CheckpointError` naming file and tensor for what doesn't fit.
  TorchReader(const std::filesystem::path& path, CheckpointInfo info, TorchRule rule)
      : rule_(std::move(rule)) {
    to_.path_ = path;
    to_.files_->emplace_back(path);
    const SafetensorsHeader header = read_safetensors_header(file());
    (void)to_.header_checksum(file(), header);
    info.loss_scale.reset();
    info.seed.reset();
    info.step = 0;
    for (SavedParameter& parameter : info.parameters) parameter.steps = 0;
    const std::size_t groups = info.groups.size();
    to_.adopt(std::move(info), file().name());
    read_groups(header, groups);
    read_tensors(header);
    require_state();
  }

  [[nodiscard]] Checkpoint take() && { return std::move(to_); }

 private:
  static constexpr std::size_t nobody = ~std::size_t{0};

  [[nodiscard]] const ReadFile& file() const { return to_.files_->front(); }
  [[nodiscard]] CheckpointInfo& info() { return to_.info_; }

  [[noreturn]] void refuse(const std::string& what) const {
    throw CheckpointError(file().name() + ": " + what);
  }
  [[noreturn]] void refuse(const TensorEntry& tensor, const std::string& what) const {
    refuse("tensor " + in_quotes(tensor.name) + " " + what);
  }

  void read_groups(const SafetensorsHeader& header, std::size_t groups) {
    const auto text = header.metadata.find(torch_groups_key);
    if (text == header.metadata.end()) {
      refuse(
          "its metadata has no 'param_groups', so it is no state of a PyTorch optimizer; write it "
          "with save_optimizer of torch_state.py");
    }
    ParsedJson json;
    try {
      json = ParsedJson::parse(text->second);
    } catch (const ParsedJson::exception& error) {
      // Without the text around it, of any length.
      const std::string_view what = error.what();
      refuse("its 'param_groups' is no JSON (" +
             std::string(what.substr(0, what.find("; last read"))) + ")");
    }
    if (!json.is_array()) refuse("its 'param_groups' is no array");
    if (json.size() != groups) {
      refuse("it has " + std::to_string(json.size()) + " groups, but the optimizer " +
             std::to_string(groups) + "; form the same groups");
    }
    for (std::size_t g = 0; g < groups; ++g) {
      const TorchGroup group = TorchGroupReader(file().name(), rule_, g).read(json[g]);
      info().groups[g] = group.options;
      const std::size_t used = rule_.used_slots(group.options);
      if (used > info().slots.size()) {
        refuse("its group " + std::to_string(g) + " needs the state '" + rule_.slots[used - 1] +
               "', which the optimizer, zero::" + rule_.name +
               ", doesn't keep; construct it as PyTorch's was (momentum, amsgrad)");
      }
      const std::vector<std::size_t> parameters =
          group.names.empty() ? in_order(g, group.params.size()) : by_name(g, group.names);
      for (std::size_t k = 0; k < group.params.size(); ++k) {
        if (parameters_.try_emplace(group.params[k], parameters[k]).second) continue;
        refuse("its 'param_groups' has the index " + std::to_string(group.params[k]) + " twice");
      }
    }
    require_all_listed();
  }

  [[nodiscard]] std::vector<std::size_t> by_name(std::size_t group,
                                                 const std::vector<std::string>& names) {
    std::unordered_map<std::string, std::size_t> found;
    for (std::size_t i = 0; i < info().parameters.size(); ++i) {
      found[info().parameters[i].name] = info().parameters[i].attributes.alias.value_or(i);
    }
    std::vector<std::size_t> parameters;
    for (const std::string& name : names) {
      const auto it = found.find(name);
      if (it == found.end()) {
        refuse("its parameter " + in_quotes(name) +
               " is not in the store; call parameters as PyTorch does, or leave 'param_names' out");
      }
      info().parameters[it->second].group = group;
      parameters.push_back(it->second);
    }
    return parameters;
  }

  [[nodiscard]] std::vector<std::size_t> in_order(std::size_t group, std::size_t count) {
    std::vector<std::size_t> stepped, all;
    for (std::size_t i = 0; i < info().parameters.size(); ++i) {
      const SavedParameter& parameter = info().parameters[i];
      if (parameter.tied() || parameter.group != group) continue;
      all.push_back(i);
      if (parameter.stepped()) stepped.push_back(i);
    }
    if (count == stepped.size()) return stepped;
    if (count == all.size()) return all;
    refuse("its group " + std::to_string(group) + " has " + std::to_string(count) +
           " parameters, but the optimizer's has " + std::to_string(stepped.size()) +
           " that are stepped; form the same groups, or write 'param_names'");
  }

  void require_all_listed() {
    std::vector<bool> listed(info().parameters.size());
    for (const auto& [index, parameter] : parameters_) {
      if (listed[parameter]) {
        refuse("two indices of its 'param_groups' are the parameter " +
               in_quotes(info().parameters[parameter].name));
      }
      listed[parameter] = true;
    }
    for (std::size_t i = 0; i < listed.size(); ++i) {
      if (listed[i] || !info().parameters[i].stepped()) continue;
      refuse("the parameter " + in_quotes(info().parameters[i].name) +
             " is in none of its groups; load into the parameters that PyTorch's optimizer was "
             "given, or freeze it");
    }
  }

  struct Place {
    std::size_t parameter;
    std::string_view key;
  };
  [[nodiscard]] Place place_of(const TensorEntry& tensor) const {
    constexpr std::string_view prefix = "state.";
    const std::string& name = tensor.name;
    const char* const end = name.data() + name.size();
    std::uint64_t index = 0;
    const char* at = name.data() + std::min(prefix.size(), name.size());
    const auto [after, error] = std::from_chars(at, end, index);
    if (!name.starts_with(prefix) || error != std::errc{} || after == end || *after != '.') {
      refuse(tensor, "must be called state.INDEX.KEY");
    }
    const auto found = parameters_.find(index);
    if (found == parameters_.end()) {
      refuse(tensor, "is of a parameter that no group of 'param_groups' has");
    }
    return {found->second, std::string_view(after + 1, end)};
  }

  void read_tensors(const SafetensorsHeader& header) {
    has_.resize(info().parameters.size() * to_.arrays());
    // Python's own library writes no checksums.
    std::vector<std::optional<std::uint64_t>> sums(header.tensors.size());
    if (header.metadata.contains(checksums_key)) sums = Checkpoint::checksums(file(), header);
    for (std::size_t t = 0; t < header.tensors.size(); ++t) {
      const TensorEntry& tensor = header.tensors[t];
      const auto [i, key] = place_of(tensor);
      SavedParameter& parameter = info().parameters[i];
      if (parameter.attributes.frozen) {
        refuse(tensor, "is of the parameter " + in_quotes(parameter.name) +
                           ", which is frozen here and has no state; freeze it in both, or none");
      }
      std::size_t array = value_array;
      if (key == "step") {
        parameter.steps = read_step(header, tensor, sums[t]);
      } else {
        array = slot_of(tensor, key);
        if (tensor.shape != parameter.shape) {
          refuse(tensor, "has another shape than the parameter " + in_quotes(parameter.name));
        }
        const ArrayNames::Array place{i, array};
        to_.add_piece(0, header, tensor, place, {0, parameter.elements()}, sums[t]);
      }
      // Values aren't there, so that their place says whether steps are.
      if (has_[i * to_.arrays() + array]) refuse(tensor, "is there twice, with another index");
      has_[i * to_.arrays() + array] = true;
    }
  }

  [[nodiscard]] std::size_t slot_of(const TensorEntry& tensor, std::string_view key) const {
    const std::vector<std::string>& slots = to_.info_.slots;
    const auto slot = std::find(slots.begin(), slots.end(), key);
    if (slot == slots.end()) {
      std::string kept;
      for (const std::string& name : slots) kept += (kept.empty() ? "'" : ", '") + name + "'";
      refuse(tensor, std::string("is nothing that the optimizer, zero::") + rule_.name +
                         ", keeps; it has " + (kept.empty() ? "no slots" : kept) +
                         "; construct it as PyTorch's was (momentum, amsgrad)");
    }
    return first_slot_array + static_cast<std::size_t>(slot - slots.begin());
  }

  [[nodiscard]] std::int64_t read_step(const SafetensorsHeader& header, const TensorEntry& tensor,
                                       std::optional<std::uint64_t> expected) const {
    const auto read = [&]<class T>(T value) {
      if (tensor.end - tensor.begin != sizeof value) refuse(tensor, "must be one number");
      file().read_at(header.data_begin + tensor.begin,
                     std::as_writable_bytes(std::span(&value, 1)));
      Checksum sum;
      sum.add(std::as_bytes(std::span(&value, 1)));
      if (expected && sum.value() != *expected) {
        refuse(tensor, "has other bytes than were written: its checksum does not match");
      }
      return static_cast<double>(value);
    };
    double steps = 0;
    if (tensor.dtype == "F32") {
      steps = read(float{});
    } else if (tensor.dtype == "F64") {
      steps = read(double{});
    } else if (tensor.dtype == "I64") {
      steps = read(std::int64_t{});
    } else {
      refuse(tensor, "has the type " + tensor.dtype + ", but steps are F32, F64 or I64");
    }
    if (!(steps >= 0 && steps <= 0x1p53 && steps == std::floor(steps))) {
      refuse(tensor, "is no whole number from 0 on");
    }
    return static_cast<std::int64_t>(steps);
  }

  /// Of a parameter PyTorch keeps all or nothing.
  void require_state() {
    for (std::size_t i = 0; i < info().parameters.size(); ++i) {
      SavedParameter& parameter = info().parameters[i];
      const auto first = has_.begin() + static_cast<std::ptrdiff_t>(i * to_.arrays());
      const auto last = first + static_cast<std::ptrdiff_t>(to_.arrays());
      if (std::find(first, last, true) == last) continue;
      const auto require = [&](std::size_t array, const std::string& key) {
        if (first[static_cast<std::ptrdiff_t>(array)]) return;
        refuse("the parameter " + in_quotes(parameter.name) + " has state, but no '" + key +
               "'; the file is damaged, or of another optimizer");
      };
      if (rule_.is_adam()) require(value_array, "step");
      // PyTorch's SGD counts no steps; all that matters is that it wasn't the first.
      if (!rule_.is_adam()) parameter.steps = std::max<std::int64_t>(parameter.steps, 1);
      const std::size_t used = rule_.used_slots(info().groups[parameter.group]);
      for (std::size_t s = 0; s < used; ++s) require(first_slot_array + s, info().slots[s]);
      info().step = std::max(info().step, parameter.steps);
    }
  }

  TorchRule rule_;
  Checkpoint to_{};
  std::unordered_map<std::uint64_t, std::size_t> parameters_{};  ///< by PyTorch's index: ours
  std::vector<bool> has_{};                                      ///< by parameter and array
};

/// Which of PyTorch's optimizers a checkpoint is of.
[[nodiscard]] inline TorchRule torch_rule_of(const Checkpoint& from) {
  for (TorchRule rule : {torch_rule<Adam>(), torch_rule<Sgd>()}) {
    const bool fits =
        std::all_of(from.info().groups.begin(), from.info().groups.end(), [&](const auto& options) {
          return options.size() == rule.options.size() &&
                 std::all_of(options.begin(), options.end(),
                             [&](const auto& option) { return rule.has(option.first); });
        });
    const std::vector<std::string>& slots = from.info().slots;
    if (fits && slots.size() <= rule.slots.size() &&
        std::equal(slots.begin(), slots.end(), rule.slots.begin())) {
      return rule;
    }
  }
  throw CheckpointError(from.path().string() +
                        ": its optimizer is not Adam, AdamW or Sgd, the ones that PyTorch has, "
                        "too; zero::save_weights or `zero-checkpoint weights` writes its values "
                        "alone");
}

/// A tensor of a file that is about to be written: an array, or a number of steps.
struct TorchTensor {
  std::size_t parameter;
  std::size_t array;
  std::string name;
  ElementType type;
  std::vector<std::size_t> shape;
  static constexpr std::size_t step = ~std::size_t{0};
};

}  // namespace detail

/// Collective, between steps: loads slots, step counts and options out of a PyTorch optimizer's
/// state into an optimizer of `Adam`, `AdamW` or `Sgd`, or of libtorch's (`TorchOptimizer`); of the
/// same groups, at any world size and under any policies. Values stay as they are: copy PyTorch's
/// weights into the parameters before. State that PyTorch has not made yet is that of a parameter
/// that was never stepped. PyTorch's SGD counts no steps, so where it has a momentum buffer one is
/// counted. Options that don't change what is computed (foreach, fused, capturable, differentiable)
/// are ignored.
///
/// Throws as `load`.
template <class Optimizer>
void load_torch(Optimizer& optimizer, const std::filesystem::path& file) {
  LoadOptions options;
  options.values = false;
  detail::load_with(optimizer, "load_torch", options, [&]<class State>(State& state) {
    return detail::TorchReader(file, detail::describe_state(state),
                               detail::torch_rule<typename State::optimizer_type>())
        .take();
  });
}

/// Writes the optimizer state of a checkpoint, a folder or a single file, as PyTorch's optimizer of
/// the same meaning loads it: `optimizer.load_state_dict(load_optimizer(file))`. PyTorch's is to be
/// given the same groups of parameters in the same order, without tied and frozen ones. Not in it:
/// values (`save_weights` writes them), loss scale, seed. Memory: two buffers of 1 MiB. PyTorch
/// keeps step counts as floats, exactly up to 16 777 216. Throws `CheckpointError`, also for an
/// optimizer that PyTorch hasn't. What is damaged is found by `Checkpoint::verify`, not here.
inline void save_torch(const Checkpoint& from, const std::filesystem::path& file) {
  detail::require_other_file(from, file);
  using detail::TorchTensor;
  const CheckpointInfo& info = from.info();
  const detail::TorchRule rule = detail::torch_rule_of(from);
  detail::Json groups = detail::Json::array();
  std::vector<TorchTensor> tensors;
  std::uint64_t index = 0;
  for (std::size_t g = 0; g < info.groups.size(); ++g) {
    detail::TorchGroup group{.options = info.groups[g]};
    const std::size_t slots = std::min(rule.used_slots(group.options), info.slots.size());
    for (std::size_t i = 0; i < info.parameters.size(); ++i) {
      const SavedParameter& parameter = info.parameters[i];
      if (!parameter.stepped() || parameter.group != g) continue;
      const std::string prefix = "state." + std::to_string(index) + ".";
      group.params.push_back(index++);
      group.names.push_back(parameter.name);
      if (parameter.steps == 0) continue;
      for (std::size_t s = 0; s < slots; ++s) {
        const std::size_t array = Checkpoint::first_slot + s;
        tensors.push_back(
            {i, array, prefix + info.slots[s], from.array(i, array).type, parameter.shape});
      }
      if (!rule.is_adam()) continue;
      tensors.push_back({i, TorchTensor::step, prefix + "step", ElementType::float32, {}});
    }
    groups.push_back(detail::to_torch(rule, group));
  }
  // Wider elements first, so that each tensor lies on a multiple of its elements' size.
  std::stable_sort(tensors.begin(), tensors.end(), [](const TorchTensor& a, const TorchTensor& b) {
    return detail::bytes_of(a.type) > detail::bytes_of(b.type);
  });
  std::vector<TensorEntry> entries;
  for (const TorchTensor& tensor : tensors) {
    entries.push_back(detail::entry_of(tensor.name, tensor.type, tensor.shape,
                                       entries.empty() ? 0 : entries.back().end));
  }
  detail::SummedFile to(file, std::move(entries),
                        {{"format", "pt"}, {detail::torch_groups_key, groups.dump()}});
  detail::Writer writer(to.file(), detail::transfer_bytes, to.data_begin());
  std::vector<std::byte> part(detail::transfer_bytes);
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const SavedParameter& parameter = info.parameters[tensors[t].parameter];
    writer.start_tensor();
    if (tensors[t].array == TorchTensor::step) {
      const auto steps = static_cast<float>(parameter.steps);
      writer.write(std::as_bytes(std::span(&steps, 1)));
    } else {
      detail::read_in_parts(
          from, tensors[t].parameter, tensors[t].array, {0, parameter.elements()}, part,
          [&](std::size_t, std::span<const std::byte> bytes) { writer.write(bytes); });
    }
    to.set_checksum(t, writer.checksum());
  }
  writer.flush();
  to.commit();
}

}  // namespace zero
