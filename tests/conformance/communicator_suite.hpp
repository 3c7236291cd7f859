// SPDX-License-Identifier: Apache-2.0
/// @file
/// What every model of `zero::Communicator` must do, as functions that all ranks run together.
///
/// Nothing here uses Catch, whose macros belong to one thread, nor knows whether ranks are threads
/// or processes: a rank that finds something wrong throws. The oracle is serial: every rank can
/// compute what every rank's input was. A model's test calls `check_communicator<T>(comm)` on every
/// rank of worlds of 1, 2, 3 and 4, and `check_once(comm)`.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "memory.hpp"
#include "zero/communicator.hpp"
#include "zero/config.hpp"
#include "zero/element.hpp"
#include "zero/error.hpp"

namespace zero_test {

/// An element type whose sums are computed in another type, as 16-bit types' are.
struct Half {
  float bits = 0;  // a store truncates to a multiple of 1/4
};

}  // namespace zero_test

template <>
struct zero::element_traits<zero_test::Half> {
  static constexpr ElementType type = ElementType::float32;
  static constexpr std::string_view name = "half";
  using arithmetic = double;
  ZERO_HOST_DEVICE static double load(zero_test::Half x) { return static_cast<double>(x.bits); }
  ZERO_HOST_DEVICE static zero_test::Half store(double x) {
    return {static_cast<float>(static_cast<double>(static_cast<long long>(x * 4)) / 4)};
  }
};

namespace zero_test {

inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("conformance: " + what);
}

template <class Comm>
std::size_t own_rank(const Comm& comm) {
  return static_cast<std::size_t>(comm.rank());
}
template <class Comm>
std::size_t world_size(const Comm& comm) {
  return static_cast<std::size_t>(comm.size());
}

template <class T>
T stored(zero::arithmetic_t<T> x) {
  return zero::element_traits<T>::store(x);
}
template <class T>
zero::arithmetic_t<T> loaded(T x) {
  return zero::element_traits<T>::load(x);
}

/// Element `i` of rank `rank`'s data: magnitudes from 1e-6 to 1e6 (1e-8 to 1e4 where more would
/// overflow), so that another order of summation gives other bits.
template <class T>
T value(std::size_t rank, std::size_t i, std::uint64_t salt) {
  std::uint64_t x = (i + 1) * 0x9e3779b97f4a7c15U + (rank + 1) * 0xc2b2ae3d27d4eb4fU + salt;
  x ^= x >> 29U;
  x *= 0xbf58476d1ce4e5b9U;
  x ^= x >> 32U;
  constexpr double magnitudes[] = {1e-6, 1e-3, 1.0, 1e3, 1e6};
  const double unit = static_cast<double>(x >> 12U) / static_cast<double>(1ULL << 52U);
  const double fits = zero::element_traits<T>::type == zero::ElementType::float16 ? 1e-2 : 1;
  return stored<T>(static_cast<zero::arithmetic_t<T>>((2 * unit - 1) * magnitudes[x % 5] * fits));
}

template <class T>
Vector<T> data_of(std::size_t rank, std::size_t count, std::uint64_t salt) {
  Vector<T> data(count);
  for (std::size_t i = 0; i < count; ++i) data[i] = value<T>(rank, i, salt);
  return data;
}

/// The serial reduction, in rank order.
template <class T>
Vector<T> reduced(std::size_t ranks, std::size_t count, std::uint64_t salt, zero::ReduceOp op) {
  std::vector<zero::arithmetic_t<T>> result;
  for (const T x : data_of<T>(0, count, salt)) result.push_back(loaded(x));
  for (std::size_t r = 1; r < ranks; ++r) {
    const Vector<T> data = data_of<T>(r, count, salt);
    for (std::size_t i = 0; i < count; ++i) {
      const auto x = loaded(data[i]);
      if (op == zero::ReduceOp::sum) result[i] += x;
      if (op == zero::ReduceOp::min) result[i] = std::min(result[i], x);
      if (op == zero::ReduceOp::max) result[i] = std::max(result[i], x);
    }
  }
  Vector<T> rounded;
  for (const auto x : result) rounded.push_back(stored<T>(x));
  return rounded;
}

template <class T>
void require_same_bits(std::span<const T> found, std::span<const T> expected,
                       const std::string& what) {
  require(found.size() == expected.size(), what + ": size");
  if (found.empty() || std::memcmp(found.data(), expected.data(), found.size_bytes()) == 0) return;
  for (std::size_t i = 0; i < found.size(); ++i) {
    require(std::memcmp(&found[i], &expected[i], sizeof(T)) == 0,
            what + ": element " + std::to_string(i) + " of " + std::to_string(found.size()) +
                " is " + std::to_string(loaded(found[i])) + ", not " +
                std::to_string(loaded(expected[i])));
  }
}
template <class T>
void require_same_bits(const Vector<T>& found, const Vector<T>& expected, const std::string& what) {
  require_same_bits(std::span<const T>(found), std::span<const T>(expected), what);
}

inline const std::vector<std::size_t>& sizes() {
  static const std::vector<std::size_t> all{0, 1, 7, 33, 3001};
  return all;
}
inline constexpr zero::ReduceOp all_reductions[] = {zero::ReduceOp::sum, zero::ReduceOp::min,
                                                    zero::ReduceOp::max};

template <class T, class Comm>
void check_all_reduce(Comm& comm) {
  const std::size_t k = world_size(comm), me = own_rank(comm);
  for (const std::size_t n : sizes()) {
    for (const zero::ReduceOp op : all_reductions) {
      Vector<T> data = data_of<T>(me, n, n);
      comm.all_reduce(std::span<T>(data), op).wait();
      require_same_bits(data, reduced<T>(k, n, n, op), "all_reduce of " + std::to_string(n));
    }
  }
}

template <class T, class Comm>
void check_reduce_scatter(Comm& comm) {
  const std::size_t k = world_size(comm), me = own_rank(comm);
  for (const std::size_t n : sizes()) {
    for (const zero::ReduceOp op : all_reductions) {
      const std::string what = "reduce_scatter of " + std::to_string(n);
      const Vector<T> whole = reduced<T>(k, n * k, n, op);
      const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(me * n);
      const Vector<T> expected(begin, begin + static_cast<std::ptrdiff_t>(n));

      const Vector<T> original = data_of<T>(me, n * k, n);
      Vector<T> input = original, output(n, stored<T>(-1));
      comm.reduce_scatter(std::span<const T>(input), std::span<T>(output), op).wait();
      require_same_bits(output, expected, what);
      require_same_bits(input, original, what + ", which changed its input");

      const std::span<T> slice = std::span<T>(input).subspan(me * n, n);
      comm.reduce_scatter(std::span<const T>(input), slice, op).wait();
      require_same_bits(std::span<const T>(slice), std::span<const T>(expected),
                        what + " in place");
      Vector<T> written = original;
      std::copy(expected.begin(), expected.end(),
                written.begin() + static_cast<std::ptrdiff_t>(me * n));
      require_same_bits(input, written, what + " in place, beyond its slice");
    }
  }
}

/// Uneven counts, some of them zero.
inline std::vector<std::size_t> uneven(std::size_t ranks, std::size_t n, std::size_t shift) {
  std::vector<std::size_t> counts(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    const std::size_t kind = (r + shift) % 4;
    counts[r] = kind == 0 ? n : kind == 1 ? 0 : kind == 2 ? n / 3 + 1 : 2 * n + 1;
  }
  return counts;
}
inline std::size_t sum_of(std::span<const std::size_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

template <class T, class Comm>
void check_uneven(Comm& comm) {
  const std::size_t k = world_size(comm), me = own_rank(comm);
  for (const std::size_t n : sizes()) {
    for (std::size_t shift = 0; shift < 4; ++shift) {
      const std::vector<std::size_t> counts = uneven(k, n, shift);
      const std::size_t total = sum_of(counts);
      const std::size_t offset = sum_of(std::span(counts).first(me));
      const auto own = [&](Vector<T>& all) {
        return std::span<T>(all).subspan(offset, counts[me]);
      };
      {
        const std::string what = "reduce_scatter_v of " + std::to_string(total);
        Vector<T> whole = reduced<T>(k, total, n, zero::ReduceOp::sum);
        const std::span<const T> expected = own(whole);
        Vector<T> input = data_of<T>(me, total, n), output(counts[me]);
        comm.reduce_scatter_v(std::span<const T>(input), std::span<T>(output),
                              std::span<const std::size_t>(counts), zero::ReduceOp::sum)
            .wait();
        require_same_bits(std::span<const T>(output), expected, what);
        comm.reduce_scatter_v(std::span<const T>(input), own(input),
                              std::span<const std::size_t>(counts), zero::ReduceOp::sum)
            .wait();
        require_same_bits(std::span<const T>(own(input)), expected, what + " in place");
      }
      {
        const std::string what = "all_gather_v of " + std::to_string(total);
        Vector<T> expected;
        for (std::size_t r = 0; r < k; ++r) {
          const Vector<T> part = data_of<T>(r, counts[r], n);
          expected.insert(expected.end(), part.begin(), part.end());
        }
        const Vector<T> input = data_of<T>(me, counts[me], n);
        Vector<T> output(total), in_place(total);
        comm.all_gather_v(std::span<const T>(input), std::span<T>(output),
                          std::span<const std::size_t>(counts))
            .wait();
        require_same_bits(output, expected, what);
        std::copy(input.begin(), input.end(), own(in_place).begin());
        comm.all_gather_v(std::span<const T>(own(in_place)), std::span<T>(in_place),
                          std::span<const std::size_t>(counts))
            .wait();
        require_same_bits(in_place, expected, what + " in place");
      }
      {
        // Rank r sends count(r, s) elements to rank s.
        const auto count = [&](std::size_t from, std::size_t to) {
          return uneven(k, n, shift + from)[to];
        };
        std::vector<std::size_t> send(k), receive(k);
        for (std::size_t r = 0; r < k; ++r) send[r] = count(me, r), receive[r] = count(r, me);
        Vector<T> expected;
        for (std::size_t r = 0; r < k; ++r) {
          std::size_t from = 0;
          for (std::size_t s = 0; s < me; ++s) from += count(r, s);
          for (std::size_t i = 0; i < receive[r]; ++i) expected.push_back(value<T>(r, from + i, n));
        }
        const Vector<T> input = data_of<T>(me, sum_of(send), n);
        Vector<T> output(sum_of(receive));
        comm.all_to_all_v(std::span<const T>(input), std::span<const std::size_t>(send),
                          std::span<T>(output), std::span<const std::size_t>(receive))
            .wait();
        require_same_bits(output, expected, "all_to_all_v of " + std::to_string(input.size()));
      }
    }
  }
}

template <class T, class Comm>
void check_all_gather(Comm& comm) {
  const std::size_t k = world_size(comm), me = own_rank(comm);
  for (const std::size_t n : sizes()) {
    const std::string what = "all_gather of " + std::to_string(n);
    Vector<T> expected;
    for (std::size_t r = 0; r < k; ++r) {
      const Vector<T> part = data_of<T>(r, n, n);
      expected.insert(expected.end(), part.begin(), part.end());
    }
    const Vector<T> input = data_of<T>(me, n, n);
    Vector<T> output(n * k), in_place(n * k);
    comm.all_gather(std::span<const T>(input), std::span<T>(output)).wait();
    require_same_bits(output, expected, what);
    const std::span<T> slice = std::span<T>(in_place).subspan(me * n, n);
    std::copy(input.begin(), input.end(), slice.begin());
    comm.all_gather(std::span<const T>(slice), std::span<T>(in_place)).wait();
    require_same_bits(in_place, expected, what + " in place");
  }
}

template <class T, class Comm>
void check_all_to_all(Comm& comm) {
  const std::size_t k = world_size(comm), me = own_rank(comm);
  for (const std::size_t n : sizes()) {
    Vector<T> expected;
    for (std::size_t r = 0; r < k; ++r) {
      for (std::size_t i = 0; i < n; ++i) expected.push_back(value<T>(r, me * n + i, n));
    }
    const Vector<T> input = data_of<T>(me, n * k, n);
    Vector<T> output(n * k);
    comm.all_to_all(std::span<const T>(input), std::span<T>(output)).wait();
    require_same_bits(output, expected, "all_to_all of " + std::to_string(n));
  }
}

template <class T, class Comm>
void check_broadcast(Comm& comm) {
  for (const std::size_t n : sizes()) {
    for (int root = 0; root < comm.size(); ++root) {
      Vector<T> data = data_of<T>(own_rank(comm), n, n);
      comm.broadcast(std::span<T>(data), root).wait();
      require_same_bits(data, data_of<T>(static_cast<std::size_t>(root), n, n),
                        "broadcast of " + std::to_string(n));
    }
  }
}

template <class Comm>
void check_exchange_and_barrier(Comm& comm) {
  const std::size_t k = world_size(comm), me = own_rank(comm);
  for (const std::size_t n : {0U, 1U, 8U, 1000U}) {
    const auto byte = [&](std::size_t r, std::size_t i) {
      return static_cast<std::byte>((7 * r + 3 * i + n) & 0xffU);
    };
    std::vector<std::byte> mine(n), all(n * k);
    for (std::size_t i = 0; i < n; ++i) mine[i] = byte(me, i);
    comm.exchange(std::span<const std::byte>(mine), std::span<std::byte>(all)).wait();
    bool right = true;
    for (std::size_t i = 0; i < n * k; ++i) right = right && all[i] == byte(i / n, i % n);
    require(right, "exchange of " + std::to_string(n) + " bytes");
    comm.barrier().wait();
  }
}

/// Several operations in flight, of several kinds, waited for in an order of the rank's own.
template <class T, class Comm>
void check_in_flight(Comm& comm) {
  const std::size_t k = world_size(comm), me = own_rank(comm), n = 1001;
  using clock = std::chrono::steady_clock;
  for (std::size_t round = 0; round < 6; ++round) {
    Vector<T> sum = data_of<T>(me, n, 1), input = data_of<T>(me, n * k, 2), part(n);
    Vector<T> mine = data_of<T>(me, n, 3), gathered(n * k), last = data_of<T>(me, 3, 4);
    auto a = comm.all_reduce(std::span<T>(sum), zero::ReduceOp::sum);
    auto b =
        comm.reduce_scatter(std::span<const T>(input), std::span<T>(part), zero::ReduceOp::sum);
    auto c = comm.all_gather(std::span<const T>(mine), std::span<T>(gathered));
    auto d = comm.barrier();
    auto e = comm.all_reduce(std::span<T>(last), zero::ReduceOp::max);
    const auto wait = [&](std::size_t which) {
      switch (which % 5) {
        case 0: return a.wait();
        case 1: return b.wait(std::chrono::seconds(30));
        case 2: return c.wait();
        case 3: return d.wait();
        default: break;
      }
      const clock::time_point end = clock::now() + std::chrono::seconds(30);
      while (!e.done()) require(clock::now() < end, "done() does not get done");
      e.wait();  // of a finished request: nothing
    };
    for (std::size_t i = 0; i < 5; ++i) wait((me + 1) * i + round + (round % 2) * me);
    a.wait(), b.wait(), c.wait(), d.wait(), e.wait();
    require(a.done(), "a finished request is done");

    require_same_bits(sum, reduced<T>(k, n, 1, zero::ReduceOp::sum), "in flight: all_reduce");
    const Vector<T> whole = reduced<T>(k, n * k, 2, zero::ReduceOp::sum);
    require_same_bits(std::span<const T>(part), std::span<const T>(whole).subspan(me * n, n),
                      "in flight: reduce_scatter");
    for (std::size_t r = 0; r < k; ++r) {
      const Vector<T> expected = data_of<T>(r, n, 3);
      require_same_bits(std::span<const T>(gathered).subspan(r * n, n),
                        std::span<const T>(expected), "in flight: all_gather");
    }
    require_same_bits(last, reduced<T>(k, 3, 4, zero::ReduceOp::max), "in flight: max");
  }
}

/// That `call` throws a `UsageError` which mentions all of `words`.
template <class Call>
void require_usage_error(Call call, std::initializer_list<const char*> words) {
  std::string text;
  try {
    (void)call();
  } catch (const zero::UsageError& error) {
    text = error.what();
  }
  require(!text.empty(), std::string("no UsageError that mentions ") + *words.begin());
  for (const char* word : words) {
    require(text.find(word) != std::string::npos,
            std::string("\"") + word + "\" is not in: " + text);
  }
}

/// Wrong arguments throw before anything is started; what was right goes on afterwards.
template <class T, class Comm>
void check_usage_errors(Comm& comm) {
  const std::size_t k = world_size(comm), me = own_rank(comm), n = 4;
  const std::string rank = "rank " + std::to_string(me);
  using zero::ReduceOp;
  Vector<T> small(n, stored<T>(1)), large(n * k + 1, stored<T>(1)), other(n * k, stored<T>(1));
  const std::span<T> slice(small);
  const std::span<const T> const_slice(small), odd(large), whole(large.data(), n * k);
  const std::vector<std::size_t> counts(k, n), too_many(k + 1, n), too_large(k, n + 1);
  const std::span<const std::size_t> good(counts), long_counts(too_many), large_counts(too_large);
  const std::span<T> null(static_cast<T*>(nullptr), n * 0);

  require_usage_error([&] { return comm.reduce_scatter(odd, slice, ReduceOp::sum); },
                      {"reduce_scatter", rank.c_str(), "4"});
  require_usage_error([&] { return comm.all_gather(const_slice, std::span<T>(large)); },
                      {"all_gather", rank.c_str(), "4"});
  require_usage_error([&] { return comm.all_to_all(odd, std::span<T>(other)); },
                      {"all_to_all", rank.c_str()});
  require_usage_error(
      [&] { return comm.reduce_scatter_v(whole, slice, long_counts, ReduceOp::sum); },
      {"reduce_scatter_v", "counts", rank.c_str()});
  require_usage_error(
      [&] { return comm.reduce_scatter_v(whole, slice, large_counts, ReduceOp::sum); },
      {"reduce_scatter_v", "counts", rank.c_str()});
  require_usage_error(
      [&] { return comm.reduce_scatter_v(whole, slice.first(n - 1), good, ReduceOp::sum); },
      {"reduce_scatter_v", "counts", rank.c_str()});
  require_usage_error([&] { return comm.all_gather_v(const_slice, std::span<T>(large), good); },
                      {"all_gather_v", "counts", rank.c_str()});
  require_usage_error(
      [&] { return comm.all_to_all_v(whole, long_counts, std::span<T>(other), good); },
      {"all_to_all_v", "send_counts"});
  // What a rank sends to itself it receives: nobody else could see the difference.
  std::vector<std::size_t> less(good.begin(), good.end());
  less[me] -= 1;
  require_usage_error(
      [&] {
        return comm.all_to_all_v(whole, good, std::span<T>(other).first(other.size() - 1), less);
      },
      {"all_to_all_v", "receive_counts", rank.c_str()});
  require_usage_error([&] { return comm.broadcast(slice, -1); }, {"broadcast", "root", "-1"});
  require_usage_error([&] { return comm.broadcast(slice, comm.size()); },
                      {"broadcast", "root", rank.c_str()});
  std::vector<std::byte> bytes(2), all_bytes(2 * k + 1);
  require_usage_error(
      [&] { return comm.exchange(std::span<const std::byte>(bytes), std::span(all_bytes)); },
      {"exchange", rank.c_str()});
  require_usage_error(
      [&] { return comm.all_reduce(std::span<T>(static_cast<T*>(nullptr), n), ReduceOp::sum); },
      {"all_reduce", "null"});

  // Aliasing: exact or none.
  const std::span<T> shifted(large.data() + me * n + 1, n);
  require_usage_error([&] { return comm.reduce_scatter(whole, shifted, ReduceOp::sum); },
                      {"reduce_scatter", "overlap"});
  require_usage_error([&] { return comm.reduce_scatter_v(whole, shifted, good, ReduceOp::sum); },
                      {"reduce_scatter_v", "overlap"});
  require_usage_error(
      [&] {
        return comm.all_gather(std::span<const T>(shifted), std::span<T>(large).first(n * k));
      },
      {"all_gather", "overlap"});
  require_usage_error(
      [&] {
        return comm.all_gather_v(std::span<const T>(shifted), std::span<T>(large).first(n * k),
                                 good);
      },
      {"all_gather_v", "overlap"});
  require_usage_error([&] { return comm.all_to_all(whole, std::span<T>(large).first(n * k)); },
                      {"all_to_all", "disjoint"});
  require_usage_error(
      [&] { return comm.all_to_all_v(whole, good, std::span<T>(large).first(n * k), good); },
      {"all_to_all_v", "disjoint"});

  comm.all_reduce(null, ReduceOp::sum).wait();  // nothing is null, and right
  Vector<T> after(3, stored<T>(1));
  comm.all_reduce(std::span<T>(after), ReduceOp::sum).wait();
  require(loaded(after[2]) == static_cast<zero::arithmetic_t<T>>(k),
          "operations after usage errors");
}

/// Ranks read each other's memory in meetings, with other operations under way.
template <class Comm>
void check_meetings(Comm& comm) {
  const std::size_t k = world_size(comm), me = own_rank(comm), n = 3000;
  for (std::size_t round = 0; round < 20; ++round) {
    Vector<float> mine = data_of<float>(me, n, round), sum(n), flag{float(me)};
    auto meeting = comm.meet("conformance", mine.data());
    auto other = comm.all_reduce(std::span<float>(flag), zero::ReduceOp::max);
    if (round % 3 == 1) other.wait();
    const std::span<const void* const> peers = meeting.peers(std::chrono::seconds(30));
    require(peers.size() == k && peers[me] == mine.data(), "what peers() returns");
    require(meeting.peers().data() == peers.data(), "peers() twice");
    for (std::size_t r = 0; r < k; ++r) {
      const auto* x = static_cast<const float*>(peers[r]);
      for (std::size_t i = 0; i < n; ++i) sum[i] = r == 0 ? x[i] : sum[i] + x[i];
    }
    if (round % 3 == 2) other.wait();  // between peers() and leave()
    meeting.leave();
    meeting.leave();
    if (round % 2 == 0) meeting.wait();
    meeting.wait();
    std::fill(mine.begin(), mine.end(), -1.0F);
    require_same_bits(sum, reduced<float>(k, n, round, zero::ReduceOp::sum), "meeting");

    auto hurried = comm.meet("nothing to see", nullptr);
    if (round % 2 == me % 2) hurried.leave();  // perhaps before the others have come
    hurried.wait();
    other.wait();
    require(flag[0] == static_cast<float>(k - 1), "an operation beside a meeting");
  }
}

template <class Comm>
void check_many_in_flight(Comm& comm) {
  const double sum = static_cast<double>(comm.size() * (comm.size() + 1)) / 2;
  for (int round = 0; round < 3; ++round) {
    constexpr std::size_t many = 200;
    Vector<double> data(many, comm.rank() + 1.0);
    std::vector<decltype(comm.all_reduce(std::span<double>(), zero::ReduceOp::sum))> requests;
    for (double& x : data) {
      requests.push_back(comm.all_reduce(std::span<double>(&x, 1), zero::ReduceOp::sum));
    }
    for (std::size_t i = many; i-- > 0;) requests[i].wait();
    for (const double x : data) require(x == sum, "one of 200 sums in flight");
  }
}

/// 0.2 truncates to 0: adding in the stored type would lose it.
template <class Comm>
void check_arithmetic_type(Comm& comm) {
  Vector<Half> data(3000, Half{comm.rank() == 0 ? 0.25F : 0.2F});
  const float expected =
      Half(zero::element_traits<Half>::store(0.25 + 0.2F * static_cast<double>(comm.size() - 1)))
          .bits;
  comm.all_reduce(std::span<Half>(data), zero::ReduceOp::sum).wait();
  for (const Half x : data) require(x.bits == expected, "a sum in the arithmetic type");
}

/// Minimum and maximum keep a NaN, wherever it is.
template <class Comm>
void check_nan(Comm& comm) {
  for (const zero::ReduceOp op : {zero::ReduceOp::min, zero::ReduceOp::max}) {
    for (int from = 0; from < comm.size(); ++from) {
      Vector<float> data{comm.rank() == from ? std::numeric_limits<float>::quiet_NaN()
                                             : static_cast<float>(comm.rank())};
      comm.all_reduce(std::span<float>(data), op).wait();
      require(data[0] != data[0], "a NaN was lost");
    }
  }
}

/// Every vector tail, unaligned.
template <class Comm>
void check_unaligned(Comm& comm) {
  const std::size_t k = world_size(comm), me = own_rank(comm);
  for (std::size_t n = 1; n < 140; ++n) {
    Vector<float> data = data_of<float>(me, n + 3, n);
    Vector<float> expected = reduced<float>(k, n + 3, n, zero::ReduceOp::sum);
    const std::size_t skip = n % 4;
    comm.all_reduce(std::span<float>(data).subspan(skip, n), zero::ReduceOp::sum).wait();
    for (std::size_t i = 0; i < n + 3; ++i) {
      if (i < skip || i >= skip + n) expected[i] = value<float>(me, i, n);
    }
    require_same_bits(data, expected, "unaligned sum");
  }
}

/// Even and odd ranks apart, each in reverse.
template <class Comm>
void check_split(Comm& comm) {
  const int me = comm.rank();
  {
    auto part = comm.split(me % 2, -me);
    const int members = (comm.size() + 1 - me % 2) / 2;
    require(part.size() == members, "the size of a part");
    require(part.rank() == members - 1 - me / 2, "the rank in a part");
    std::vector<int> ranks(world_size(part));
    part.exchange(std::as_bytes(std::span(&me, 1)), std::as_writable_bytes(std::span(ranks)))
        .wait();
    for (const int rank : ranks) require(rank % 2 == me % 2, "who is in a part");
    check_all_reduce<float>(part);
    comm.barrier().wait();  // the whole goes on beside its parts
    check_in_flight<float>(part);
    if (me % 2 == 0) part.split(0, 0).barrier().wait();  // of which the other part knows nothing
    comm.barrier().wait();
  }
  auto part_of_part = [&] {
    auto gone = comm.split(0, 0);
    return gone.split(me % 2, me);
  }();
  check_all_reduce<float>(part_of_part);
  auto same = comm.split(0, 0);
  require(same.size() == comm.size() && same.rank() == me, "equal keys go by rank");
  require_usage_error([&] { return comm.split(-1, 0); }, {"split", "color", "-1"});
  same.barrier().wait();
}

/// `f(comm)` for each of two communicators at once: on threads of their own where they may be
/// called so, else one after the other. Throws what one of them threw.
template <class Comm, class F>
void on_both(Comm& first, Comm& second, F f) {
  if (!first.concurrent()) {
    f(first);
    f(second);
    return;
  }
  std::exception_ptr failures[2];
  const auto run = [&](Comm& comm, std::exception_ptr& failure) {
    try {
      f(comm);
    } catch (...) {
      failure = std::current_exception();
    }
  };
  std::thread other([&] { run(second, failures[1]); });
  run(first, failures[0]);
  other.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

/// Two duplicates, each with operations that the other knows nothing of.
template <class Comm>
void check_duplicates(Comm& comm) {
  const std::size_t k = world_size(comm), me = own_rank(comm), n = 3001;
  auto first = comm.duplicate();
  auto second = comm.duplicate();
  for (const auto* each : {&first, &second}) {
    require(each->rank() == comm.rank() && each->size() == comm.size(), "the ranks of a duplicate");
    require(each->concurrent() == comm.concurrent(), "a duplicate's concurrent()");
  }

  // Even ranks start with the one, odd ones with the other.
  Vector<float> sums[] = {data_of<float>(me, n, 1), data_of<float>(me, n, 2)};
  Vector<float> own = data_of<float>(me, n, 3);
  const auto start = [&](std::size_t which) {
    return (which == 0 ? first : second).all_reduce(std::span<float>(sums[which]));
  };
  auto begun = start(me % 2);
  auto original = comm.all_reduce(std::span<float>(own));
  auto begun_last = start(1 - me % 2);
  auto& of_first = me % 2 == 0 ? begun : begun_last;
  auto& of_second = me % 2 == 0 ? begun_last : begun;
  on_both(first, second, [&](Comm& each) {
    (&each == &first ? of_first : of_second).wait();
    check_in_flight<float>(each);
    if (&each == &first) check_all_gather<float>(each);
    check_reduce_scatter<float>(each);
  });
  original.wait();
  const auto op = zero::ReduceOp::sum;
  require_same_bits(sums[0], reduced<float>(k, n, 1, op), "all_reduce on a duplicate");
  require_same_bits(sums[1], reduced<float>(k, n, 2, op), "all_reduce on another duplicate");
  require_same_bits(own, reduced<float>(k, n, 3, op), "all_reduce beside duplicates");

  // One fails, alone.
  if (me == k - 1) second.abort("one of two");
  std::string text;
  try {
    second.barrier().wait();
  } catch (const zero::CommunicatorError& error) {
    text = error.what();
  }
  // Where no message can follow the operation, peers learn that there was an abort, not why.
  const bool told = text.find("one of two") != std::string::npos;
  const bool must_be = me == k - 1 || Comm::memory_space == zero::MemorySpace::host;
  require(told || (!must_be && !text.empty()), "an abort of a duplicate: " + text);
  require(text.find("part") == std::string::npos, "a duplicate is no part: " + text);
  check_all_reduce<float>(first);
  auto of_duplicate = first.duplicate();
  comm.barrier().wait();
  check_all_reduce<float>(of_duplicate);
}

/// What needs no second element type; all ranks call it.
template <class Comm>
void check_once(Comm& comm) {
  check_many_in_flight(comm);
  check_arithmetic_type(comm);
  check_nan(comm);
  check_unaligned(comm);
  if constexpr (requires { comm.split(0, 0); }) check_split(comm);
  if constexpr (zero::Duplicable<Comm>) check_duplicates(comm);
}

/// Everything for one element type, on one rank; all ranks call it.
template <class T, class Comm>
void check_communicator(Comm& comm) {
  static_assert(zero::Communicator<Comm, T>);
  require(comm.rank() >= 0 && comm.rank() < comm.size(), "rank() < size()");
  check_all_reduce<T>(comm);
  check_reduce_scatter<T>(comm);
  check_uneven<T>(comm);
  check_all_gather<T>(comm);
  check_all_to_all<T>(comm);
  check_broadcast<T>(comm);
  check_exchange_and_barrier(comm);
  check_in_flight<T>(comm);
  check_usage_errors<T>(comm);
  if constexpr (zero::SharedMemoryCommunicator<Comm>) check_meetings(comm);
  [[maybe_unused]] auto scope = comm.batch();
  comm.barrier().wait();
}

}  // namespace zero_test
