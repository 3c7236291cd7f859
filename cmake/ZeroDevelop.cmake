# What tests, examples and benchmarks share.

if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 16)
  message(FATAL_ERROR "zero needs clang 16 or newer (older ones reject libstdc++'s <ranges>); "
                      "this is ${CMAKE_CXX_COMPILER} ${CMAKE_CXX_COMPILER_VERSION}.")
endif()

if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_CXX_EXTENSIONS OFF)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, …" FORCE)
  endif()
  # A cache is used where there is one; presets can't ask for that.
  find_program(ZERO_CCACHE ccache)
  mark_as_advanced(ZERO_CCACHE)
  if(ZERO_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
    # Without these it caches nothing that uses precompiled headers.
    set(CMAKE_CXX_COMPILER_LAUNCHER
        ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${ZERO_CCACHE})
  endif()
  # g++ is a tenth faster when it collects garbage late, at the price of up to a gigabyte each.
  if(ZERO_BUILD_TESTS)
    add_compile_options(
      "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:SHELL:--param ggc-min-heapsize=1000000 --param ggc-min-expand=100>")
  endif()
endif()

include(${CMAKE_CURRENT_LIST_DIR}/ZeroWarnings.cmake)

set(ZERO_TEST_TIMEOUT 300 CACHE STRING "Seconds after which a test that gave no TIMEOUT is ended")
mark_as_advanced(ZERO_TEST_TIMEOUT)
enable_testing()

# Target label_X builds what `ctest -L X` runs, so that `./dev test X` builds no more than that.
function(zero_label label)
  if(NOT TARGET label_${label})
    add_custom_target(label_${label})
  endif()
  if(ARGN)
    add_dependencies(label_${label} ${ARGN})
  endif()
endfunction()
