# CUDA as a language, where nvcc is found: ZERO_NVCC says whether. Flags for our own .cu files, too.

option(ZERO_NVCC "Compile with nvcc what is for it, where it is found" ON)

# g++ is the host compiler that nvcc accepts.
if(ZERO_NVCC AND NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  message(STATUS "No nvcc for ${CMAKE_CXX_COMPILER_ID}: nothing is compiled with it")
  set(ZERO_NVCC OFF)
endif()
if(ZERO_NVCC)
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(STATUS "No nvcc: nothing is compiled with it")
    set(ZERO_NVCC OFF)
  endif()
endif()
if(ZERO_NVCC)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80)  # `native` would need a GPU
  endif()
  enable_language(CUDA)
  # CMake before 3.26 knows no C++20 for the newest nvcc.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  if(ZERO_CCACHE AND NOT DEFINED CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${ZERO_CCACHE})
  endif()

  # Beside what zero::cuda asks of every user's.
  add_library(zero_nvcc INTERFACE)
  target_compile_options(zero_nvcc INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--extended-lambda>)

  # As zero_exact_arithmetic, for both sides.
  add_library(zero_nvcc_exact_arithmetic INTERFACE)
  target_compile_options(zero_nvcc_exact_arithmetic INTERFACE
    $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;-Xcompiler=-ffp-contract=off>)
endif()
