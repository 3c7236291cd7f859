// SPDX-License-Identifier: Apache-2.0
/// @file
/// How many parameters well-known models have.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "zero/error.hpp"

namespace zero {

/// A published model.
struct ModelSize {
  std::string_view name;         ///< in lower case, as `model_parameters` finds it
  std::uint64_t parameters = 0;  ///< each tied one once, without a task's head
};

/// Counts of the published weights, each the sum over its shapes; the papers round them.
///
/// BERT (Devlin et al., arXiv:1810.04805; the small ones: Turc et al., arXiv:1908.08962), uncased,
/// with pooler. GPT-2 (Radford et al., 2019), output tied to the embedding. GPT-3 (Brown et al.,
/// arXiv:2005.14165), whose weights are not public: the shapes of table 2.1 with GPT-2's embeddings
/// for 2048 positions, which is the 174,600 million of its table D.1. LLaMA (Touvron et al.,
/// arXiv:2302.13971), output not tied.
inline constexpr std::array<ModelSize, 13> model_sizes{{
    {"bert-tiny", 4'385'920},
    {"bert-mini", 11'170'560},
    {"bert-base", 109'482'240},
    {"bert-large", 335'141'888},
    {"gpt2", 124'439'808},
    {"gpt2-medium", 354'823'168},
    {"gpt2-large", 774'030'080},
    {"gpt2-xl", 1'557'611'200},
    {"gpt3-175b", 174'604'259'328},
    {"llama-7b", 6'738'415'616},
    {"llama-13b", 13'015'864'320},
    {"llama-30b", 32'528'943'616},
    {"llama-65b", 65'285'660'672},
}};

/// How many parameters a model has. Upper and lower case are the same; "gpt2-small" is "gpt2" and
/// "llama-33b" is "llama-30b". Throws `UsageError`, which lists the names, for another.
[[nodiscard]] inline std::uint64_t model_parameters(std::string_view name) {
  std::string wanted(name);
  for (char& c : wanted) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  if (wanted == "gpt2-small") wanted = "gpt2";
  if (wanted == "llama-33b") wanted = "llama-30b";
  std::string known;
  for (const ModelSize& model : model_sizes) {
    if (model.name == wanted) return model.parameters;
    known += (known.empty() ? "" : ", ") + std::string(model.name);
  }
  throw UsageError("there is no model '" + std::string(name) + "'; there are " + known);
}

}  // namespace zero
