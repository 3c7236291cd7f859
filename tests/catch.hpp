// SPDX-License-Identifier: Apache-2.0
// Catch2, version 2 or 3, under version 3's names.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>

#include <string>

namespace Catch {

using Detail::Approx;

namespace Matchers {
// Version 3 gave the name `Contains` to ranges.
inline auto ContainsSubstring(const std::string& text) { return Contains(text); }
}  // namespace Matchers

}  // namespace Catch
#endif
