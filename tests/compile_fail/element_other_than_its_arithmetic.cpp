// SPDX-License-Identifier: Apache-2.0
// expect: an element type must be float or double, or 16 bits
#include <zero/zero.hpp>

#include <vector>

struct Half {
  unsigned short bits;
};
template <>
struct zero::element_traits<Half> {
  static constexpr ElementType type = ElementType::float32;
  static constexpr const char* name = "half";
  using arithmetic = float;
  static float load(Half);
  static Half store(float);
};
#ifdef ZERO_COMPILE_FAIL
using Store = std::vector<zero::ParamRef<Half>>;
#else
using Store = std::vector<zero::ParamRef<float>>;
#endif

void construct(Store& store, zero::InProcessCommunicator& comm) {
  zero::ZeroSharded optimizer{zero::Adam{}, store, comm};
}
