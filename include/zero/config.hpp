// SPDX-License-Identifier: Apache-2.0
/// @file
/// The library's only macros: its version, and what differs between compilers and systems.
/// Nothing outside this header asks about a compiler, a system or a header's presence.
#pragma once

#if defined(__GNUC__) && __cplusplus < 202002L
#error "zero needs C++20: compile with -std=c++20"
#endif

/// The version, in this place alone: the build reads it from here.
#define ZERO_VERSION_MAJOR 0
#define ZERO_VERSION_MINOR 1
#define ZERO_VERSION_PATCH 0

/// Marks a function that runs on the host and, where CUDA compiles the file, on the device too.
#if defined(__CUDACC__)
#define ZERO_HOST_DEVICE __host__ __device__
#else
#define ZERO_HOST_DEVICE
#endif

/// x86 with SSE2: the square root of a whole vector register is written as an intrinsic, since
/// the builtin may set `errno` and so is not vectorised under a user's default flags.
#if defined(__SSE2__)
#define ZERO_SSE2 1
#else
#define ZERO_SSE2 0
#endif

/// Whether compiler vector types serve update rules on the host. CUDA's compiler refuses them in
/// host-and-device functions, which rules are.
#if defined(__GNUC__) && !defined(__CUDACC__)
#define ZERO_VECTOR_TYPES 1
#else
#define ZERO_VECTOR_TYPES 0
#endif

/// Whether the update loops are compiled a second time for AVX2 and picked when the processor has
/// it.
#if ZERO_SSE2 && ZERO_VECTOR_TYPES && !defined(__AVX2__)
#define ZERO_AVX2_CLONES 1
#else
#define ZERO_AVX2_CLONES 0
#endif

/// x86-64, whose assembler and 16 vector registers serve the sum of squares, and whose extensions
/// are asked for as the program runs.
#if ZERO_SSE2 && ZERO_VECTOR_TYPES && defined(__x86_64__)
#define ZERO_FUSED_SQUARES 1
#else
#define ZERO_FUSED_SQUARES 0
#endif

/// Linux: memory may be asked to lie on huge pages (madvise).
#if defined(__linux__)
#define ZERO_HUGE_PAGES 1
#else
#define ZERO_HUGE_PAGES 0
#endif

/// Linux: address space may be had without memory, and memory given back (mmap, madvise).
#if defined(__linux__)
#define ZERO_RESERVED_MEMORY 1
#else
#define ZERO_RESERVED_MEMORY 0
#endif

/// Linux: a process may read the memory of another one of the same user (process_vm_readv), and
/// map what that one made to be shared.
#if defined(__linux__)
#define ZERO_PROCESS_MEMORY 1
#else
#define ZERO_PROCESS_MEMORY 0
#endif

/// POSIX: a write to a connection whose other end is gone raises SIGPIPE.
#if defined(__unix__) || defined(__APPLE__)
#define ZERO_POSIX_SIGNALS 1
#else
#define ZERO_POSIX_SIGNALS 0
#endif

/// Kernels are compiled as C++ and run on a processor: by tests alone, whose build defines it and
/// force-includes what stands in for CUDA's language extensions.
#if !defined(ZERO_CUDA_EMULATED)
#define ZERO_CUDA_EMULATED 0
#endif

/// Whether this file is compiled by a compiler that may hold kernels, be it for a processor.
#if defined(__CUDACC__) || ZERO_CUDA_EMULATED
#define ZERO_CUDA_KERNELS 1
#else
#define ZERO_CUDA_KERNELS 0
#endif

/// Before a loop over a device thread's registers, which have no addresses: none of it may be left.
/// Only where the device's code is compiled: the host's compiler doesn't know it.
#if defined(__CUDA_ARCH__)
#define ZERO_UNROLL _Pragma("unroll")
#else
#define ZERO_UNROLL
#endif
