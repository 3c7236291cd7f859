# Toolchain: the oldest supported clang that is installed, since a newer one accepts more.
find_program(CMAKE_CXX_COMPILER REQUIRED
  NAMES clang++-16 clang++-17 clang++-18 clang++-19 clang++-20 clang++-21 clang++-22 clang++)
