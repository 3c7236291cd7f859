# Flags for our own sources only: nothing here reaches a user of zero::zero.

option(ZERO_WARNINGS_AS_ERRORS "Fail on warnings in zero's own sources" ON)
add_library(zero_warnings INTERFACE)
# g++ leaves sign conversions out of -Wconversion and clang doesn't; here they agree.
target_compile_options(zero_warnings INTERFACE
  $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>:-Wall;-Wextra;-Wpedantic;-Wconversion;-Wno-sign-conversion;-Wshadow;$<$<BOOL:${ZERO_WARNINGS_AS_ERRORS}>:-Werror>>)
# g++ 12 sees an overlap in "text" + std::string where there is none (GCC bug 105651).
target_compile_options(zero_warnings INTERFACE
  $<$<AND:$<COMPILE_LANG_AND_ID:CXX,GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>)

# Tests compare bits, and contraction into fused multiply-adds changes bits between loops.
add_library(zero_exact_arithmetic INTERFACE)
target_compile_options(zero_exact_arithmetic INTERFACE
  $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>:-ffp-contract=off>)
