// SPDX-License-Identifier: Apache-2.0
/// @file
/// What ranks that don't share memory tell each other in a step.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "zero/detail/agreement.hpp"
#include "zero/detail/findings.hpp"
#include "zero/detail/join_scope.hpp"
#include "zero/error.hpp"

namespace zero::detail {

/// Followed by one bit a parameter: whether its gradient is there.
struct StepMessage {
  Topic topic;
  Text refusal;           ///< why the rank can't step, or empty
  JoinWord join;          ///< of the join that it steps in
  std::uint64_t options;  ///< fingerprint of all groups
  std::uint64_t rounds;   ///< backward passes that were reduced before that of the step
  std::uint64_t identity;
};

/// Allocates nothing after `rebuild`.
template <class State>
class StepAgreement {
 public:
  explicit StepAgreement(State& state) : state_(state) {}

  void rebuild() {
    message_.resize(sizeof(StepMessage) + (state_.parameters.size() + 7) / 8);
    messages_.resize(message_.size() * static_cast<std::size_t>(state_.all_ranks()));
    findings_.resize(static_cast<std::size_t>(state_.world()));
  }

  /// Tells all ranks what this one has, or why it refuses. Returns what `agree_to_go_on` does.
  /// @param everyone a communicator of all ranks of all groups
  /// @param rounds as in the message. Where ranks differ, reductions wait for peers in vain, and
  ///        nobody can go on.
  template <class Comm>
  [[nodiscard]] std::optional<StepEnd> on_presence(Comm& everyone, const std::string& refusal,
                                                   std::size_t rounds = 0) {
    const StepMessage mine{Topic::step,    to_text(refusal), state_.join_word,
                           state_.options, rounds,           state_.identity};
    std::memcpy(message_.data(), &mine, sizeof mine);
    std::fill(message_.begin() + sizeof mine, message_.end(), std::byte{0});
    for (std::size_t i = 0; i < state_.present.size(); ++i) {
      if (state_.present[i] != 0) message_[sizeof mine + i / 8] |= std::byte{1} << (i % 8);
    }
    everyone.exchange(std::span<const std::byte>(message_), std::span<std::byte>(messages_)).wait();
    const auto from = [&](int r) {
      return std::span<const std::byte>(messages_).subspan(
          static_cast<std::size_t>(r) * message_.size(), message_.size());
    };
    const auto head = [&](int r) {
      StepMessage theirs;
      std::memcpy(&theirs, from(r).data(), sizeof theirs);
      return theirs;
    };
    for (int r = 0; r < state_.all_ranks(); ++r) {
      require_topic("step", static_cast<std::size_t>(r), head(r).topic, mine.topic);
    }
    for (int r = 0; r < state_.all_ranks(); ++r) {
      require_same_optimizer(r, head(r).identity, state_.identity);
    }
    for (int r = 0; r < state_.all_ranks(); ++r) {
      if (head(r).rounds == head(0).rounds) continue;
      throw UsageError(
          "step: rank " + std::to_string(r) + " has accumulated " + std::to_string(head(r).rounds) +
          " sharded backward passes for this step, but rank 0 " + std::to_string(head(0).rounds) +
          "; give all ranks as many scopes of accumulate(). Nothing was stepped, but "
          "this communicator can't be used any more");
    }
    const auto ended = state_.agree_to_go_on([&](int r) { return head(r).join; });
    // Where nothing will be stepped, options may differ.
    const std::uint64_t options_of_rank_0 = head(0).options;
    for (int r = 0; r < state_.all_ranks(); ++r) {
      const StepMessage theirs = head(r);
      require_agreement_to_step(r, theirs.refusal.data(), theirs.options,
                                ended ? theirs.options : options_of_rank_0, state_.some_serve(),
                                !State::pools_gradients);
    }
    if (ended) return ended;
    state_.agree_on_presence([&](std::size_t i) {
      typename State::Presence presence{false, true};
      for (int r = 0; r < state_.all_ranks(); ++r) {
        const bool there =
            (from(r)[sizeof(StepMessage) + i / 8] >> (i % 8) & std::byte{1}) != std::byte{0};
        presence.somewhere = presence.somewhere || there;
        presence.everywhere = presence.everywhere && there;
      }
      return presence;
    });
    return std::nullopt;
  }

  /// What all ranks of the group found, taken together; other groups have the same.
  template <class Comm>
  [[nodiscard]] Findings on_findings(Comm& comm) {
    comm.exchange(std::as_bytes(std::span(&state_.findings, 1)),
                  std::as_writable_bytes(std::span(findings_)))
        .wait();
    Findings all;
    for (const Findings& of_rank : findings_) all.add(of_rank);
    return all;
  }

 private:
  State& state_;
  std::vector<std::byte> message_{};
  std::vector<std::byte> messages_{};
  std::vector<Findings> findings_{};
};

}  // namespace zero::detail
