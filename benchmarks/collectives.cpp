// SPDX-License-Identifier: Apache-2.0
// In-process collectives between two threads against two threads that move the same bytes.
#include <cstddef>
#include <span>
#include <vector>
#include <zero/comm/in_process.hpp>
#include <zero/memory.hpp>

#include "model_memory.hpp"
#include "reference_loops.hpp"
#include "table.hpp"
#include "team.hpp"

namespace bench {
namespace {

constexpr std::size_t world = 2;
constexpr std::size_t whole = (std::size_t{256} << 20) / sizeof(float);
constexpr std::size_t part = whole / world;

/// What one rank's collective reads and writes.
struct Buffers {
  zero::HostArray<float> large{whole};
  zero::HostArray<float> small{part};
};

struct Ranks {
  Team team{world};
  zero::InProcessWorld shared{world};
  std::vector<zero::InProcessCommunicator> comms{};
  std::vector<Buffers> buffers{world};

  Ranks() {
    for (int r = 0; r < static_cast<int>(world); ++r) comms.push_back(shared.communicator(r));
    for (Buffers& b : buffers) {
      fill(b.large, 1e-3F);
      fill(b.small, 1e-3F);
    }
  }
};

/// `loop(rank)` is one rank's reference, in two forms of which the faster one counts.
template <class Collective, class Loop, class StreamingLoop>
void measure(Sheet& sheet, double bytes, Ranks& ranks, const Collective& collective,
             const Loop& loop, const StreamingLoop& streaming_loop) {
  const auto together = [&](const auto& body) {
    return [&] { ranks.team.run([&](int rank) { body(static_cast<std::size_t>(rank)); }); };
  };
  const Pairs trial = run_pairs(together(streaming_loop), together(loop), 5);
  const bool streams = trial.time_ratio().median < 1;
  constexpr int count = 21;
  const Pairs pairs = streams ? run_pairs(together(collective), together(streaming_loop), count)
                              : run_pairs(together(collective), together(loop), count);
  sheet.ratio("", pairs, at_least(.80),
              "256 MiB, " + rate(bytes, pairs.subject) + ", loop " +
                  (streams ? "(streaming) " : "") + rate(bytes, pairs.reference));
}

const Row scatter("reduce_scatter", [](Sheet& sheet) {
  Ranks ranks;
  const auto source = [&](std::size_t of, std::size_t rank) {
    return ranks.buffers[of].large.data() + rank * part;
  };
  measure(
      sheet, 3.0 * sizeof(float) * whole, ranks,
      [&](std::size_t rank) {
        Buffers& own = ranks.buffers[rank];
        ranks.comms[rank]
            .reduce_scatter(std::span<const float>(own.large.span()), own.small.span())
            .wait();
      },
      [&](std::size_t rank) {
        sum(ranks.buffers[rank].small.data(), source(0, rank), source(1, rank), part);
      },
      [&](std::size_t rank) {
        streaming_sum(ranks.buffers[rank].small.data(), source(0, rank), source(1, rank), part);
      });
});

const Row gather("all_gather", [](Sheet& sheet) {
  Ranks ranks;
  const auto by_loop = [&](auto copy_loop) {
    return [&ranks, copy_loop](std::size_t rank) {
      for (std::size_t of = 0; of < world; ++of) {
        copy_loop(ranks.buffers[rank].large.data() + of * part, ranks.buffers[of].small.data(),
                  part);
      }
    };
  };
  measure(
      sheet, 2.0 * sizeof(float) * whole * world, ranks,
      [&](std::size_t rank) {
        Buffers& own = ranks.buffers[rank];
        ranks.comms[rank]
            .all_gather(std::span<const float>(own.small.span()), own.large.span())
            .wait();
      },
      by_loop(copy), by_loop(streaming_copy));
});

}  // namespace
}  // namespace bench
