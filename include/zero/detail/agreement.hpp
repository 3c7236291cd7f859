// SPDX-License-Identifier: Apache-2.0
/// @file
/// The collective check, at construction and when a group is added, that all ranks were given the
/// same.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <span>
#include <string>
#include <typeinfo>
#include <vector>

#include "zero/communicator.hpp"
#include "zero/detail/hash.hpp"
#include "zero/error.hpp"

namespace zero::detail {

/// A refusal cut to what fits into a fixed message.
using Text = std::array<char, 240>;

[[nodiscard]] inline Text to_text(const std::string& from) {
  Text text{};
  std::memcpy(text.data(), from.data(), std::min(from.size(), text.size() - 1));
  return text;
}

/// What an exception says; never empty, for an empty text means that nothing is wrong.
[[nodiscard]] inline std::string text_of(const std::exception& error) {
  return *error.what() == '\0' ? "an exception without a text" : error.what();
}

/// What all ranks refuse alike, and at once, or what was refused before anything that concerns
/// peers: nobody need be told. Any other exception of one
/// rank's, a `UsageError` of a user's code too, is that rank's own, and the peers must learn of it.
class AgreedRefusal final : public UsageError {
 public:
  using UsageError::UsageError;
};

/// Calls `body`. What it throws, unless all ranks refuse alike, `tell` is given the text of first.
template <class Body, class Tell>
void or_tell(Body&& body, const Tell& tell) {
  try {
    body();
  } catch (const AgreedRefusal&) {
    throw;
  } catch (const std::exception& error) {
    tell(error.what());
    throw;
  } catch (...) {
    tell("an exception that is no std::exception");
    throw;
  }
}

/// What a rank is about when it tells the others something: ranks that call different verbs must
/// not take one's words for the other's.
enum class Topic : std::uint64_t {
  construction = 0x7a65726f01,
  addition,
  step,
  unit,
  save,
  async_save,
  finish,
  load,
  consolidation
};

/// Which unit a rank gathers next.
struct UnitAnnouncement {
  Topic topic;
  std::int64_t unit;
};

/// One parameter as the ranks compare it.
struct ParameterDigest {
  std::uint64_t elements = 0;
  std::uint64_t description = 0;  ///< hash of name, shape, type, attributes, group
  std::uint64_t values = 0;       ///< hash of the initial values, 0 where they aren't compared
};

/// Everything as the ranks compare it.
struct Digest {
  Topic topic = Topic::construction;
  std::uint64_t program = 0;   ///< hash of the optimizer's type: policies included
  std::uint64_t settings = 0;  ///< hash of bucket size, gradient mode and scale, groups
  std::uint64_t parameters = 0;
  std::uint64_t count = 0;
  std::uint64_t layout = 0;    ///< how the partition divides the parameters
  std::uint64_t identity = 0;  ///< of the optimizer that is added to; 0 in a construction
  std::uint64_t address = 0;   ///< where it lies; not compared, but what makes it one of a kind
  Text refusal{};              ///< why this rank can't be constructed; empty if it can
};

/// Those who must agree: the ranks of all groups, where there are several.
template <class Comm>
decltype(auto) all_ranks_of(Comm& comm) {
  if constexpr (ReplicatedCommunicator<Comm>) {
    return (comm.world());
  } else {
    return (comm);
  }
}

/// Every rank's `mine`, in rank order.
template <class T, HostExchange C>
std::vector<T> exchange_all(C& comm, std::span<const T> mine) {
  std::vector<T> all(mine.size() * static_cast<std::size_t>(comm.size()));
  comm.exchange(std::as_bytes(mine), std::as_writable_bytes(std::span(all))).wait();
  return all;
}

/// Throws `UsageError` on all ranks where one refuses, or `mine` isn't the same number on all.
/// @param refusal why this rank can't go on, or empty
template <class Comm>
void require_alike(Comm& comm, std::uint64_t mine, const std::string& what,
                   const std::string& refusal = {}) {
  struct Message {
    std::uint64_t number;
    Text refusal;
  };
  const Message message{mine, to_text(refusal)};
  const std::vector<Message> all = exchange_all(comm, std::span(&message, 1));
  if (!refusal.empty()) throw UsageError(refusal);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].refusal.front() == '\0') continue;
    throw UsageError("rank " + std::to_string(r) +
                     " refused, so nothing has changed: " + all[r].refusal.data());
  }
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r].number != all[0].number)
      throw UsageError(what + " differ between ranks 0 and " + std::to_string(r));
  }
}

/// The first part of what ranks that share memory show each other: looked at before anything else.
struct EngineIdentity {
  std::uint64_t identity = 0;  ///< the same on all ranks of one construction, and of no other
};

/// Refuses where rank calls another verb. Each of the ranks sees that one does.
inline void require_topic(const char* verb, std::size_t rank, Topic theirs, Topic ours) {
  if (theirs == ours) return;
  throw AgreedRefusal(
      std::string(verb) + ": rank " + std::to_string(rank) +
      " calls another verb of an optimizer over this communicator; construction, "
      "add_param_group, step, save, finish and load must be called in the same order on all "
      "ranks");
}

/// Throws the same `UsageError` on all ranks where one refuses, or where they differ. Returns the
/// construction's identity.
/// @param verb on whose behalf, for messages
/// @param name gives a parameter's quoted name by index; rank 0's is what all ranks say
template <HostExchange C, class Name>
std::uint64_t require_agreement(C& comm, const char* verb, Digest mine,
                                std::span<const ParameterDigest> parameters, const Name& name) {
  const std::vector<Digest> all = exchange_all(comm, std::span<const Digest>(&mine, 1));
  const auto refuse = [verb](std::size_t rank, const std::string& what) {
    throw AgreedRefusal(std::string(verb) + ": rank " + std::to_string(rank) +
                        " differs from rank 0: " + what);
  };
  for (std::size_t r = 0; r < all.size(); ++r) require_topic(verb, r, all[r].topic, mine.topic);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].refusal[0] == '\0') continue;
    throw AgreedRefusal(std::string(verb) + ": rank " + std::to_string(r) +
                        " refused, so nothing was done on any rank: " + all[r].refusal.data());
  }
  std::uint64_t compared = all[0].count;
  bool differ = false;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].identity != all[0].identity) {
      refuse(r,
             "it calls this on another optimizer of the communicator; use several in the same "
             "order on all ranks");
    }
    if (all[r].program != all[0].program) {
      refuse(r, "its optimizer has another type; use the same element types and policies");
    }
    if (all[r].settings != all[0].settings) {
      refuse(r,
             "its bucket size, settings, number of groups or their state (momentum, amsgrad) "
             "are others; give all ranks the same");
    }
    differ = differ || all[r].parameters != all[0].parameters || all[r].count != all[0].count;
    compared = std::min(compared, all[r].count);
  }
  Hash addresses;
  for (const Digest& digest : all) addresses.add(digest.address);
  if (!differ) {
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r].layout == all[0].layout) continue;
      refuse(r,
             "its partition divides the same parameters otherwise; give all ranks the same "
             "partition");
    }
    return addresses.value();
  }
  const auto ranked = exchange_all(comm, parameters.first(compared));
  const auto quoted_by_first = [&](std::size_t i) {  // names may be what differs
    const Text text = to_text(name(i));
    return std::string(exchange_all(comm, std::span<const Text>(&text, 1))[0].data());
  };
  for (std::size_t i = 0; i < compared; ++i) {
    for (std::size_t r = 0; r < all.size(); ++r) {
      const ParameterDigest& here = ranked[r * compared + i];
      const ParameterDigest& first = ranked[i];
      if (here.elements != first.elements) {
        refuse(r, quoted_by_first(i) + " has " + std::to_string(here.elements) + " elements, not " +
                      std::to_string(first.elements));
      }
      if (here.description != first.description) {
        refuse(r,
               quoted_by_first(i) + " has another name, shape, element type, group or attribute");
      }
      if (here.values != first.values) {
        refuse(r, quoted_by_first(i) +
                      " has other initial values; start all ranks from the same (the same "
                      "seed, or a broadcast from rank 0)");
      }
    }
  }
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].count != all[0].count) {
      refuse(r, "it has " + std::to_string(all[r].count) + " parameters, not " +
                    std::to_string(all[0].count) + "; the first " + std::to_string(compared) +
                    " are the same");
    }
  }
  return addresses.value();
}

/// What ranks say as they enter a verb between steps.
struct VerbWord {
  Topic topic;
  std::uint64_t identity;
  Text refusal;
};

/// Throws the same `UsageError` on all ranks where one refuses, calls another verb, or this one on
/// another optimizer.
template <HostExchange C>
void require_same_verb(C& comm, const char* verb, const VerbWord& mine) {
  std::vector<VerbWord> all;
  try {
    all = exchange_all(comm, std::span<const VerbWord>(&mine, 1));
  } catch (const CommunicatorError& error) {
    if (typeid(error) != typeid(CommunicatorError)) throw;  // one that says more
    throw CommunicatorError(
        error.failure(), error.rank(), error.operation(), error.sequence(),
        std::string(verb) + " is collective, so all ranks must call it: " + error.what());
  }
  for (std::size_t r = 0; r < all.size(); ++r) require_topic(verb, r, all[r].topic, mine.topic);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].identity != all[0].identity) {
      throw AgreedRefusal(std::string(verb) + ": rank " + std::to_string(r) +
                          " calls it on another optimizer of the communicator; use several in the "
                          "same order on all ranks");
    }
    if (all[r].refusal[0] == '\0') continue;
    throw AgreedRefusal(std::string(verb) + ": rank " + std::to_string(r) +
                        " refused, so nothing was done on any rank: " + all[r].refusal.data());
  }
}

/// Refuses where rank's optimizer is another than this one.
inline void require_same_optimizer(int rank, std::uint64_t theirs, std::uint64_t ours) {
  if (theirs == ours) return;
  throw AgreedRefusal(
      "step: rank " + std::to_string(rank) +
      " steps another optimizer of this communicator; step several in the same order "
      "on all ranks. Nothing has changed");
}

/// The same on all ranks, given what each of them said.
/// @param some_serve whether some ranks of a join have no input
/// @param keeps_gradients whether the step can be taken again without a backward
inline void require_agreement_to_step(int rank, const char* text, std::uint64_t options,
                                      std::uint64_t options_of_rank_0, bool some_serve,
                                      bool keeps_gradients) {
  if (*text == '\0') {
    if (options == options_of_rank_0) return;
    text = some_serve
               ? "its groups' options differ from rank 0's, or its clip_grad_norm does; what "
                 "a join's body changes, JoinOptions::before_serving must change alike"
               : "its groups' options differ from rank 0's, or its clip_grad_norm does; set "
                 "the same on all ranks";
  }
  throw AgreedRefusal(
      "rank " + std::to_string(rank) +
      (keeps_gradients ? " refused the step, so no rank took it and nothing has changed: "
                       : " refused the step, so no rank took it; parameters and state are as "
                         "they were, but this step's gradients are gone, so run backward again: ") +
      text);
}

}  // namespace zero::detail
