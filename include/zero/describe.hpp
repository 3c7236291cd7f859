// SPDX-License-Identifier: Apache-2.0
/// @file
/// A layout in words, for people. Needs range-v3, as `zero/views.hpp` does.
#pragma once

#include <concepts>
#include <cstddef>
#include <limits>
#include <ostream>
#include <range/v3/range/access.hpp>
#include <range/v3/range/concepts.hpp>
#include <range/v3/range/primitives.hpp>
#include <range/v3/range/traits.hpp>
#include <range/v3/view/all.hpp>
#include <range/v3/view/single.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "zero/error.hpp"
#include "zero/fragment.hpp"
#include "zero/layout.hpp"
#include "zero/partition.hpp"
#include "zero/views.hpp"

namespace zero {

namespace detail {
/// In place of names: parameters go by their index.
struct Unnamed {};
}  // namespace detail

/// How much of each kind a description shows, before it says how many more there are.
struct DescribeLimits {
  std::size_t lanes = 8;
  std::size_t buckets = 8;    ///< of a lane
  std::size_t ranks = 8;      ///< of a bucket
  std::size_t fragments = 4;  ///< of a slice

  /// Everything, however long.
  [[nodiscard]] static constexpr DescribeLimits none() {
    constexpr std::size_t all = std::numeric_limits<std::size_t>::max();
    return {all, all, all, all};
  }
};

/// What `describe` returns: it is computed when streamed. Points into the layout and the names.
template <PartitionPolicy Partition, class Names>
class Description {
 public:
  Description(const Layout<Partition>& layout, Names names, DescribeLimits limits)
      : layout_(&layout), names_(std::move(names)), limits_(limits) {}

  /// The same text, whatever a stream's flags and locale. Ends with a line break.
  [[nodiscard]] std::string text() const {
    std::string out = "layout: " + count(layout_->parameters(), "parameter") + ", " +
                      count(layout_->lanes(), "lane") + ", world " +
                      std::to_string(layout_->world()) + "\n";
    for (std::size_t lane = 0; lane < layout_->lanes(); ++lane) {
      if (lane == limits_.lanes) {
        out += more(layout_->lanes() - lane, "lane") + "\n";
        break;
      }
      add_lane(out, lane);
    }
    return out;
  }

  friend std::ostream& operator<<(std::ostream& out, const Description& description) {
    return out << description.text();
  }

 private:
  static std::string count(std::size_t n, std::string_view what) {
    return std::to_string(n) + " " + std::string(what) + (n == 1 ? "" : "s");
  }
  static std::string more(std::size_t n, std::string_view what) {
    return "… " + std::to_string(n) + " more " + std::string(what) + (n == 1 ? "" : "s");
  }
  static std::string between(std::size_t begin, std::size_t end) {
    return "[" + std::to_string(begin) + ", " + std::to_string(end) + ")";
  }

  void add_lane(std::string& out, std::size_t lane) const {
    const std::size_t buckets = layout_->buckets(lane);
    out += "lane " + std::to_string(lane) + ": " + count(layout_->elements(lane), "element") +
           ", alignment " + std::to_string(layout_->alignment(lane)) + ", extent " +
           std::to_string(layout_->extent(lane)) + ", " + count(buckets, "bucket") + "\n";
    for (const auto& bucket : *layout_ | views::buckets(lane)) {
      if (bucket.bucket == limits_.buckets) {
        out += "  " + more(buckets - bucket.bucket, "bucket") + "\n";
        break;
      }
      add_bucket(out, bucket);
    }
  }

  void add_bucket(std::string& out, const views::Bucket<Partition>& bucket) const {
    out += "  bucket " + std::to_string(bucket.bucket) + " " +
           between(bucket.interval.begin, bucket.interval.end);
    std::size_t padding = bucket.interval.size();
    for (const Fragment& f : ranges::views::single(bucket) | views::fragments) {
      padding -= f.elements;
    }
    if (padding > 0) out += ", padding " + std::to_string(padding);
    out += "\n";
    for (int rank = 0; rank < layout_->world(); ++rank) {
      if (static_cast<std::size_t>(rank) == limits_.ranks) {
        out += "    " + more(static_cast<std::size_t>(layout_->world() - rank), "rank") + "\n";
        break;
      }
      add_slice(out, bucket.slice(rank));
    }
  }

  void add_slice(std::string& out, const views::Slice<Partition>& slice) const {
    out += "    rank " + std::to_string(slice.rank) + " ";
    if (slice.interval.empty()) {
      out += "nothing\n";
      return;
    }
    out += between(slice.interval.begin, slice.interval.end);
    std::string separator = ": ";
    std::size_t met = 0;
    std::size_t padding = slice.interval.size();
    for (const Fragment& f : ranges::views::single(slice) | views::fragments) {
      padding -= f.elements;
      if (met++ >= limits_.fragments) continue;
      out += separator;
      add_name(out, f.parameter);
      out += between(f.parameter_begin, f.parameter_begin + f.elements);
      separator = ", ";
    }
    if (met > limits_.fragments) {
      out += separator + more(met - limits_.fragments, "fragment");
      separator = ", ";
    }
    if (padding > 0) out += separator + "padding " + std::to_string(padding);
    out += "\n";
  }

  void add_name(std::string& out, std::size_t parameter) const {
    if constexpr (std::same_as<Names, detail::Unnamed>) {
      out += "#" + std::to_string(parameter);
    } else {
      using Index = ranges::range_difference_t<const Names>;
      out += std::string_view(ranges::begin(names_)[static_cast<Index>(parameter)]);
    }
  }

  const Layout<Partition>* layout_;
  Names names_;
  DescribeLimits limits_;
};

/// `out << describe(layout)`: lanes, buckets and each rank's slice with its fragments, which are
/// written `#parameter[begin, end)` in elements of the parameter.
///
/// Bounded by `limits`: a bucket takes a line a rank that is shown. The time is that of counting
/// the fragments of the buckets shown.
template <PartitionPolicy Partition>
[[nodiscard]] Description<Partition, detail::Unnamed> describe(const Layout<Partition>& layout,
                                                               DescribeLimits limits = {}) {
  return {layout, {}, limits};
}

/// The same with names, a random-access range of texts by parameter index: an lvalue or a view.
/// Throws `UsageError` unless there is one for each parameter.
template <PartitionPolicy Partition, ranges::viewable_range Names>
  requires ranges::random_access_range<const ranges::views::all_t<Names>>
[[nodiscard]] auto describe(const Layout<Partition>& layout, Names&& names,
                            DescribeLimits limits = {}) {
  const auto given = static_cast<std::size_t>(ranges::distance(names));
  if (given != layout.parameters()) {
    throw UsageError("describe: " + std::to_string(given) + " names for " +
                     std::to_string(layout.parameters()) + " parameters");
  }
  return Description<Partition, ranges::views::all_t<Names>>(
      layout, ranges::views::all(std::forward<Names>(names)), limits);
}

template <PartitionPolicy Partition>
void describe(const Layout<Partition>&& must_outlive_its_description, DescribeLimits = {}) = delete;
template <PartitionPolicy Partition, class Names>
void describe(const Layout<Partition>&& must_outlive_its_description, Names&&,
              DescribeLimits = {}) = delete;

}  // namespace zero
