// SPDX-License-Identifier: Apache-2.0
// The fake NCCL that NCCL communicators are tested with: what the real one promises, and how it
// fails.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "catch.hpp"
#include "fake/cuda_runtime.hpp"
#include "fake/nccl.hpp"

namespace {

namespace fake = zero_emulation::nccl;
using namespace std::chrono_literals;

// For any thread, where Catch's macros are not.
void expect(bool true_statement, const std::string& what) {
  if (!true_statement) throw std::runtime_error(what);
}
void ok(ncclResult_t result) { expect(result == ncclSuccess, ncclGetErrorString(result)); }
void ok(cudaError_t error) { expect(error == cudaSuccess, cudaGetErrorName(error)); }

/// An array of the current device's.
template <class T>
class Array {
 public:
  explicit Array(std::size_t size) : size_(size) {
    if (size != 0) ok(cudaMalloc(reinterpret_cast<void**>(&data_), size * sizeof(T)));
  }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    ok(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { (void)cudaFree(data_); }

  T* get() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> values(size_);
    ok(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

struct Stream {
  Stream() { ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { (void)cudaStreamDestroy(stream); }
  // NOLINTNEXTLINE(google-explicit-constructor)
  operator cudaStream_t() const { return stream; }
  void synchronize() const { ok(cudaStreamSynchronize(stream)); }
  bool idle() const { return cudaStreamQuery(stream) == cudaSuccess; }
  cudaStream_t stream = nullptr;
};

/// Calls `f(rank)` on `size` threads, each with a device of its own; rethrows.
void on_threads(int size, const std::function<void(int)>& f) {
  std::vector<std::exception_ptr> thrown(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ok(cudaSetDevice(rank));
        f(rank);
      } catch (...) {
        thrown[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& exception : thrown) {
    if (exception) std::rethrow_exception(exception);
  }
}

struct Rank {
  int rank;
  int size;
  ncclComm_t comm;
  cudaStream_t stream;
};

/// The same with a communicator and a stream, which are destroyed unless `f` has aborted.
void on_ranks(int size, const std::function<void(Rank&)>& f) {
  ncclUniqueId id;
  ok(ncclGetUniqueId(&id));
  on_threads(size, [&](int rank) {
    Rank self{rank, size, nullptr, nullptr};
    ok(ncclCommInitRank(&self.comm, size, id, rank));
    const Stream stream;
    self.stream = stream;
    try {
      f(self);
    } catch (...) {
      ok(ncclCommAbort(self.comm));
      throw;
    }
    if (self.comm != nullptr) ok(ncclCommDestroy(self.comm));
  });
}

void abort(Rank& self) {
  ok(ncclCommAbort(self.comm));
  self.comm = nullptr;
}

ncclResult_t async_error(ncclComm_t comm) {
  ncclResult_t error = ncclInternalError;
  ok(ncclCommGetAsyncError(comm, &error));
  return error;
}

/// Polls until there is an error.
ncclResult_t await_error(ncclComm_t comm) {
  for (int i = 0; i < 10000 && async_error(comm) == ncclSuccess; ++i) {
    std::this_thread::sleep_for(1ms);
  }
  return async_error(comm);
}

/// Polls while something is in progress.
ncclResult_t await_progress(ncclComm_t comm) {
  for (int i = 0; i < 10000 && async_error(comm) == ncclInProgress; ++i) {
    std::this_thread::sleep_for(1ms);
  }
  return async_error(comm);
}

ncclConfig_t not_blocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

/// As a process starts, with eight devices.
struct Fresh {
  Fresh() {
    zero_emulation::reset();
    zero_emulation::set_devices(8);
    fake::reset();
  }
  ~Fresh() { CHECK(fake::communicators() == 0); }
};

template <class T>
constexpr ncclDataType_t type_of = std::is_same_v<T, float>          ? ncclFloat32
                                   : std::is_same_v<T, std::int64_t> ? ncclInt64
                                                                     : ncclUint8;

/// Element `i` of rank `r`: exact in every type and sum.
template <class T>
T element(int r, std::size_t i) {
  return static_cast<T>(static_cast<std::size_t>(r) * 3 + i % 7);
}
template <class T>
std::vector<T> elements(int r, std::size_t count, std::size_t first = 0) {
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = element<T>(r, first + i);
  return values;
}
template <class T>
std::vector<T> sums(int ranks, std::size_t count, std::size_t first = 0) {
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    for (int r = 0; r < ranks; ++r)
      values[i] = static_cast<T>(values[i] + element<T>(r, first + i));
  }
  return values;
}

}  // namespace

TEMPLATE_TEST_CASE("collectives do what NCCL documents, in place and not", "[nccl]", float,
                   std::int64_t, std::uint8_t) {
  const Fresh fresh;
  using T = TestType;
  const int size = GENERATE(1, 2, 3, 5);
  const std::size_t count = GENERATE(0, 1, 15, 16, 17, 333);
  on_ranks(size, [&](Rank& self) {
    const auto n = static_cast<std::size_t>(size);
    const auto r = static_cast<std::size_t>(self.rank);
    const int root = size - 1;
    const ncclDataType_t type = type_of<T>;
    const auto mine = elements<T>(self.rank, count);
    const auto wide = elements<T>(self.rank, n * count);
    const Array<T> in(mine), out(count), both(mine), wide_in(wide), wide_out(n * count);
    const Array<T> wide_both(wide);

    ok(ncclAllReduce(in.get(), out.get(), count, type, ncclSum, self.comm, self.stream));
    ok(ncclAllReduce(both.get(), both.get(), count, type, ncclSum, self.comm, self.stream));
    ok(cudaStreamSynchronize(self.stream));
    expect(out.values() == sums<T>(size, count), "AllReduce");
    expect(both.values() == sums<T>(size, count), "AllReduce in place");
    expect(in.values() == mine, "AllReduce leaves its input");

    ok(ncclReduceScatter(wide_in.get(), out.get(), count, type, ncclSum, self.comm, self.stream));
    ok(ncclReduceScatter(wide_both.get(), wide_both.get() + r * count, count, type, ncclSum,
                         self.comm, self.stream));
    ok(cudaStreamSynchronize(self.stream));
    const auto part = sums<T>(size, count, r * count);
    expect(out.values() == part, "ReduceScatter");
    auto expected = wide;
    std::copy(part.begin(), part.end(), expected.begin() + static_cast<std::ptrdiff_t>(r * count));
    expect(wide_both.values() == expected, "ReduceScatter in place");

    std::vector<T> all;
    for (int k = 0; k < size; ++k) {
      const auto piece = sums<T>(size, count, static_cast<std::size_t>(k) * count);
      all.insert(all.end(), piece.begin(), piece.end());
    }
    ok(ncclAllGather(out.get(), wide_out.get(), count, type, self.comm, self.stream));
    ok(ncclAllGather(wide_both.get() + r * count, wide_both.get(), count, type, self.comm,
                     self.stream));
    ok(cudaStreamSynchronize(self.stream));
    expect(wide_out.values() == all, "AllGather");
    expect(wide_both.values() == all, "AllGather in place");

    const Array<T> to(elements<T>(9, count)), here(mine);
    ok(ncclReduce(in.get(), self.rank == root ? to.get() : nullptr, count, type, ncclMax, root,
                  self.comm, self.stream));
    ok(ncclReduce(here.get(), here.get(), count, type, ncclSum, root, self.comm, self.stream));
    ok(cudaStreamSynchronize(self.stream));
    expect(to.values() == elements<T>(self.rank == root ? root : 9, count), "Reduce");
    expect(here.values() == (self.rank == root ? sums<T>(size, count) : mine), "Reduce in place");

    ok(ncclBroadcast(self.rank == root ? in.get() : nullptr, out.get(), count, type, root,
                     self.comm, self.stream));
    ok(ncclBcast(to.get(), count, type, root, self.comm, self.stream));
    ok(cudaStreamSynchronize(self.stream));
    expect(out.values() == elements<T>(root, count), "Broadcast");
    expect(to.values() == elements<T>(root, count), "Bcast");
  });
}

namespace {

/// Small values in whatever type NCCL has.
template <class T>
void check_reductions(ncclDataType_t type) {
  INFO("type " << type);
  const std::vector<std::pair<ncclRedOp_t, float>> expected = {
      {ncclSum, 12}, {ncclProd, 48}, {ncclMax, 6}, {ncclMin, 2}, {ncclAvg, 4}};
  for (const auto& [op, value] : expected) {
    INFO("op " << op);
    std::vector<float> got(3);
    on_ranks(3, [&, op = op](Rank& self) {
      const Array<T> data(std::vector<T>{T(static_cast<float>(2 * self.rank + 2))});
      ok(ncclAllReduce(data.get(), data.get(), 1, type, op, self.comm, self.stream));
      ok(cudaStreamSynchronize(self.stream));
      got[static_cast<std::size_t>(self.rank)] = static_cast<float>(data.values()[0]);
    });
    // An average is a sum of thirds, rounded each.
    const float tolerance = op == ncclAvg && !std::is_integral_v<T> ? 0.5F : 0.0F;
    for (const float one : got) CHECK(std::abs(one - value) <= tolerance);
    CHECK(got == std::vector<float>(3, got[0]));
  }
}

}  // namespace

TEST_CASE("every type is reduced by every operation", "[nccl]") {
  const Fresh fresh;
  check_reductions<std::int8_t>(ncclInt8);
  check_reductions<std::uint8_t>(ncclUint8);
  check_reductions<std::int32_t>(ncclInt32);
  check_reductions<std::uint32_t>(ncclUint32);
  check_reductions<std::int64_t>(ncclInt64);
  check_reductions<std::uint64_t>(ncclUint64);
  check_reductions<__half>(ncclFloat16);
  check_reductions<float>(ncclFloat32);
  check_reductions<double>(ncclFloat64);
  check_reductions<__nv_bfloat16>(ncclBfloat16);
  check_reductions<__nv_fp8_e4m3>(ncclFloat8e4m3);
  check_reductions<__nv_fp8_e5m2>(ncclFloat8e5m2);
}

TEST_CASE("integers keep all their bits and wrap around", "[nccl]") {
  const Fresh fresh;
  on_ranks(2, [](Rank& self) {
    const std::uint64_t big = (std::uint64_t{1} << 63) + 1 + static_cast<unsigned>(self.rank);
    const Array<std::uint64_t> data(std::vector<std::uint64_t>{big});
    const Array<std::int8_t> small(std::vector<std::int8_t>{127});
    ok(ncclAllReduce(data.get(), data.get(), 1, ncclUint64, ncclSum, self.comm, self.stream));
    ok(ncclAllReduce(small.get(), small.get(), 1, ncclInt8, ncclSum, self.comm, self.stream));
    ok(cudaStreamSynchronize(self.stream));
    expect(data.values()[0] == 3, "uint64");
    expect(small.values()[0] == -2, "int8");
  });
}

TEST_CASE("sums have the same bits on all ranks, not those of rank order", "[nccl]") {
  const Fresh fresh;
  constexpr std::size_t count = 200;
  const int size = GENERATE(3, 4);
  const auto values = [](int rank) {
    std::vector<float> data(count);
    for (std::size_t i = 0; i < count; ++i) {
      data[i] = std::sin(static_cast<float>(i * 7) + static_cast<float>(rank) * 1.3F) *
                std::pow(10.0F, static_cast<float>(rank));
    }
    return data;
  };
  std::vector<float> in_rank_order(count);
  for (int r = 0; r < size; ++r) {
    const auto data = values(r);
    for (std::size_t i = 0; i < count; ++i) in_rank_order[i] += data[i];
  }
  std::vector<std::vector<float>> got(static_cast<std::size_t>(size)), halves = got;
  on_ranks(size, [&](Rank& self) {
    const Array<float> data(values(self.rank)), cut(values(self.rank));
    ok(ncclAllReduce(data.get(), data.get(), count, ncclFloat, ncclSum, self.comm, self.stream));
    for (const std::size_t first : {std::size_t{0}, count / 2}) {
      ok(ncclAllReduce(cut.get() + first, cut.get() + first, count / 2, ncclFloat, ncclSum,
                       self.comm, self.stream));
    }
    ok(cudaStreamSynchronize(self.stream));
    got[static_cast<std::size_t>(self.rank)] = data.values();
    halves[static_cast<std::size_t>(self.rank)] = cut.values();
  });
  for (const auto& one : got) CHECK(one == got[0]);
  CHECK(got[0] != in_rank_order);
  CHECK(got[0] != halves[0]);
  for (std::size_t i = 0; i < count; ++i) {
    CHECK(std::abs(got[0][i] - in_rank_order[i]) <= 1e-3F);
  }
}

TEST_CASE("an average of floats is a sum of products with the reciprocal", "[nccl]") {
  const Fresh fresh;
  on_ranks(3, [](Rank& self) {
    const Array<float> data(std::vector<float>{7});
    ok(ncclAllReduce(data.get(), data.get(), 1, ncclFloat, ncclAvg, self.comm, self.stream));
    ok(cudaStreamSynchronize(self.stream));
    const float third = 7 * static_cast<float>(1.0 / 3);
    expect(data.values()[0] == third + third + third, "average");
  });
}

TEST_CASE("pre-multiplied sums have a factor for each rank", "[nccl]") {
  const Fresh fresh;
  on_ranks(3, [](Rank& self) {
    double factor = self.rank + 1;
    const Array<double> data(std::vector<double>{10, 1}),
        device_factor(std::vector<double>{factor * 2});
    ncclRedOp_t by_value{}, by_place{};
    ok(ncclRedOpCreatePreMulSum(&by_value, &factor, ncclFloat64, ncclScalarHostImmediate,
                                self.comm));
    factor = 0;
    ok(ncclRedOpCreatePreMulSum(&by_place, device_factor.get(), ncclFloat64, ncclScalarDevice,
                                self.comm));
    ok(ncclAllReduce(data.get(), data.get(), 1, ncclFloat64, by_value, self.comm, self.stream));
    ok(ncclAllReduce(data.get() + 1, data.get() + 1, 1, ncclFloat64, by_place, self.comm,
                     self.stream));
    expect(ncclAllReduce(data.get(), data.get(), 1, ncclInt64, by_value, self.comm, self.stream) ==
               ncclInvalidArgument,
           "of another type");
    ok(ncclRedOpDestroy(by_value, self.comm));
    ok(ncclRedOpDestroy(by_place, self.comm));
    expect(ncclAllReduce(data.get(), data.get(), 1, ncclFloat64, by_value, self.comm,
                         self.stream) == ncclInvalidArgument,
           "destroyed");
    expect(ncclRedOpDestroy(by_value, self.comm) == ncclInvalidArgument, "destroyed twice");
    expect(ncclRedOpDestroy(ncclSum, self.comm) == ncclInvalidArgument, "built in");
    ok(cudaStreamSynchronize(self.stream));
    expect(data.values() == std::vector<double>{60, 12}, "values");
  });
}

TEST_CASE("operations run in stream order and never block the host", "[nccl]") {
  const Fresh fresh;
  zero_emulation::delay(3, 2000);
  std::atomic<bool> may_go{false};
  on_ranks(2, [&](Rank& self) {
    const Array<unsigned char> data(64), seen(64);
    if (self.rank == 1) {
      while (!may_go) std::this_thread::sleep_for(1ms);
    }
    ok(cudaMemsetAsync(data.get(), self.rank + 1, 64, self.stream));
    ok(ncclAllReduce(data.get(), data.get(), 64, ncclUint8, ncclSum, self.comm, self.stream));
    ok(cudaMemcpyAsync(seen.get(), data.get(), 64, cudaMemcpyDeviceToDevice, self.stream));
    ok(cudaMemsetAsync(data.get(), 9, 64, self.stream));
    if (self.rank == 0) {
      std::this_thread::sleep_for(20ms);
      expect(cudaStreamQuery(self.stream) == cudaErrorNotReady, "done without its peer");
      may_go = true;
    }
    ok(cudaStreamSynchronize(self.stream));
    expect(seen.values() == std::vector<unsigned char>(64, 3), "sum of what came before");
  });
}

TEST_CASE("sends and receives of a group can't deadlock, whatever their order", "[nccl]") {
  const Fresh fresh;
  const int size = GENERATE(1, 2, 4);
  const bool receives_first = GENERATE(false, true);
  on_ranks(size, [&](Rank& self) {
    // To every rank, itself too, as many elements as both ranks' numbers say; none between some.
    const auto count = [](int from, int to) {
      return static_cast<std::size_t>((from * 5 + to * 3) % 7);
    };
    std::vector<std::unique_ptr<Array<float>>> out, in;
    for (int peer = 0; peer < size; ++peer) {
      out.push_back(std::make_unique<Array<float>>(
          elements<float>(self.rank * 8 + peer, count(self.rank, peer))));
      in.push_back(std::make_unique<Array<float>>(count(peer, self.rank)));
    }
    const auto send = [&] {
      for (int peer = size - 1; peer >= 0; --peer) {
        ok(ncclSend(out[static_cast<std::size_t>(peer)]->get(), count(self.rank, peer), ncclFloat,
                    peer, self.comm, self.stream));
      }
    };
    ok(ncclGroupStart());
    if (!receives_first) send();
    for (int peer = 0; peer < size; ++peer) {
      ok(ncclRecv(in[static_cast<std::size_t>(peer)]->get(), count(peer, self.rank), ncclFloat,
                  peer, self.comm, self.stream));
    }
    if (receives_first) send();
    ok(ncclGroupEnd());
    ok(cudaStreamSynchronize(self.stream));
    for (int peer = 0; peer < size; ++peer) {
      expect(in[static_cast<std::size_t>(peer)]->values() ==
                 elements<float>(peer * 8 + self.rank, count(peer, self.rank)),
             "received");
    }
  });
}

TEST_CASE("a send and its receive meet, nobody else", "[nccl]") {
  const Fresh fresh;
  on_ranks(3, [](Rank& self) {
    if (self.rank == 2) return;
    const Array<float> first(elements<float>(self.rank, 5)), second(elements<float>(4, 6));
    for (int round = 0; round < 20; ++round) {
      if (self.rank == 0) {
        ok(ncclSend(first.get(), 5, ncclFloat, 1, self.comm, self.stream));
        ok(ncclSend(second.get(), 6, ncclFloat, 1, self.comm, self.stream));
      } else {
        ok(ncclRecv(first.get(), 5, ncclFloat, 0, self.comm, self.stream));
        ok(ncclRecv(second.get(), 6, ncclFloat, 0, self.comm, self.stream));
      }
    }
    ok(cudaStreamSynchronize(self.stream));
    expect(first.values() == elements<float>(0, 5), "the first");
    expect(second.values() == elements<float>(4, 6), "the second");
  });
}

TEST_CASE("one thread has all ranks, in groups", "[nccl]") {
  const Fresh fresh;
  constexpr int size = 3;
  std::vector<ncclComm_t> comms(size);
  const bool by_id = GENERATE(false, true);
  if (by_id) {
    ncclUniqueId id;
    ok(ncclGetUniqueId(&id));
    ok(ncclGroupStart());
    for (int r = 0; r < size; ++r) {
      ok(cudaSetDevice(r));
      ok(ncclCommInitRank(&comms[static_cast<std::size_t>(r)], size, id, r));
    }
    ok(ncclGroupEnd());
  } else {
    ok(ncclCommInitAll(comms.data(), size, nullptr));
  }
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Array<float>>> data;
  ok(ncclGroupStart());
  for (int r = 0; r < size; ++r) {
    const auto i = static_cast<std::size_t>(r);
    int device = -1, rank = -1, count = -1;
    ok(ncclCommCuDevice(comms[i], &device));
    ok(ncclCommUserRank(comms[i], &rank));
    ok(ncclCommCount(comms[i], &count));
    CHECK((device == r && rank == r && count == size));
    ok(cudaSetDevice(r));
    streams.push_back(std::make_unique<Stream>());
    data.push_back(std::make_unique<Array<float>>(elements<float>(r, 40)));
    ok(ncclGroupStart());
    ok(ncclAllReduce(data[i]->get(), data[i]->get(), 20, ncclFloat, ncclSum, comms[i],
                     *streams[i]));
    ok(ncclAllReduce(data[i]->get() + 20, data[i]->get() + 20, 20, ncclFloat, ncclMax, comms[i],
                     *streams[i]));
    ok(ncclGroupEnd());
    CHECK(streams[i]->idle());
  }
  ok(ncclGroupEnd());
  for (std::size_t i = 0; i < size; ++i) {
    streams[i]->synchronize();
    auto expected = sums<float>(size, 20);
    const auto largest = elements<float>(size - 1, 20, 20);
    expected.insert(expected.end(), largest.begin(), largest.end());
    CHECK(data[i]->values() == expected);
    ok(ncclCommDestroy(comms[i]));
  }
  ok(cudaSetDevice(0));
}

TEST_CASE("ranks that share a device may share a stream in a group", "[nccl]") {
  const Fresh fresh;
  fake::allow_shared_devices();
  const std::vector<int> devices{0, 0};
  std::vector<ncclComm_t> comms(2);
  ok(ncclCommInitAll(comms.data(), 2, devices.data()));
  const Stream stream;
  const Array<float> a(elements<float>(0, 9)), b(elements<float>(1, 9));
  ok(ncclGroupStart());
  ok(ncclAllReduce(a.get(), a.get(), 9, ncclFloat, ncclSum, comms[0], stream));
  ok(ncclAllReduce(b.get(), b.get(), 9, ncclFloat, ncclSum, comms[1], stream));
  ok(ncclGroupEnd());
  stream.synchronize();
  CHECK(a.values() == sums<float>(2, 9));
  CHECK(b.values() == sums<float>(2, 9));
  for (const ncclComm_t comm : comms) ok(ncclCommDestroy(comm));
}

TEST_CASE("a communicator's operations keep their order over several streams", "[nccl]") {
  const Fresh fresh;
  zero_emulation::delay(5, 500);
  on_ranks(2, [](Rank& self) {
    const Stream other;
    const Array<unsigned char> a(8), b(8);
    for (int round = 0; round < 20; ++round) {
      // All of a group waits for what is in any of its streams, and all of them for it.
      ok(cudaMemsetAsync(a.get(), 1, 8, self.stream));
      ok(cudaMemsetAsync(b.get(), 2, 8, other));
      ok(ncclGroupStart());
      ok(ncclAllReduce(a.get(), a.get(), 8, ncclUint8, ncclSum, self.comm, self.stream));
      ok(ncclAllReduce(b.get(), b.get(), 8, ncclUint8, ncclSum, self.comm, other));
      ok(ncclGroupEnd());
      ok(ncclAllReduce(a.get(), a.get(), 8, ncclUint8, ncclSum, self.comm, other));
      ok(ncclAllReduce(b.get(), b.get(), 8, ncclUint8, ncclMax, self.comm, self.stream));
      ok(cudaStreamSynchronize(self.stream));
      other.synchronize();
      expect(a.values() == std::vector<unsigned char>(8, 4), "the first");
      expect(b.values() == std::vector<unsigned char>(8, 4), "the second");
    }
  });
}

TEST_CASE("ranks that disagree are told so, and blocked until they abort", "[nccl]") {
  const Fresh fresh;
  const int what = GENERATE(0, 1, 2, 3, 4, 5, 6);
  on_ranks(3, [&](Rank& self) {
    const Array<float> data(std::vector<float>(64, 1.0F));
    float* p = data.get();
    const ncclComm_t comm = self.comm;
    const cudaStream_t stream = self.stream;
    const bool odd = self.rank == 1;
    // Who comes late may be told at once.
    bool begun = true;
    const auto begin = [&](ncclResult_t result) {
      expect(result == ncclSuccess || result == ncclInvalidUsage, "begun");
      begun = begun && result == ncclSuccess;
    };
    switch (what) {
      case 0: begin(ncclAllReduce(p, p, odd ? 4 : 5, ncclFloat, ncclSum, comm, stream)); break;
      case 1:
        begin(ncclAllReduce(p, p, 4, odd ? ncclInt32 : ncclFloat, ncclSum, comm, stream));
        break;
      case 2:
        begin(ncclAllReduce(p, p, 4, ncclFloat, odd ? ncclMax : ncclSum, comm, stream));
        break;
      case 3: begin(ncclBroadcast(p, p, 4, ncclFloat, odd ? 1 : 0, comm, stream)); break;
      case 4:
        begin(odd ? ncclAllReduce(p, p, 4, ncclFloat, ncclSum, comm, stream)
                  : ncclAllGather(p + 4 * self.rank, p, 4, ncclFloat, comm, stream));
        break;
      case 5:  // the order
        for (const bool first : {true, false}) {
          begin(first != odd ? ncclAllReduce(p, p, 4, ncclFloat, ncclSum, comm, stream)
                             : ncclBroadcast(p, p, 4, ncclFloat, 0, comm, stream));
        }
        break;
      default:
        if (self.rank == 0) begin(ncclSend(p, 4, ncclFloat, 1, comm, stream));
        if (self.rank == 1) begin(ncclRecv(p, 5, ncclFloat, 0, comm, stream));
    }
    expect(await_error(comm) == ncclInvalidUsage, "no error");
    expect(std::string(ncclGetLastError(comm)).find("ranks disagree: rank ") != std::string::npos,
           "no diagnosis");
    expect(ncclAllReduce(p, p, 4, ncclFloat, ncclSum, comm, stream) == ncclInvalidUsage, "used on");
    if (begun && what != 6) expect(cudaStreamQuery(stream) == cudaErrorNotReady, "not blocked");
    abort(self);
    ok(cudaStreamSynchronize(stream));
    expect(data.values() == std::vector<float>(64, 1.0F), "something was done");
  });
}

TEST_CASE("abort frees a rank that waits for others, and tells its peers", "[nccl]") {
  const Fresh fresh;
  const bool collective = GENERATE(true, false);
  std::atomic<int> started{0};
  on_ranks(3, [&](Rank& self) {
    if (self.rank == 2) {
      expect(await_error(self.comm) == ncclRemoteError, "not told");
      return abort(self);
    }
    {
      const Array<float> data(std::vector<float>(4, 1.0F));
      if (collective) {
        ok(ncclAllReduce(data.get(), data.get(), 4, ncclFloat, ncclSum, self.comm, self.stream));
      } else if (self.rank == 0) {
        ok(ncclRecv(data.get(), 4, ncclFloat, 2, self.comm, self.stream));
      }
      ++started;
      if (self.rank == 1) {
        expect(await_error(self.comm) == ncclRemoteError, "not told");
      } else {
        while (started != 2) std::this_thread::sleep_for(1ms);
        std::this_thread::sleep_for(20ms);
        expect(async_error(self.comm) == ncclSuccess, "an error of its own");
        expect(cudaStreamQuery(self.stream) == cudaErrorNotReady, "not waiting");
      }
      abort(self);
      ok(cudaStreamSynchronize(self.stream));
      expect(data.values() == std::vector<float>(4, 1.0F), "something was done");
    }
  });
}

TEST_CASE("one rank a device, unless a test allows more", "[nccl]") {
  const Fresh fresh;
  zero_emulation::set_devices(1);
  const std::vector<int> devices{0, 0};
  std::vector<ncclComm_t> comms(2);
  CHECK(ncclCommInitAll(comms.data(), 2, devices.data()) == ncclInvalidUsage);
  CHECK(comms == std::vector<ncclComm_t>(2));
  CHECK(std::string(ncclGetLastError(nullptr)) ==
        "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 0");
  fake::allow_shared_devices();
  CHECK(ncclCommInitAll(comms.data(), 2, devices.data()) == ncclSuccess);
  for (const ncclComm_t comm : comms) ok(ncclCommDestroy(comm));
}

TEST_CASE("what isn't blocking is in progress until it is polled", "[nccl]") {
  const Fresh fresh;
  ncclUniqueId id;
  ok(ncclGetUniqueId(&id));
  std::atomic<bool> seen{false};
  on_threads(2, [&](int rank) {
    ncclConfig_t config = not_blocking();
    ncclComm_t comm = nullptr;
    if (rank == 1) {
      while (!seen) std::this_thread::sleep_for(1ms);
    }
    expect(ncclCommInitRankConfig(&comm, 2, id, rank, &config) == ncclInProgress, "init");
    int count = 0;
    if (rank == 0) {
      expect(async_error(comm) == ncclInProgress, "without its peer");
      expect(ncclCommCount(comm, &count) == ncclInvalidArgument, "used too early");
      seen = true;
    }
    expect(await_progress(comm) == ncclSuccess, "init is done");
    ok(ncclCommCount(comm, &count));
    const Stream stream;
    const Array<float> data(elements<float>(rank, 6));
    expect(ncclAllReduce(data.get(), data.get(), 6, ncclFloat, ncclSum, comm, stream) ==
               ncclInProgress,
           "started");
    std::this_thread::sleep_for(10ms);
    expect(stream.idle(), "in the stream already");
    expect(ncclAllReduce(data.get(), data.get(), 6, ncclFloat, ncclSum, comm, stream) ==
               ncclInvalidArgument,
           "two at once");
    expect(async_error(comm) == ncclInProgress, "polled once");
    expect(async_error(comm) == ncclSuccess, "polled twice");
    stream.synchronize();
    expect(data.values() == sums<float>(2, 6), "sum");

    ncclComm_t part = nullptr;
    expect(ncclCommSplit(comm, rank == 0 ? 0 : NCCL_SPLIT_NOCOLOR, 0, &part, nullptr) ==
               ncclInProgress,
           "split");
    expect(await_progress(comm) == ncclSuccess, "split is done");
    expect((part != nullptr) == (rank == 0), "who is in the part");
    if (part != nullptr) {
      expect(await_progress(part) == ncclSuccess, "the part is done");
      ok(ncclCommDestroy(part));
    }
    expect(ncclCommFinalize(comm) == ncclInProgress, "finalize");
    expect(await_progress(comm) == ncclSuccess, "finalized");
    ok(ncclCommDestroy(comm));
  });
}

TEST_CASE("groups don't mix blocking communicators and others", "[nccl]") {
  const Fresh fresh;
  std::vector<ncclComm_t> comms(2);
  for (std::size_t i = 0; i < 2; ++i) {
    ncclUniqueId id;
    ok(ncclGetUniqueId(&id));
    ncclConfig_t config = not_blocking();
    config.blocking = static_cast<int>(i);
    (void)ncclCommInitRankConfig(&comms[i], 1, id, 0, &config);
    CHECK(await_progress(comms[i]) == ncclSuccess);
  }
  const Array<float> data(3);
  ok(ncclGroupStart());
  for (const ncclComm_t comm : comms) {
    ok(ncclAllReduce(data.get(), data.get(), 3, ncclFloat, ncclSum, comm, nullptr));
  }
  CHECK(ncclGroupEnd() == ncclInvalidArgument);
  for (const ncclComm_t comm : comms) ok(ncclCommDestroy(comm));
}

TEST_CASE("split makes a communicator of each color, by key and then rank", "[nccl]") {
  const Fresh fresh;
  on_ranks(5, [](Rank& self) {
    // Colors 1 0 1 0 and none; within color 1 turned round.
    ncclComm_t part = nullptr;
    const int color = self.rank == 4 ? NCCL_SPLIT_NOCOLOR : (self.rank + 1) % 2;
    ok(ncclCommSplit(self.comm, color, color == 1 ? -self.rank : 7, &part, nullptr));
    expect((part == nullptr) == (self.rank == 4), "no color, no part");
    if (part == nullptr) return;
    int rank = -1, count = -1, device = -1;
    ok(ncclCommUserRank(part, &rank));
    ok(ncclCommCount(part, &count));
    ok(ncclCommCuDevice(part, &device));
    const std::vector<int> expected{1, 0, 0, 1};
    expect(rank == expected[static_cast<std::size_t>(self.rank)], "rank");
    expect(count == 2 && device == self.rank, "count and device");
    const Array<float> data(elements<float>(self.rank, 6));
    ok(ncclAllReduce(data.get(), data.get(), 6, ncclFloat, ncclMax, part, self.stream));
    ok(cudaStreamSynchronize(self.stream));
    expect(data.values() == elements<float>(color == 1 ? 2 : 3, 6), "maximum");
    ok(ncclCommDestroy(part));
  });
}

TEST_CASE("destroy and finalize wait for what is in streams", "[nccl]") {
  const Fresh fresh;
  zero_emulation::delay(7, 3000);
  on_ranks(2, [](Rank& self) {
    const Array<float> data(elements<float>(self.rank, 6));
    ok(ncclAllReduce(data.get(), data.get(), 6, ncclFloat, ncclSum, self.comm, self.stream));
    if (self.rank == 1) {
      ok(ncclCommFinalize(self.comm));
      expect(ncclCommFinalize(self.comm) == ncclInvalidArgument, "finalized twice");
      expect(ncclAllReduce(data.get(), data.get(), 6, ncclFloat, ncclSum, self.comm, self.stream) ==
                 ncclInvalidUsage,
             "used after it was finalized");
    }
    ok(ncclCommDestroy(self.comm));
    self.comm = nullptr;
    ok(cudaStreamSynchronize(self.stream));
    expect(data.values() == sums<float>(2, 6), "sum");
  });
}

TEST_CASE("faults come when and where a test wants them", "[nccl]") {
  const Fresh fresh;
  SECTION("a call returns an error at once") {
    fake::fail_call("ncclAllReduce", ncclSystemError, 2);
    on_ranks(1, [](Rank& self) {
      const Array<float> data(6);
      const auto reduce = [&] {
        return ncclAllReduce(data.get(), data.get(), 6, ncclFloat, ncclSum, self.comm, self.stream);
      };
      ok(reduce());
      expect(reduce() == ncclSystemError, "the second");
      ok(reduce());
      fake::fail_call("ncclAllReduce", ncclSystemError);
      ok(ncclGroupStart());
      expect(reduce() == ncclSystemError, "in a group");
      expect(ncclGroupEnd() == ncclSystemError, "the group");
      fake::fail_call("ncclGroupEnd", ncclInternalError);
      ok(ncclGroupStart());
      ok(reduce());
      expect(ncclGroupEnd() == ncclInternalError, "the end of a group");
      ok(reduce());
    });
    CHECK(fake::calls("ncclAllReduce") == 6);
    CHECK(fake::bytes("ncclAllReduce") == 6 * 24);
    CHECK(zero_emulation::counters().collectives == 3);
    CHECK_THROWS_AS(fake::calls("ncclNoSuch"), std::invalid_argument);
  }
  SECTION("CUDA fails") {
    on_ranks(1, [](Rank& self) {
      const Array<float> data(6);
      zero_emulation::fail("enqueue", 1, cudaErrorInvalidValue);
      expect(ncclAllReduce(data.get(), data.get(), 6, ncclFloat, ncclSum, self.comm, self.stream) ==
                 ncclUnhandledCudaError,
             "result");
    });
  }
  SECTION("an operation fails in the stream") {
    fake::fail_operation(1, ncclSystemError, 3);
    on_ranks(3, [](Rank& self) {
      const Array<float> data(std::vector<float>(6, 1));
      for (int i = 0; i < 2; ++i) {
        ok(ncclAllReduce(data.get(), data.get(), 6, ncclFloat, ncclSum, self.comm, self.stream));
      }
      ok(cudaStreamSynchronize(self.stream));
      if (self.rank == 1) expect(async_error(self.comm) == ncclSuccess, "too early");
      const ncclResult_t third =
          ncclAllReduce(data.get(), data.get(), 6, ncclFloat, ncclSum, self.comm, self.stream);
      const ncclResult_t expected = self.rank == 1 ? ncclSystemError : ncclRemoteError;
      expect(third == ncclSuccess || third == expected, "the third");
      expect(await_error(self.comm) == expected, "error");
      abort(self);
      ok(cudaStreamSynchronize(self.stream));
      expect(data.values() == std::vector<float>(6, 9), "two sums");
    });
  }
  SECTION("a rank never arrives") {
    fake::lose_operation(1);
    std::atomic<int> started{0};
    on_ranks(2, [&](Rank& self) {
      const Array<float> data(6);
      ok(ncclAllReduce(data.get(), data.get(), 6, ncclFloat, ncclSum, self.comm, self.stream));
      ++started;
      while (started != 2) std::this_thread::sleep_for(1ms);
      std::this_thread::sleep_for(20ms);
      expect(cudaStreamQuery(self.stream) == cudaErrorNotReady, "done");
      const ncclResult_t error = async_error(self.comm);
      expect(error == ncclSuccess || error == ncclRemoteError, "an error before an abort");
      abort(self);
      ok(cudaStreamSynchronize(self.stream));
    });
  }
  SECTION("a communicator fails while it is made") {
    const bool splits = GENERATE(false, true);
    const auto make = [&](int rank, const std::function<ncclResult_t(ncclComm_t*)>& f) {
      ncclComm_t comm = nullptr;
      const ncclResult_t result = f(&comm);
      expect(comm == nullptr, "there is one");
      expect(result == (rank == 2 ? ncclSystemError : ncclRemoteError), "result");
    };
    if (splits) {
      on_ranks(3, [&](Rank& self) {
        if (self.rank == 2) fake::fail_init(2, ncclSystemError);
        make(self.rank,
             [&](ncclComm_t* part) { return ncclCommSplit(self.comm, 0, 0, part, nullptr); });
      });
    } else {
      ncclUniqueId id;
      ok(ncclGetUniqueId(&id));
      fake::fail_init(2, ncclSystemError);
      on_threads(3, [&](int rank) {
        make(rank, [&](ncclComm_t* comm) { return ncclCommInitRank(comm, 3, id, rank); });
      });
    }
  }
  SECTION("a communicator is never done") {
    fake::hang_init(1);
    ncclUniqueId id;
    ok(ncclGetUniqueId(&id));
    std::atomic<int> waited{0};
    on_threads(2, [&](int rank) {
      ncclConfig_t config = not_blocking();
      ncclComm_t comm = nullptr;
      expect(ncclCommInitRankConfig(&comm, 2, id, rank, &config) == ncclInProgress, "init");
      std::this_thread::sleep_for(10ms);
      expect(async_error(comm) == ncclInProgress, "done");
      ++waited;
      while (waited != 2) std::this_thread::sleep_for(1ms);
      if (rank == 0) expect(await_progress(comm) == ncclRemoteError, "the other gave up");
      ok(ncclCommAbort(comm));
    });
  }
}

TEST_CASE("wrong arguments are refused", "[nccl]") {
  const Fresh fresh;
  SECTION("of operations") {
    on_ranks(2, [](Rank& self) {
      const ncclComm_t comm = self.comm;
      const cudaStream_t stream = self.stream;
      const Array<float> data(12);
      float* p = data.get();
      std::vector<float> host(12);
      const auto refused = [](ncclResult_t result, ncclResult_t expected, const char* what) {
        expect(result == expected, what);
      };
      const ncclResult_t bad = ncclInvalidArgument;
      refused(ncclAllReduce(p, p, 4, ncclFloat, ncclSum, nullptr, stream), bad, "no communicator");
      refused(ncclAllReduce(p, p, 4, ncclNumTypes, ncclSum, comm, stream), bad, "type");
      refused(ncclAllReduce(p, p, 4, ncclFloat, ncclNumOps, comm, stream), bad, "reduction");
      refused(ncclBroadcast(p, p, 4, ncclFloat, 2, comm, stream), bad, "root");
      refused(ncclSend(p, 4, ncclFloat, -1, comm, stream), bad, "peer");
      refused(ncclAllReduce(p, nullptr, 4, ncclFloat, ncclSum, comm, stream), bad, "null");
      refused(ncclAllReduce(host.data(), p, 4, ncclFloat, ncclSum, comm, stream), bad, "host");
      refused(ncclAllReduce(reinterpret_cast<std::byte*>(p) + 2, p, 4, ncclFloat, ncclSum, comm,
                            stream),
              bad, "misaligned");
      refused(ncclAllReduce(p, p + 1, 4, ncclFloat, ncclSum, comm, stream), bad, "overlap");
      refused(ncclAllGather(p + 4 * (1 - self.rank), p, 4, ncclFloat, comm, stream), bad,
              "another rank's place");
      refused(ncclReduceScatter(p, p + 4 * (1 - self.rank), 4, ncclFloat, ncclSum, comm, stream),
              bad, "another rank's place");
      int device = -1;
      ok(cudaGetDevice(&device));
      ok(cudaSetDevice(device + 2));
      const Stream foreign;
      ok(cudaSetDevice(device));
      refused(ncclAllReduce(p, p, 4, ncclFloat, ncclSum, comm, foreign), ncclUnhandledCudaError,
              "a stream of another device");
      refused(ncclGroupEnd(), ncclInvalidUsage, "no group");
      // None of it is left behind.
      ok(cudaMemsetAsync(p, 0, 48, stream));
      ok(ncclAllReduce(p, p, 12, ncclFloat, ncclSum, comm, stream));
      ok(cudaStreamSynchronize(stream));
    });
  }
  SECTION("of communicators") {
    ncclUniqueId id;
    ok(ncclGetUniqueId(&id));
    ncclComm_t comm = nullptr;
    CHECK(ncclCommInitRank(&comm, 2, id, 2) == ncclInvalidArgument);
    CHECK(ncclCommInitRank(&comm, 1, ncclUniqueId{}, 0) == ncclInvalidArgument);
    ncclConfig_t config{};
    CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclInvalidArgument);
    config = not_blocking();
    config.blocking = 2;
    CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclInvalidArgument);
    CHECK(ncclCommInitRankScalable(&comm, 1, 0, 2, &id, nullptr) == ncclInvalidArgument);
    CHECK(ncclCommInitRankScalable(&comm, 1, 0, 1, &id, nullptr) == ncclSuccess);
    ncclComm_t again = nullptr;
    CHECK(ncclCommInitRank(&again, 1, id, 0) == ncclRemoteError);
    CHECK(again == nullptr);
    CHECK(ncclCommSplit(comm, -2, 0, &again, nullptr) == ncclInvalidArgument);
    ok(ncclCommDestroy(comm));
    CHECK(ncclCommDestroy(nullptr) == ncclSuccess);
    CHECK(ncclCommAbort(nullptr) == ncclSuccess);
    zero_emulation::set_devices(0);
    CHECK(ncclCommInitRank(&comm, 1, id, 0) == ncclUnhandledCudaError);
  }
  SECTION("ranks that disagree about who there is") {
    const int what = GENERATE(0, 1);
    ncclUniqueId id;
    ok(ncclGetUniqueId(&id));
    on_threads(3, [&](int rank) {
      ncclComm_t comm = nullptr;
      const ncclResult_t result = ncclCommInitRank(&comm, what == 0 && rank == 2 ? 4 : 3, id,
                                                   what == 1 && rank == 2 ? 1 : rank);
      // Who comes too late only hears that a peer has failed.
      expect(result == ncclInvalidUsage || result == ncclRemoteError, "result");
    });
  }
}

TEST_CASE("operations can be captured and replayed", "[nccl]") {
  const Fresh fresh;
  on_ranks(2, [](Rank& self) {
    const Array<unsigned char> data(8);
    ok(cudaMemsetAsync(data.get(), 1, 8, self.stream));
    ok(cudaStreamBeginCapture(self.stream, cudaStreamCaptureModeThreadLocal));
    ok(ncclGroupStart());
    ok(ncclAllReduce(data.get(), data.get(), 8, ncclUint8, ncclSum, self.comm, self.stream));
    ok(ncclGroupEnd());
    cudaGraph_t graph = nullptr;
    ok(cudaStreamEndCapture(self.stream, &graph));
    cudaGraphExec_t executable = nullptr;
    ok(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < 3; ++i) ok(cudaGraphLaunch(executable, self.stream));
    // Beside it, one that isn't captured.
    ok(ncclAllReduce(data.get(), data.get(), 8, ncclUint8, ncclSum, self.comm, self.stream));
    ok(cudaStreamSynchronize(self.stream));
    expect(data.values() == std::vector<unsigned char>(8, 16), "four sums");
    ok(cudaGraphExecDestroy(executable));
    ok(cudaGraphDestroy(graph));
  });
}

TEST_CASE("versions and words", "[nccl]") {
  const Fresh fresh;
  int version = 0;
  ok(ncclGetVersion(&version));
  CHECK(version == NCCL_VERSION_CODE);
  fake::set_version(20304);
  ok(ncclGetVersion(&version));
  CHECK(version == 20304);
  CHECK(std::string(ncclGetErrorString(ncclSuccess)) == "no error");
  CHECK(std::string(ncclGetErrorString(ncclRemoteError)) ==
        "remote process exited or there was a network error");
  ncclUniqueId a, b;
  ok(ncclGetUniqueId(&a));
  ok(ncclGetUniqueId(&b));
  CHECK(std::memcmp(&a, &b, sizeof a) != 0);
}
