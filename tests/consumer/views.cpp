// SPDX-License-Identifier: Apache-2.0
// A user of the component range_v3.
#include <zero/describe.hpp>
#include <zero/views.hpp>

#include <iostream>
#include <vector>

int main() {
  const std::vector<zero::LayoutParameter> parameters{{.elements = 10}};
  const std::vector<zero::LayoutLane> lanes(1);
  const zero::Layout<> layout(parameters, lanes, 2);
  std::size_t owned = 0;
  for (const zero::Fragment& fragment : layout | zero::views::shard(0) | zero::views::fragments) {
    owned += fragment.elements;
  }
  std::cout << zero::describe(layout);
  return owned == 8 ? 0 : 1;
}
