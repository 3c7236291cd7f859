// SPDX-License-Identifier: Apache-2.0
// A user of the component nccl, as far as it needs neither nvcc nor a GPU.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <zero/comm/nccl_options.hpp>

int main() {
  const zero::NcclOptions options{.reduction = zero::NcclReduction::native};
  int version = 0;
  const bool known = ncclGetVersion(&version) == ncclSuccess && version == NCCL_VERSION_CODE;
  return known && options.timeout.count() > 0 ? 0 : 1;
}
