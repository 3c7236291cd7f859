// SPDX-License-Identifier: Apache-2.0
/// @file
/// How ranks step that shard gradients, and values: traffic goes on while they compute.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "zero/bucket_view.hpp"
#include "zero/communicator.hpp"
#include "zero/detail/agreement.hpp"
#include "zero/detail/bucket_traffic.hpp"
#include "zero/detail/courier.hpp"
#include "zero/detail/join_scope.hpp"
#include "zero/detail/lane.hpp"
#include "zero/detail/lane_room.hpp"
#include "zero/detail/launch_order.hpp"
#include "zero/detail/step_agreement.hpp"
#include "zero/detail/unit_residence.hpp"
#include "zero/detail/units.hpp"
#include "zero/error.hpp"
#include "zero/layout.hpp"
#include "zero/memory.hpp"
#include "zero/observer.hpp"
#include "zero/settings.hpp"
#include "zero/stage.hpp"
#include "zero/traffic_report.hpp"

namespace zero::detail {

template <class Lanes, class State, class Comm>
struct OverlappedTrafficOf;
template <class... Lane, class State, class Comm>
struct OverlappedTrafficOf<std::tuple<Lane...>, State, Comm> {
  using type = std::tuple<std::optional<
      BucketTraffic<Lane, Comm, typename State::Partition, typename State::Stage>>...>;
};

/// Two duplicates of the communicator, each with a thread: one reduces buckets in one fixed order
/// as soon as their turn has come, the other gathers. Neither waits for the other, so that the
/// order of gathers need not fit that in which gradients become ready.
///
/// A round is one backward: every bucket is reduced once in it. Without accumulation a step has
/// one.
template <class State>
class OverlappedStep {
  using Comm = decltype(std::declval<typename State::communicator_type&>().duplicate());
  using Stage = typename State::Stage;
  /// Parameters show where their gradients lie, so backward may add to what is there.
  static constexpr bool shows_gradients = State::View::gradients == Residency::arena;

 public:
  /// To be followed by `rebuild`.
  explicit OverlappedStep(State& state) : state_(state), agreement_(state) {}
  OverlappedStep(const OverlappedStep&) = delete;
  OverlappedStep& operator=(const OverlappedStep&) = delete;
  ~OverlappedStep() {
    // Units that are gathered ahead are so by peers, too, and need nobody's caller: a last pass
    // that only reads values ends with one on its way. Not so where a rank leaves before its time.
    if (reducing_.idle() && !residence_.any_held() && std::uncaught_exceptions() == 0) {
      try {
        gathering_.wait_for_all();
      } catch (...) {  // peers know
      }
    }
    // What peers still wait for can't be finished without this rank's caller.
    if (!reducing_.idle() || !gathering_.idle()) abort("an optimizer was destroyed in a step");
    stop();
  }

  // Gradients.

  /// To be called before any of a round's gradients is noted. The round before must have been
  /// reduced: its gradients lay where this one's will.
  void begin_round() {
    if (!std::exchange(round_is_over_, false)) return;
    if (reduces()) reducing_.wait_for_all();
    order_.begin_round();
    borrows_ = shows_gradients;  // which backward writes to as it likes
    std::fill(opened_.begin(), opened_.end(), std::uint8_t{0});
    state_.for_each_lane(
        [](auto& lane) { std::fill(lane.gradients.begin(), lane.gradients.end(), nullptr); });
  }

  /// Makes room for a parameter's gradient, which is about to be written.
  /// @param fresh whether nothing has been written to it in this round
  void open(std::size_t leader, const char* verb, bool fresh) {
    begin_round();
    if (opened_[leader] != 0) return;
    const ParameterInfo& info = state_.parameters[leader];
    take_room(info.elements * info.element_bytes, leader, verb);
    opened_[leader] = 1;
    state_.for_each_lane([&](auto& lane) {
      if (lane.index != info.lane) return;
      const Place& place = state_.layout->place(leader);
      for (const Fragment& f :
           state_.layout->fragments(lane.index, {place.offset, place.offset + place.elements})) {
        for_each_bucket_part(lane, f, [&](std::size_t b, Interval) {
          if (fresh) require_unwritten(lane, b, verb);
          lane.gradient_pages->take(b, state_.layout->bucket(lane.index, b));
        });
      }
    });
  }

  /// A parameter's place has its whole gradient, or none: reduces every bucket whose turn has come.
  void complete(std::size_t leader) {
    begin_round();
    if (!reduces()) return;
    reducing_.require_sound();
    order_.complete(*state_.layout, leader);
    while (order_.turn_has_come()) reduce_next();
  }

  /// The backward is over, and the next one's gradients are added to its.
  void end_round() {
    begin_round();
    if (state_.alone()) {
      add_own_round();
      let_go_of_gradients();
      ++rounds_;
      round_is_over_ = true;
      return;
    }
    while (order_.any_left()) reduce_next();
    ++rounds_;
    round_is_over_ = true;
    if (borrows_) reducing_.wait_for_all();
  }

  /// A gradient of this round lies where the next backward may write without asking.
  void borrow() noexcept { borrows_ = true; }

  /// Whether sums of earlier backward passes are there.
  [[nodiscard]] bool accumulates() const { return rounds_ > 0; }
  void prepare_to_add() {
    if (state_.alone()) {
      state_.for_each_lane([&](auto& lane) {
        const std::size_t kept = state_.layout->shard_elements(lane.index, state_.rank());
        using Sums = std::remove_cvref_t<decltype(lane.reduced)>;
        if (lane.reduced.size() < kept) lane.reduced = Sums(kept, state_.settings.memory);
      });
      return;
    }
    for_each_lane_and(reduce_traffic_, [](auto&, auto& traffic) { traffic->prepare_to_add(); });
  }

  /// Of a rank alone, whose gradients are their own sums.
  void add_own_round() {
    state_.for_each_lane([&]<class Lane>(Lane& lane) {
      using A = typename Lane::arithmetic;
      for (const OwnedFragment& owned : lane.owned) {
        const auto own = state_.own_gradient(lane)(owned.fragment, 0);
        A* const sums = lane.reduced.data() + owned.shard_begin;
        for (std::size_t at = 0; at < owned.fragment.elements; at += look_chunk) {
          const std::size_t count = std::min(look_chunk, owned.fragment.elements - at);
          if (rounds_ == 0) {
            sum_sources(own, at, count, sums + at);
            continue;
          }
          alignas(64) A chunk[look_chunk];
          sum_sources(own, at, count, chunk);
          const std::array<const A*, 2> both{sums + at, chunk};
          sum_sources(GradientSum<A>{both, 1}, 0, count, sums + at);
        }
      }
    });
  }

  // Values.

  void acquire(int unit) {
    const std::scoped_lock lock(units_mutex_);
    if (!state_.alone()) gathering_.require_sound();
    residence_.acquire(
        unit, [&](const Unit& u) { return fetch(u); },
        [&](std::uint64_t arrival) { gathering_.wait(arrival); });
  }
  void release(int unit) {
    const std::scoped_lock lock(units_mutex_);
    residence_.release(
        unit, [&](const Unit& u) { let_go(u); }, [&](const Unit& u) { return fetch(u); });
  }
  /// Throws `UsageError` where a unit is not held.
  void require_held(int unit) {
    const std::scoped_lock lock(units_mutex_);
    residence_.require_held(unit);
  }
  /// Throws `UsageError` where a unit is still held.
  void require_none_held(const char* verb) {
    const std::scoped_lock lock(units_mutex_);
    residence_.require_none_held(verb);
  }

  // Steps.

  /// Forgets what was marked.
  void forget() noexcept {
    if (state_.alone() || !reduces()) let_go_of_gradients();
    rounds_ = 0;
    round_is_over_ = true;
  }

  /// Ends what is on its way, and frees its memory for the peers' part.
  void give_up(const std::string& why) noexcept {
    abort(why);
    stop();
    const auto abandon = [](auto&, auto& traffic) {
      if (traffic) traffic->abandon();
    };
    for_each_lane_and(reduce_traffic_, abandon);
    for_each_lane_and(gather_traffic_, abandon);
  }

  [[nodiscard]] std::size_t staging_bytes() const {
    std::size_t sum = 0;
    const auto add = [&](const auto&... t) { ((sum += t ? t->staging_bytes() : 0), ...); };
    std::apply(add, reduce_traffic_);
    std::apply(add, gather_traffic_);
    return sum;
  }
  /// Bytes of gradients that wait to be reduced, and the most that did.
  [[nodiscard]] std::size_t pooled_bytes() const noexcept { return pooled_; }
  [[nodiscard]] std::size_t pooled_peak() const noexcept { return pooled_peak_; }
  /// Bytes of units that are gathered, and the most that were.
  [[nodiscard]] std::size_t gathered_bytes() const noexcept { return gathered_; }
  [[nodiscard]] std::size_t gathered_peak() const noexcept { return gathered_peak_; }

  [[nodiscard]] TrafficReport traffic() const {
    TrafficReport report;
    const auto seconds = [](auto duration) {
      return std::chrono::duration<double>(duration).count();
    };
    const auto tell = [&](const auto& courier, TrafficReport::Kind& kind) {
      const auto [worked, waited] = courier.worked_and_waited();
      kind.busy = seconds(worked);
      kind.exposed = seconds(waited);
    };
    tell(reducing_, report.reduce);
    tell(gathering_, report.gather);
    report.reduce.bytes = reduced_payload_;
    report.gather.bytes = gathered_payload_;
    return report;
  }

  /// Reduces the round's remaining buckets for nothing: a rank that marked gradients has started
  /// some, and the peers must have started as many before anything else is agreed upon.
  void drain() {
    if (state_.alone()) return;
    if (reduces()) {
      begin_round();
      while (order_.any_left()) reduce_next();
      reducing_.wait_for_all();
    }
    drop_what_is_ahead();
  }

  /// Prepares for the layout, which is new or has grown. Nothing may be on its way.
  void rebuild() {
    opened_.assign(state_.parameters.size(), 0);
    order_.rebuild(*state_.layout, [&](std::size_t i) { return state_.steps_alone(i); });
    round_is_over_ = true;
    learned_ = false;
    pool_limit_ = limit_of_pool(state_.stage, *state_.layout, state_.parameters,
                                element_bytes(typename State::elements{}));
    rebuild_units();
    if (state_.alone()) return;
    if (!reducer_) reducer_.emplace(state_.comm().duplicate());
    if (!gatherer_) gatherer_.emplace(state_.comm().duplicate());
    stop();
    const auto make = [&](Comm& comm, Journey journey) {
      return [&, journey](auto& lane, auto& traffic) {
        traffic.emplace(lane, *state_.layout, comm, journey, state_.settings.poison_padding,
                        state_.memory_for_peers(), state_.settings.memory);
      };
    };
    for_each_lane_and(reduce_traffic_, make(*reducer_, Journey::reduce));
    for_each_lane_and(gather_traffic_, make(*gatherer_, Journey::gather));
    agreement_.rebuild();
    all_positions_.resize(order_.size() * static_cast<std::size_t>(state_.all_ranks()));
    unit_announcements_.resize(static_cast<std::size_t>(state_.world()));
    reducing_.start(order_.size() + 1, [this](const Reduction& errand) { carry_out(errand); });
    gathering_.start(order_.size() + units_ + 1,
                     [this](const Gather& errand) { carry_out(errand); });
  }

  StepEnd step(const std::string& refusal, bool& updating) {
    const bool reduces_now = reduces();
    if (reduces_now) {
      begin_round();
      while (order_.any_left()) reduce_next();
    }
    round_is_over_ = true;
    drop_what_is_ahead();
    std::optional<StepEnd> ended;
    try {
      ended = agreement_.on_presence(everyone(), refusal);
    } catch (const AgreedRefusal&) {
      reducing_.wait_for_all();
      throw;
    }
    if (ended) {
      reducing_.wait_for_all();
      return *ended;
    }
    const bool looks = state_.scaling.looks_first();
    if (looks) {
      look_at_all();
      if (!state_.scaling.decide(agreement_.on_findings(*gatherer_))) return StepEnd::skipped;
    }
    if (looks || !reduces_now || order_.size() == 0) state_.begin_update(updating);
    // The last round's reductions are the last that were handed over, in this order.
    const std::uint64_t before = reducing_.pushed() - (reduces_now ? order_.size() : 0);
    for (std::size_t k = 0; k < order_.size(); ++k) {
      const Launch& launch = order_[k];
      if (reduces_now && !looks) reducing_.wait(before + k + 1);
      state_.begin_update(updating);
      state_.for_each_lane([&](auto& lane) {
        if (lane.index != launch.lane) return;
        if (reduces_now) {
          state_.update_bucket(lane, launch.bucket, state_.own_sums(lane));
        } else {
          state_.update_bucket(lane, launch.bucket, state_.own_gradient(lane));
        }
        if (!lane.comes_and_goes(launch.bucket)) gathering_.push({launch, nullptr});
      });
    }
    gathering_.wait_for_all();
    if (reduces_now && !std::exchange(learned_, true)) learn_order();
    return StepEnd::applied;
  }

 private:
  struct Reduction {
    Launch launch{};
    bool adds = false;
  };
  /// Of a bucket; or, with a unit, says that this is the next that the rank gathers.
  struct Gather {
    Launch launch{};
    const Unit* announced = nullptr;
  };
  using ReduceTraffic = typename OverlappedTrafficOf<typename State::Lanes, State, Comm>::type;

  [[nodiscard]] bool reduces() {
    return !state_.alone() && state_.settings.gradients == Gradients::local;
  }
  [[nodiscard]] auto& everyone() {
    if constexpr (State::has_replicas) {
      return gatherer_->world();
    } else {
      return *gatherer_;
    }
  }

  void abort(const std::string& why) noexcept {
    for (std::optional<Comm>* comm : {&reducer_, &gatherer_}) {
      try {
        if (*comm) (*comm)->abort(why);
      } catch (...) {  // no memory for words
      }
    }
  }
  void stop() noexcept {
    reducing_.stop();
    gathering_.stop();
  }

  template <class Traffics, class F>
  void for_each_lane_and(Traffics& traffics, F&& f) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (f(std::get<I>(state_.lanes), std::get<I>(traffics)), ...);
    }(std::make_index_sequence<State::lane_count>{});
  }

  // Of reductions.

  void reduce_next() { reducing_.push({order_.take_next(), rounds_ > 0}); }

  /// On the reducing thread.
  void carry_out(const Reduction& errand) {
    for_each_lane_and(reduce_traffic_, [&](auto& lane, auto& traffic) {
      if (lane.index != errand.launch.lane) return;
      const std::size_t bucket = errand.launch.bucket;
      const Interval whole = state_.layout->bucket(lane.index, bucket);
      const Interval mine = state_.layout->slice(lane.index, bucket, state_.rank());
      using Storage = typename std::remove_cvref_t<decltype(lane)>::storage;
      std::size_t bytes = 0;
      for (const Fragment& f : state_.layout->fragments(lane.index, whole)) {
        const std::size_t size = f.elements * sizeof(typename Storage::value);
        bytes += size;
        if (opened_[f.parameter] == 0) count(pooled_, pooled_peak_, size);
      }
      state_.observe(Phase::reduce, lane.index, bucket, [&] {
        traffic->start_reduce(bucket, errand.adds);
        traffic->finish_all();
      });
      lane.gradient_pages->let_go(bucket, whole, shows_gradients);
      pooled_ -= bytes;
      reduced_payload_ += (whole.size() - mine.size()) * sizeof(typename Storage::wire);
    });
  }

  void look_at_all() {
    if (!reduces()) {
      state_.look_at_own_gradients();
      return;
    }
    const std::uint64_t before = reducing_.pushed() - order_.size();
    for (std::size_t k = 0; k < order_.size(); ++k) {
      reducing_.wait(before + k + 1);
      state_.for_each_lane([&](auto& lane) {
        if (lane.index != order_[k].lane) return;
        state_.look_at_bucket(lane, order_[k].bucket, false, state_.own_sums(lane));
      });
    }
  }

  void learn_order() {
    everyone()
        .exchange(std::as_bytes(order_.positions()),
                  std::as_writable_bytes(std::span(all_positions_)))
        .wait();
    order_.adopt(all_positions_);
  }

  // Of the pool.

  static void count(std::atomic<std::size_t>& now, std::atomic<std::size_t>& peak,
                    std::size_t bytes) noexcept {
    const std::size_t sum = now += bytes;
    std::size_t most = peak;
    while (sum > most && !peak.compare_exchange_weak(most, sum)) {
    }
  }

  void take_room(std::size_t bytes, std::size_t leader, const char* verb) {
    if (reduces()) {
      while (pooled_ + bytes > pool_limit_ && reducing_.wait_for_one()) {
      }
      reducing_.require_sound();
      if (pooled_ + bytes > pool_limit_ && pool_bytes(state_.stage) != 0) {
        throw PoolExhausted(
            pooled_ + bytes, pool_limit_,
            std::string(verb) + ": the gradient of " + state_.name_of(leader) + " needs " +
                std::to_string(bytes) + " bytes, but of the pool's " + std::to_string(pool_limit_) +
                " (pool_bytes) " + std::to_string(pooled_.load()) +
                " are taken by gradients whose buckets are not complete or not at their turn. In "
                "this order the pool needs at least " +
                std::to_string(pooled_ + bytes) + "; 0 lets it grow as needed");
      }
    }
    count(pooled_, pooled_peak_, bytes);
  }

  /// Throws where a gradient in the bucket was written to since that was let go of: all of them are
  /// looked at, since from now on it is in use. Of those that were moved nobody can say.
  template <class Lane>
  void require_unwritten(Lane& lane, std::size_t bucket, const char* verb) {
    if (State::View::gradients == Residency::arena) return;
    const Interval whole = state_.layout->bucket(lane.index, bucket);
    for (const Fragment& f : state_.layout->fragments(lane.index, whole)) {
      const Interval part{f.lane_begin, f.lane_begin + f.elements};
      if (!lane.gradient_pages->written_since(bucket, part)) continue;
      throw UsageError(std::string(verb) + ": the gradient of " + state_.name_of(f.parameter) +
                       " was written after it had been marked and sent; lease it anew in each "
                       "backward, and keep no pointer to it");
    }
  }

  template <class Lane, class F>
  void for_each_bucket_part(Lane& lane, const Fragment& f, F&& body) {
    const Interval buckets = state_.layout->buckets_of(f.parameter);
    for (std::size_t b = buckets.begin; b < buckets.end; ++b) {
      const Interval whole = state_.layout->bucket(lane.index, b);
      const Interval part{std::max(whole.begin, f.lane_begin),
                          std::min(whole.end, f.lane_begin + f.elements)};
      if (part.begin < part.end) body(b, part);
    }
  }

  /// Of rounds that are not reduced.
  void let_go_of_gradients() noexcept {
    state_.for_each_lane([&](auto& lane) {
      for (std::size_t i = 0; i < opened_.size(); ++i) {
        if (opened_[i] == 0 || state_.parameters[i].lane != lane.index) continue;
        const Interval buckets = state_.layout->buckets_of(i);
        for (std::size_t b = buckets.begin; b < buckets.end; ++b) {
          lane.gradient_pages->let_go(b, state_.layout->bucket(lane.index, b), shows_gradients);
        }
      }
    });
    pooled_ = 0;
  }

  // Of units.

  void rebuild_units() {
    std::vector<Unit> units = state_.units();
    units_ = units.size();
    residence_.rebuild(std::move(units), prefetched_units(state_.stage));
  }

  /// Starts to gather a unit; returns how many gathers must have been carried out then.
  std::uint64_t fetch(const Unit& unit) {
    for_each_bucket(unit, [&](auto& lane, std::size_t b) {
      const Interval whole = state_.layout->bucket(lane.index, b);
      for (const Fragment& f : state_.layout->fragments(lane.index, whole)) {
        if (!lane.value_pages->written_since(b, {f.lane_begin, f.lane_begin + f.elements})) {
          continue;
        }
        throw UsageError("acquire: " + state_.name_of(f.parameter) +
                         " was written after its unit " + std::to_string(unit.id) +
                         " had been released; use no pointer to it after release");
      }
      lane.value_pages->take(b, whole);
      count(gathered_, gathered_peak_, whole.size() * sizeof(*lane.base));
    });
    std::uint64_t last = gathering_.push({{}, &unit});
    for_each_bucket(unit, [&](auto& lane, std::size_t b) {
      last = gathering_.push({{lane.index, b}, nullptr});
    });
    return last + 1;
  }
  void let_go(const Unit& unit) {
    for_each_bucket(unit, [&](auto& lane, std::size_t b) {
      const Interval whole = state_.layout->bucket(lane.index, b);
      lane.value_pages->let_go(b, whole);
      gathered_ -= whole.size() * sizeof(*lane.base);
    });
  }
  template <class F>
  void for_each_bucket(const Unit& unit, F&& f) {
    for (const UnitBuckets& part : unit.parts) {
      state_.for_each_lane([&](auto& lane) {
        if (lane.index != part.lane) return;
        for (std::size_t b = part.buckets.begin; b < part.buckets.end; ++b) f(lane, b);
      });
    }
  }
  /// All gathers have been carried out, and none is ahead of the caller.
  void drop_what_is_ahead() {
    const std::scoped_lock lock(units_mutex_);
    gathering_.wait_for_all();
    residence_.drop_what_is_ahead([&](const Unit& u) { let_go(u); });
    residence_.end_round();
  }

  /// On the gathering thread.
  void carry_out(const Gather& errand) {
    if (errand.announced != nullptr) {
      agree_on(*errand.announced);
      return;
    }
    for_each_lane_and(gather_traffic_, [&](auto& lane, auto& traffic) {
      if (lane.index != errand.launch.lane) return;
      const std::size_t bucket = errand.launch.bucket;
      state_.observe(Phase::gather, lane.index, bucket, [&] {
        traffic->start_gather(bucket);
        traffic->finish_all();
      });
      const Interval mine = state_.layout->slice(lane.index, bucket, state_.rank());
      gathered_payload_ +=
          mine.size() * sizeof(*lane.base) * static_cast<std::size_t>(state_.world() - 1);
    });
  }

  /// Units of equal size would be taken for one another.
  void agree_on(const Unit& unit) {
    const UnitAnnouncement mine{Topic::unit, static_cast<std::int64_t>(unit.id)};
    gatherer_
        ->exchange(std::as_bytes(std::span(&mine, 1)),
                   std::as_writable_bytes(std::span(unit_announcements_)))
        .wait();
    const UnitAnnouncement& first = unit_announcements_[0];
    for (std::size_t r = 1; r < unit_announcements_.size(); ++r) {
      const UnitAnnouncement& theirs = unit_announcements_[r];
      require_topic("acquire", r, theirs.topic, mine.topic);
      if (theirs.unit == first.unit) continue;
      throw UsageError("acquire: rank " + std::to_string(r) + " acquires unit " +
                       std::to_string(theirs.unit) + " where rank 0 acquires unit " +
                       std::to_string(first.unit) +
                       "; acquire the same units in the same order on all ranks");
    }
  }

  State& state_;
  LaunchOrder order_{};
  StepAgreement<State> agreement_;
  std::vector<LaunchOrder::Position> all_positions_{};
  bool learned_ = false;
  std::size_t rounds_ = 0;              ///< that have been reduced for the step to come
  bool round_is_over_ = true;           ///< and none has begun since
  bool borrows_ = false;                ///< whether some of its gradients are not leased
  std::vector<std::uint8_t> opened_{};  ///< by leader: whether its gradient is counted as pooled
  std::size_t pool_limit_ = 0;
  std::atomic<std::size_t> pooled_{0};
  std::atomic<std::size_t> pooled_peak_{0};
  std::atomic<std::size_t> gathered_{0};
  std::atomic<std::size_t> gathered_peak_{0};
  std::atomic<std::uint64_t> reduced_payload_{0};
  std::atomic<std::uint64_t> gathered_payload_{0};

  std::mutex units_mutex_{};  ///< of what follows; taken after the engine's
  UnitResidence residence_{};
  std::size_t units_ = 0;
  std::vector<UnitAnnouncement> unit_announcements_{};

  std::optional<Comm> reducer_{};
  std::optional<Comm> gatherer_{};
  ReduceTraffic reduce_traffic_{};
  ReduceTraffic gather_traffic_{};
  // Last: their threads use everything above.
  Courier<Reduction> reducing_{};
  Courier<Gather> gathering_{};
};

}  // namespace zero::detail
