// SPDX-License-Identifier: Apache-2.0
#include "processes.hpp"

#include <cstdlib>

#include "input_error.hpp"

#if BERT_MPI
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <set>
#include <span>
#include <zero/comm/mpi.hpp>

#include "random.hpp"
#include "training.hpp"
#endif

namespace bert {

int launched_processes() {
  // Of Open MPI; of MPICH, its kin, and Slurm's srun.
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    if (const char* text = std::getenv(name)) return std::atoi(text);
  }
  return 0;
}

#if BERT_MPI

struct Processes::Mpi {
  Mpi() {
    // Stages 2 and 3 communicate from several threads; where MPI can't, they say so.
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  }
  Mpi(const Mpi&) = delete;
  Mpi& operator=(const Mpi&) = delete;
  ~Mpi() {
    comm.reset();
    MPI_Finalize();
  }

  std::optional<zero::MpiCommunicator> comm{};
  std::vector<int> here{};
};

bool Processes::compiled() { return true; }

void Processes::begin() {
  if (!begun()) mpi_ = std::make_unique<Mpi>();
}

int Processes::rank() const {
  int rank = 0;
  if (begun()) MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

int Processes::size() const {
  int size = 1;
  if (begun()) MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

void Processes::connect(std::chrono::seconds timeout) {
  if (!begun()) return;
  mpi_->comm.emplace(MPI_COMM_WORLD, zero::MpiOptions{.timeout = timeout});
  MPI_Comm host = MPI_COMM_NULL;  // all have come: what MPI does without a timeout ends
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  int size = 0;
  MPI_Comm_size(host, &size);
  mpi_->here.resize(static_cast<std::size_t>(size));
  const int mine = rank();
  MPI_Allgather(&mine, 1, MPI_INT, mpi_->here.data(), 1, MPI_INT, host);
  MPI_Comm_free(&host);
}

zero::MpiCommunicator& Processes::communicator() { return mpi_->comm.value(); }

const std::vector<int>& Processes::ranks_of_host() const { return mpi_->here; }

void Processes::agree(const std::string& refusal) {
  if (!begun()) {
    if (!refusal.empty()) throw InputError(refusal);
    return;
  }
  using Words = std::array<char, 1024>;
  Words mine{};
  refusal.copy(mine.data(), mine.size() - 1);
  std::vector<Words> all(static_cast<std::size_t>(size()));
  communicator()
      .exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)))
      .wait();
  for (const Words& words : all) {
    if (words[0] != 0) throw InputError(words.data());
  }
}

void Processes::require_same(int argc, const char* const* argv) {
  if (!begun()) return;
  std::uint64_t mine = 0;
  for (int i = 1; i < argc; ++i) {
    for (const char* c = argv[i]; *c != '\0'; ++c) mine = mix(mine, static_cast<unsigned char>(*c));
    mine = mix(mine, 256);
  }
  std::vector<std::uint64_t> all(static_cast<std::size_t>(size()));
  communicator()
      .exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)))
      .wait();
  const auto other = std::find_if(all.begin(), all.end(), [&](auto of) { return of != all[0]; });
  if (other == all.end()) return;
  throw InputError("rank " + std::to_string(other - all.begin()) +
                   " was started with other arguments than rank 0; start all with the same");
}

void Processes::gather(std::vector<Recorder>& recorders) {
  using TimePoint = Recorder::TimePoint;
  struct Summary {
    std::array<char, 64> host;
    std::size_t spans, dropped;
    TimePoint now;
  };
  struct Sent {
    std::array<char, 16> name;
    TimePoint begin, end;
  };
  zero::MpiCommunicator& comm = communicator();
  const auto exchange = [&](const auto& mine, auto& all) {
    comm.exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))).wait();
  };
  const std::span<const Recorder::Span> spans = recorders.front().spans();
  comm.barrier().wait();
  const std::array mine{Summary{this_process().host, spans.size(), recorders.front().dropped(),
                                std::chrono::steady_clock::now()}};
  std::vector<Summary> summaries(static_cast<std::size_t>(size()));
  exchange(mine, summaries);

  std::vector<Recorder> all;
  std::size_t most = 0;
  for (const Summary& of_rank : summaries) {
    all.emplace_back(rank() == 0 ? of_rank.spans : 0).drop(of_rank.dropped);
    most = std::max(most, of_rank.spans);
  }
  // In pieces, since what comes to rank 0 comes to all.
  constexpr std::size_t piece = 4096;
  std::vector<Sent> sent(piece), received(piece * all.size());
  static std::set<std::string> names;  // recorders keep but pointers
  for (std::size_t first = 0; first < most; first += piece) {
    for (std::size_t i = first; i < std::min(spans.size(), first + piece); ++i) {
      sent[i - first] = {{}, spans[i].begin, spans[i].end};
      std::strncpy(sent[i - first].name.data(), spans[i].name, sent[0].name.size() - 1);
    }
    exchange(sent, received);
    if (rank() != 0) continue;
    for (std::size_t r = 0; r < all.size(); ++r) {
      // On one host all processes read the same clock.
      const auto ahead = summaries[r].host == summaries[0].host
                             ? TimePoint::duration{}
                             : summaries[r].now - summaries[0].now;
      for (std::size_t i = first; i < std::min(summaries[r].spans, first + piece); ++i) {
        const Sent& span = received[r * piece + i - first];
        all[r].add(names.insert(span.name.data()).first->c_str(), span.begin - ahead,
                   span.end - ahead);
      }
    }
  }
  recorders = std::move(all);
}

void Processes::abort(const char* why) noexcept {
  if (begun() && mpi_->comm) mpi_->comm->abort(why);
}

#else

struct Processes::Mpi {};

bool Processes::compiled() { return false; }

void Processes::begin() {
  throw InputError(
      "--communicator mpi: bert was built without MPI; install one (Debian: libopenmpi-dev and "
      "openmpi-bin), configure anew and build again");
}

int Processes::rank() const { return 0; }
int Processes::size() const { return 1; }
void Processes::connect(std::chrono::seconds) {}
zero::MpiCommunicator& Processes::communicator() { throw InputError("there is no MPI"); }
const std::vector<int>& Processes::ranks_of_host() const { throw InputError("there is no MPI"); }
void Processes::agree(const std::string& refusal) {
  if (!refusal.empty()) throw InputError(refusal);
}
void Processes::require_same(int, const char* const*) {}
void Processes::gather(std::vector<Recorder>&) {}
void Processes::abort(const char*) noexcept {}

#endif

Processes::Processes() = default;
Processes::~Processes() = default;

}  // namespace bert
