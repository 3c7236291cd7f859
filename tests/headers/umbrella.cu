// SPDX-License-Identifier: Apache-2.0
#include <zero/zero.hpp>

int main() {}
