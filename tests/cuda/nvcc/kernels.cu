// SPDX-License-Identifier: Apache-2.0
// The kernels of what ships, for every element type, for nvcc to compile: what they need of a GPU
// is reported from this file's object. Never run.
#include <zero/cuda.cuh>
#include <zero/cuda/detail/rank_order_sum.cuh>
#include <zero/zero.hpp>

#if ZERO_TEST_NCCL
#include <zero/comm/nccl.cuh>
#endif

#include <cstddef>

namespace {

namespace cuda = zero::cuda::detail;
using zero::cuda::StreamView;
using zero::detail::Storage;

template <class Rule, zero::Element T, class Precision = zero::MixedPrecision>
void update(StreamView stream) {
  cuda::update(cuda::UpdateTask<Rule, Storage<T, Precision>>{}, stream);
}

template <zero::Element T>
void kernels_of_type(StreamView stream) {
  update<zero::cuda::FusedAdam, T>(stream);
  update<zero::cuda::FusedAdamW, T>(stream);
  update<zero::cuda::FusedSgd, T>(stream);
  cuda::add_squares(cuda::LookTask<T>{}, stream);
  cuda::find_not_finite(cuda::LookTask<T>{}, stream);
  cuda::pack_gradients(cuda::CopyTask<T>{}, stream);
  cuda::pack_values(cuda::CopyTask<T>{}, stream);
  cuda::unpack_values(cuda::CopyTask<T>{}, stream);
  cuda::rank_order_reduce<T>(cuda::RankOrderTask{}, stream);
  T* const none = nullptr;
  const auto source = [&](std::size_t) { return static_cast<const T*>(none); };
  cuda::reduce<T, T>(1, source, 0, none, zero::ReduceOp::sum, stream);
}

template <class Rule>
void decide(StreamView stream) {
  cuda::decide(cuda::DecideTask<Rule, true, true>{}, stream);
}

}  // namespace

/// Not to be called.
void zero_shipped_kernels(StreamView stream) {
  kernels_of_type<float>(stream);
  kernels_of_type<double>(stream);
  kernels_of_type<zero::bfloat16>(stream);
  kernels_of_type<zero::float16>(stream);
  update<zero::cuda::FusedAdamW, zero::bfloat16, zero::StochasticPrecision>(stream);
  decide<zero::cuda::FusedAdam>(stream);
  decide<zero::cuda::FusedAdamW>(stream);
  decide<zero::cuda::FusedSgd>(stream);
}
