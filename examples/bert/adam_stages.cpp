// SPDX-License-Identifier: Apache-2.0
#include "train.hpp"

namespace bert {

namespace {

template <class T, class Stage>
Trainer with() {
  return trainer<zero::Adam, T, zero::ContiguousPartition, zero::ParamView, Stage,
                 Over::processes_too>();
}

}  // namespace

std::vector<Trainer> adam_stages_fp32() {
  return {with<float, zero::Stage2>(), with<float, zero::Stage3>()};
}

std::vector<Trainer> adam_stages_bf16() {
  return {with<zero::bfloat16, zero::Stage2>(), with<zero::bfloat16, zero::Stage3>()};
}

}  // namespace bert
