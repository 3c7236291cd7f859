// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>

namespace bert {

/// What the user gave can't be used: a file, a size, an option. The message is one sentence for
/// them: what was wrong, where, and what to do. The trainer prints it and exits with 2.
class InputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace bert
