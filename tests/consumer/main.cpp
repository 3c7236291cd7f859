// SPDX-License-Identifier: Apache-2.0
#include <zero/zero.hpp>

#include <cstdio>

int main() {
  std::printf("zero %d.%d.%d\n", ZERO_VERSION_MAJOR, ZERO_VERSION_MINOR, ZERO_VERSION_PATCH);
}
