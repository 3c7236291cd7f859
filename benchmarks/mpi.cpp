// SPDX-License-Identifier: Apache-2.0
// zero_mpi_bench, under mpirun: ranks that are processes of one host. Every rank runs every row;
// rank 0 times and prints.
#include <mpi.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>
#include <zero/comm/mpi.hpp>
#include <zero/zero.hpp>

#include "arena_model.hpp"
#include "bert_shapes.hpp"
#include "harness.hpp"
#include "model_memory.hpp"
#include "peers.hpp"
#include "table.hpp"
#include "team.hpp"

namespace bench {
namespace {

int own_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}
int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// As MPI_Barrier, but a rank that waits long leaves the processors to the others.
void meet() {
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Ibarrier(MPI_COMM_WORLD, &request);
  const auto begin = std::chrono::steady_clock::now();
  for (int over = 0;;) {
    MPI_Test(&request, &over, MPI_STATUS_IGNORE);
    if (over != 0) break;
    if (std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(20)) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
}

/// All ranks together, until the last one is done.
template <class F>
auto on_all(F f) {
  return [f] {
    f();
    MPI_Barrier(MPI_COMM_WORLD);
  };
}

/// As `run_pairs`, but nobody is asleep when the clock starts.
template <class Subject, class Reference>
Pairs pairs_of_ranks(const Subject& subject, const Reference& reference, int count) {
  Pairs pairs;
  const auto timed = [](const auto& what) {
    meet();
    MPI_Barrier(MPI_COMM_WORLD);
    return seconds(what);
  };
  timed(subject), timed(reference);
  for (int i = 0; i < count; ++i) {
    if (i % 2 == 0) pairs.subject.push_back(timed(subject));
    pairs.reference.push_back(timed(reference));
    if (i % 2 == 1) pairs.subject.push_back(timed(subject));
  }
  return pairs;
}

constexpr std::size_t large = 100'000'000 / sizeof(float);

std::string with_ranks() { return "100 MB, K=" + std::to_string(world_size()) + ": "; }

const Row gather("mpi/all_gather", [](Sheet& sheet) {
  zero::MpiCommunicator comm(MPI_COMM_WORLD);
  const auto k = static_cast<std::size_t>(world_size()), me = static_cast<std::size_t>(own_rank());
  const std::size_t part = large / k;
  zero::HostArray<float> ours(part * k), theirs(part * k);
  fill(ours, 1e-3F), fill(theirs, 1e-3F);
  const auto count = static_cast<int>(part);
  const auto bare = on_all([&] {
    MPI_Allgather(MPI_IN_PLACE, 0, MPI_FLOAT, theirs.data(), count, MPI_FLOAT, MPI_COMM_WORLD);
  });
  const auto measure = [&](const char* name, zero::HostArray<float>& all,
                           std::optional<Bound> bound, const char* where) {
    const std::span<float> output = all.span();
    const std::span<const float> mine = output.subspan(me * part, part);
    const Pairs pairs =
        pairs_of_ranks(on_all([&] { comm.all_gather(mine, output).wait(); }), bare, 21);
    sheet.ratio(name, pairs, bound,
                with_ranks() + where + text(1e3 * spread_of(pairs.subject).median, "ms") +
                    ", MPI_Allgather " + text(1e3 * spread_of(pairs.reference).median, "ms"));
  };
  measure("", ours, at_most(1.05), "");
  if (const auto memory = comm.shared_memory()) {
    zero::HostArray<float> shared(part * k, memory.get());
    fill(shared, 1e-3F);
    measure("shared", shared, {}, "in shared_memory() ");
  }
});

const Row scatter("mpi/reduce_scatter", [](Sheet& sheet) {
  zero::MpiCommunicator comm(MPI_COMM_WORLD);
  const auto k = static_cast<std::size_t>(world_size());
  const std::size_t part = large / k;
  zero::HostArray<float> input(part * k), output(part);
  fill(input, 1e-3F);
  const auto count = static_cast<int>(part);
  const Pairs pairs = pairs_of_ranks(
      on_all(
          [&] { comm.reduce_scatter(std::span<const float>(input.span()), output.span()).wait(); }),
      on_all([&] {
        MPI_Reduce_scatter_block(input.data(), output.data(), count, MPI_FLOAT, MPI_SUM,
                                 MPI_COMM_WORLD);
      }),
      11);
  sheet.ratio("", pairs, at_least(2),
              with_ranks() + text(1e3 * spread_of(pairs.subject).median, "ms") +
                  ", MPI_Reduce_scatter_block " +
                  text(1e3 * spread_of(pairs.reference).median, "ms"));
});

zero::Settings unchecked() {
  zero::Settings settings;
  settings.check_values = false;  // they are equal, and reading them all takes a while
  return settings;
}

/// The in-process ranks are threads of rank 0.
template <class Model, class View>
class InProcess {
 public:
  explicit InProcess(const std::vector<Shape>& shapes, View view) {
    team_.run([&](int r) {
      Model& model = models_[static_cast<std::size_t>(r)].emplace(shapes);
      optimizers_[static_cast<std::size_t>(r)].emplace(zero::Adam{}, model.store(),
                                                       world_.communicator(r), view, unchecked());
      if constexpr (requires { model.fill(); }) model.fill();
    });
  }
  void step() {
    team_.run([&](int r) { optimizers_[static_cast<std::size_t>(r)]->step(); });
  }

 private:
  using Store = std::remove_reference_t<decltype(std::declval<Model&>().store())>;
  using Optimizer = zero::ZeroSharded<zero::Adam, Store&, zero::InProcessCommunicator,
                                      zero::ContiguousPartition, View>;
  zero::InProcessWorld world_{2};
  std::array<std::optional<Model>, 2> models_{};
  std::array<std::optional<Optimizer>, 2> optimizers_{};
  Team team_{2};
};

template <class Model, class View>
Pairs steps(View view) {
  const std::vector<Shape> shapes = bert_large_shapes();
  zero::MpiCommunicator comm(MPI_COMM_WORLD);
  Model model(shapes);
  zero::ZeroSharded optimizer{zero::Adam{}, model.store(), comm, view, unchecked()};
  if constexpr (requires { model.fill(); }) model.fill();
  std::optional<InProcess<Model, View>> threads;
  if (own_rank() == 0) threads.emplace(shapes, view);
  meet();
  return pairs_of_ranks(
      on_all([&] { optimizer.step(); }),
      [&] {
        if (threads) threads->step();
      },
      11);
}

std::string against_in_process(const Pairs& pairs) {
  return "BERT-large, K=2: " + text(1e3 * spread_of(pairs.subject).median, "ms") + ", in-process " +
         text(1e3 * spread_of(pairs.reference).median, "ms");
}

const Row step("mpi/step", [](Sheet& sheet) {
  if (world_size() != 2) return;
  using namespace zero::literals;
  const Pairs both = steps<ArenaModel>(zero::ParamAndGradView{25_MiB});
  sheet.ratio("", both, at_most(1.3), "ParamAndGradView, " + against_in_process(both));
  const Pairs plain = steps<ModelMemory>(zero::NoView{25_MiB});
  sheet.ratio("no_view", plain, {}, "NoView, " + against_in_process(plain));
  std::optional<PeerTimes> torch;
  if (own_rank() == 0) torch = torch_zero(bert_large_shapes());
  meet();
  if (!torch) return;
  if (torch->seconds.empty()) {
    sheet.note("torch", torch->remark);
    return;
  }
  std::vector<double> milliseconds;
  for (const double s : torch->seconds) milliseconds.push_back(1e3 * s);
  sheet.value("torch", "ms", spread_of(milliseconds), {}, torch->remark);
});

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int rank = bench::own_rank(), size = bench::world_size();
  int code =
      bench::run(argc, argv, ZERO_BENCH_JSON_PREFIX + std::to_string(size) + ".json", rank == 0);
  MPI_Bcast(&code, 1, MPI_INT, 0, MPI_COMM_WORLD);  // what rank 0 measured
  MPI_Finalize();
  return code;
}
