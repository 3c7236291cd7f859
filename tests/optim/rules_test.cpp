// SPDX-License-Identifier: Apache-2.0
// Update rules and the loop that runs them: options, bits, untouched slots, arithmetic. Built with
// -ffp-contract=off: the scalar evaluation here would otherwise be another computation.
#include <zero/detail/pack.hpp>
#include <zero/detail/update_loop.hpp>
#include <zero/error.hpp>
#include <zero/math.hpp>
#include <zero/optim/adam.hpp>
#include <zero/optim/sgd.hpp>
#include <zero/optimizer.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "../plain_update.hpp"
#include "catch.hpp"

namespace {

/// The minimal model in optimizer.hpp: what a user writes.
struct SignSgd {
  double lr = 1e-3;
  static constexpr std::array<std::string_view, 0> slots{};
  template <class Real>
  struct Scalars {
    Real lr;
  };
  template <class Real>
  ZERO_HOST_DEVICE Scalars<Real> scalars(std::int64_t) const {
    return {Real(lr)};
  }
  template <class X, class Real>
  ZERO_HOST_DEVICE static void update(X& value, const X& gradient, const Scalars<Real>& s) {
    value = value - s.lr * zero::sign(gradient);
  }
};
static_assert(zero::UpdateRule<SignSgd, float> && zero::UpdateRule<SignSgd, double>);
static_assert(zero::Optimizer<SignSgd> && !zero::WholeTensorOptimizer<SignSgd>);
static_assert(zero::Optimizer<zero::Adam> && zero::Optimizer<zero::Sgd>);

/// A rule that uses all of math.hpp that Adam and Sgd don't.
struct ClippedSign {
  double lr = 1e-2;
  static constexpr std::array<std::string_view, 2> slots{"largest", "smallest"};
  template <class Real>
  struct Scalars {
    Real lr;
  };
  template <class Real>
  ZERO_HOST_DEVICE Scalars<Real> scalars(std::int64_t) const {
    return {Real(lr)};
  }
  template <class X, class Real>
  ZERO_HOST_DEVICE static void update(X& value, const X& gradient, X& largest, X& smallest,
                                      const Scalars<Real>& s) {
    largest = zero::maximum(largest, zero::abs(gradient));
    smallest = zero::minimum(smallest, gradient);
    value = value - s.lr * (zero::sign(gradient) + zero::sqrt(largest) * smallest);
  }
};
static_assert(zero::UpdateRule<ClippedSign, float> && zero::UpdateRule<ClippedSign, double>);

// ---- All combinations of options that say something else

std::vector<SignSgd> combinations(SignSgd) { return {{.lr = 0.1}}; }
std::vector<ClippedSign> combinations(ClippedSign) { return {{}}; }

template <bool decoupled>
std::vector<zero::BasicAdam<decoupled>> combinations(zero::BasicAdam<decoupled>) {
  std::vector<zero::BasicAdam<decoupled>> all;
  for (const double decay : {0., 0.03}) {
    for (const bool amsgrad : {false, true}) {
      for (const bool maximize : {false, true}) {
        all.push_back({.lr = 0.02,
                       .beta1 = 0.8,
                       .beta2 = 0.95,
                       .eps = 1e-6,
                       .weight_decay = decay,
                       .amsgrad = amsgrad,
                       .maximize = maximize});
      }
    }
  }
  all.push_back({.beta1 = 0, .beta2 = 0, .eps = 0});
  return all;
}

std::vector<zero::Sgd> combinations(zero::Sgd) {
  std::vector<zero::Sgd> all;
  for (const double momentum : {0., 0.9}) {
    for (const double dampening : {0., 0.1}) {
      for (const double decay : {0., 0.03}) {
        for (const bool nesterov : {false, true}) {
          for (const bool maximize : {false, true}) {
            if (nesterov && (momentum == 0 || dampening != 0)) continue;
            all.push_back({.lr = 0.1,
                           .momentum = momentum,
                           .dampening = dampening,
                           .weight_decay = decay,
                           .nesterov = nesterov,
                           .maximize = maximize});
          }
        }
      }
    }
  }
  return all;
}

// ---- Arrays

template <class Rule, class T>
struct Arrays {
  static constexpr std::size_t slot_count = Rule::slots.size();
  std::vector<T> values, gradient;
  std::array<std::vector<T>, slot_count> state;

  [[nodiscard]] std::size_t size() const { return values.size(); }

  /// Null beyond the used slots: reading one of those would crash.
  plain::Arrays<T, slot_count> pointers(std::size_t used, std::size_t at = 0) {
    plain::Arrays<T, slot_count> p{values.data() + at, gradient.data() + at, {}};
    for (std::size_t slot = 0; slot < used; ++slot) p.state[slot] = state[slot].data() + at;
    return p;
  }
};

template <class T>
std::vector<T> specials() {
  using Limits = std::numeric_limits<T>;
  return {T(0),
          -T(0),
          Limits::infinity(),
          -Limits::infinity(),
          Limits::min(),
          Limits::max(),
          Limits::lowest(),
          Limits::denorm_min(),
          Limits::epsilon(),
          -Limits::denorm_min(),
          Limits::min() / 3,
          Limits::quiet_NaN()};
}

template <class T>
T draw(std::mt19937& random, bool special) {
  const std::vector<T> odd = specials<T>();
  if (special && random() % 3 == 0) return odd[random() % odd.size()];
  const T mantissa = static_cast<T>(static_cast<double>(random()) / 4294967296. - 0.5);
  return std::ldexp(mantissa, static_cast<int>(random() % 12) - 8);
}

template <class Rule, class T>
Arrays<Rule, T> draw_arrays(std::mt19937& random, std::size_t n, bool special) {
  Arrays<Rule, T> arrays;
  for (std::size_t i = 0; i < n; ++i) {
    arrays.values.push_back(draw<T>(random, special));
    arrays.gradient.push_back(draw<T>(random, special));
  }
  for (auto& slot : arrays.state) slot.assign(n, T(0));
  return arrays;
}

template <class T>
using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;

/// Equal bits, except that a NaN equals any NaN: which of two operands' payloads survives is up to
/// the compiler, so it can differ between the scalar and the vector evaluation.
template <class T>
bool same(T a, T b) {
  return std::bit_cast<Bits<T>>(a) == std::bit_cast<Bits<T>>(b) || (a != a && b != b);
}
/// Equal bits without exception.
template <class T>
bool identical(const std::vector<T>& a, const std::vector<T>& b) {
  return std::ranges::equal(
      a, b, {}, [](T x) { return std::bit_cast<Bits<T>>(x); },
      [](T x) { return std::bit_cast<Bits<T>>(x); });
}

template <class Rule, class T>
std::string name_of(const Rule& rule, unsigned seed, std::size_t n) {
  std::ostringstream out;
  out << "seed " << seed << ", " << n << (sizeof(T) == 4 ? " floats" : " doubles");
  if constexpr (requires { rule.weight_decay; }) {
    out << ", weight_decay " << rule.weight_decay << ", maximize " << rule.maximize;
  }
  if constexpr (requires { rule.amsgrad; }) out << ", amsgrad " << rule.amsgrad;
  if constexpr (requires { rule.nesterov; }) {
    out << ", momentum " << rule.momentum << ", dampening " << rule.dampening << ", nesterov "
        << rule.nesterov;
  }
  return out.str();
}

constexpr std::int64_t steps = 3;

template <class Rule, class T>
void new_gradient(Arrays<Rule, T>& arrays, std::int64_t t) {
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    arrays.gradient[i] = arrays.gradient[(i * 7 + static_cast<std::size_t>(t)) % arrays.size()];
  }
}

/// One call over everything equals calls over pieces that lie anywhere in memory.
template <class Rule, class T>
void check_cuts(const Rule& rule, unsigned seed, bool special) {
  std::mt19937 random(seed);
  const std::size_t n = seed % 2 == 0 ? random() % 201 : random() % 20;
  INFO((name_of<Rule, T>(rule, seed, n)));
  const std::size_t used = zero::used_slots(rule);
  Arrays<Rule, T> whole = draw_arrays<Rule, T>(random, n, special);
  Arrays<Rule, T> cut = whole;
  for (std::int64_t t = 1; t <= steps; ++t) {
    const auto scalars = rule.template scalars<T>(t);
    plain::update(rule, scalars, whole.pointers(used), n);
    for (std::size_t begin = 0; begin < n;) {
      const std::size_t size = std::min(n - begin, std::size_t{random() % 40});
      // In a buffer of its own, which begins anywhere between two vector loads.
      const std::size_t at = random() % 8;
      Arrays<Rule, T> piece;
      const auto take = [&](const std::vector<T>& from) {
        std::vector<T> out(at + size);
        std::copy_n(from.data() + begin, size, out.data() + at);
        return out;
      };
      piece.values = take(cut.values);
      piece.gradient = take(cut.gradient);
      for (std::size_t slot = 0; slot < used; ++slot) piece.state[slot] = take(cut.state[slot]);
      plain::update(rule, scalars, piece.pointers(used, at), size);
      std::copy_n(piece.values.data() + at, size, cut.values.data() + begin);
      for (std::size_t slot = 0; slot < used; ++slot) {
        std::copy_n(piece.state[slot].data() + at, size, cut.state[slot].data() + begin);
      }
      begin += size;
    }
    bool equal = identical(whole.values, cut.values);
    for (std::size_t slot = 0; slot < used; ++slot) {
      equal = equal && identical(whole.state[slot], cut.state[slot]);
    }
    CHECK(equal);
    new_gradient(whole, t);
    cut.gradient = whole.gradient;
  }
}

/// The loop equals the rule called on one number after the other.
template <class Rule, class T>
void check_scalar(const Rule& rule, unsigned seed, bool special) {
  std::mt19937 random(seed);
  const std::size_t n = 1 + random() % 100;
  INFO((name_of<Rule, T>(rule, seed, n)));
  const std::size_t used = zero::used_slots(rule);
  Arrays<Rule, T> vector = draw_arrays<Rule, T>(random, n, special);
  Arrays<Rule, T> scalar = vector;
  for (std::int64_t t = 1; t <= steps; ++t) {
    const auto scalars = rule.template scalars<T>(t);
    plain::update(rule, scalars, vector.pointers(used), n);
    for (std::size_t i = 0; i < n; ++i) {
      [&]<std::size_t... slot>(std::index_sequence<slot...>) {
        Rule::update(scalar.values[i], scalar.gradient[i], scalar.state[slot][i]..., scalars);
      }(zero::detail::slot_indices<Rule>{});
    }
    bool equal = std::ranges::equal(vector.values, scalar.values, same<T>);
    for (std::size_t slot = 0; slot < used; ++slot) {
      equal = equal && std::ranges::equal(vector.state[slot], scalar.state[slot], same<T>);
    }
    CHECK(equal);
    new_gradient(vector, t);
    scalar.gradient = vector.gradient;
  }
}

template <class Rule, class T>
void check_bits() {
  for (const Rule& rule : combinations(Rule{})) {
    for (unsigned seed = 1; seed <= 20; ++seed) {
      check_cuts<Rule, T>(rule, seed, seed % 4 == 3);
      check_scalar<Rule, T>(rule, seed, seed % 4 == 3);
    }
  }
}

/// Slots beyond the used ones keep what is in them, even where memory is given.
template <class Rule, class T>
void check_untouched() {
  for (const Rule& rule : combinations(Rule{})) {
    for (const std::size_t n : {0, 1, 7, 8, 9, 40}) {
      std::mt19937 random(n);
      Arrays<Rule, T> arrays = draw_arrays<Rule, T>(random, n, false);
      const std::size_t used = zero::used_slots(rule);
      for (std::size_t slot = used; slot < arrays.state.size(); ++slot) {
        arrays.state[slot].assign(n, T(12345));
      }
      plain::update(rule, rule.template scalars<T>(1), arrays.pointers(arrays.state.size()), n);
      INFO((name_of<Rule, T>(rule, static_cast<unsigned>(n), n)));
      for (std::size_t slot = used; slot < arrays.state.size(); ++slot) {
        CHECK(arrays.state[slot] == std::vector<T>(n, T(12345)));
      }
    }
  }
}

/// The gradient stays, and so does whatever lies beside the elements.
template <class Rule, class T>
void check_surroundings() {
  const Rule rule{};
  for (const std::size_t n : {0, 1, 3, 4, 8, 13, 64}) {
    std::mt19937 random(n);
    constexpr std::size_t margin = 16;
    Arrays<Rule, T> arrays = draw_arrays<Rule, T>(random, n + 2 * margin, false);
    const Arrays<Rule, T> before = arrays;
    plain::update(rule, rule.template scalars<T>(1),
                  arrays.pointers(zero::used_slots(rule), margin), n);
    CHECK(identical(arrays.gradient, before.gradient));
    bool kept = true;
    const auto compare = [&](const std::vector<T>& now, const std::vector<T>& then) {
      for (std::size_t i = 0; i < margin; ++i) {
        kept = kept && now[i] == then[i] && now[margin + n + i] == then[margin + n + i];
      }
    };
    compare(arrays.values, before.values);
    for (std::size_t s = 0; s < arrays.state.size(); ++s) compare(arrays.state[s], before.state[s]);
    CHECK(kept);
  }
}

// ---- Options

template <class Rule>
struct Option {
  const char* name;
  double Rule::* member;
  std::vector<double> bad;
};

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

template <class Rule>
void check_options(const std::string& optimizer, const std::vector<Option<Rule>>& options) {
  using Catch::Matchers::ContainsSubstring;
  CHECK_NOTHROW(zero::validate(Rule{}));
  for (const Option<Rule>& option : options) {
    for (const double bad : option.bad) {
      Rule rule;
      rule.*option.member = bad;
      std::ostringstream value;
      value << bad;
      INFO(option.name << " = " << bad);
      CHECK_THROWS_AS(rule.validate(), zero::UsageError);
      CHECK_THROWS_WITH(zero::validate(rule),
                        ContainsSubstring(optimizer + ": " + option.name + " is " + value.str()));
    }
  }
}

template <bool decoupled>
void check_adam_options(const std::string& name) {
  using Adam = zero::BasicAdam<decoupled>;
  const std::vector<double> negative{nan_value, -1e-3, -infinity, infinity};
  const std::vector<double> no_fraction{nan_value, -0.1, 1, 1.5, infinity, -infinity};
  check_options<Adam>(name, {{"lr", &Adam::lr, negative},
                             {"beta1", &Adam::beta1, no_fraction},
                             {"beta2", &Adam::beta2, no_fraction},
                             {"eps", &Adam::eps, negative},
                             {"weight_decay", &Adam::weight_decay, negative}});
  const Adam zeros{.lr = 0, .beta1 = 0, .beta2 = 0, .eps = 0, .weight_decay = 0};
  CHECK_NOTHROW(zeros.validate());
}

// ---- math.hpp

/// `function` on packs equals `function` on each of their numbers.
template <class T, class F>
void check_lanes(F function) {
  using Pack = zero::detail::Pack<T>;
  std::mt19937 random(1);
  std::vector<T> a = specials<T>();
  a.push_back(T(1));
  a.push_back(T(-2.5));
  std::vector<T> x, y;  // all pairs
  for (const T first : a) {
    for (const T second : a) {
      x.push_back(first);
      y.push_back(second);
    }
  }
  while (x.size() % Pack::width != 0 || x.size() < 400) {
    x.push_back(draw<T>(random, true));
    y.push_back(draw<T>(random, true));
  }
  for (std::size_t at = 0; at < x.size(); at += Pack::width) {
    std::array<T, Pack::width> out{};
    function(Pack::load(x.data() + at), Pack::load(y.data() + at)).store(out.data());
    for (std::size_t lane = 0; lane < Pack::width; ++lane) {
      const T expected = function(x[at + lane], y[at + lane]);
      if (!same(out[lane], expected)) {
        FAIL("of " << x[at + lane] << " and " << y[at + lane] << ": " << out[lane] << " in a pack, "
                   << expected << " alone");
      }
    }
  }
  SUCCEED();
}

template <class T>
void check_math() {
  const T nan = std::numeric_limits<T>::quiet_NaN();
  const T inf = std::numeric_limits<T>::infinity();
  const T tiny = std::numeric_limits<T>::denorm_min();
  CHECK(zero::sign(T(3)) == 1);
  CHECK(zero::sign(T(-0.25)) == -1);
  CHECK(zero::sign(tiny) == 1);
  CHECK(zero::sign(-tiny) == -1);
  CHECK(zero::sign(-inf) == -1);
  CHECK(zero::sign(T(0)) == 0);
  CHECK(zero::sign(-T(0)) == 0);
  CHECK(std::isnan(zero::sign(nan)));

  CHECK(zero::abs(T(-3)) == 3);
  CHECK(zero::abs(T(3)) == 3);
  CHECK(zero::abs(-inf) == inf);
  CHECK(zero::abs(-tiny) == tiny);
  CHECK_FALSE(std::signbit(zero::abs(-T(0))));
  CHECK_FALSE(std::signbit(zero::abs(T(0))));
  CHECK(std::isnan(zero::abs(nan)));

  CHECK(zero::maximum(T(1), T(2)) == 2);
  CHECK(zero::maximum(T(2), T(1)) == 2);
  CHECK(zero::maximum(-inf, T(1)) == 1);
  CHECK(std::isnan(zero::maximum(nan, T(1))));
  CHECK(std::isnan(zero::maximum(T(1), nan)));
  CHECK(std::isnan(zero::maximum(inf, nan)));
  CHECK(zero::minimum(T(1), T(2)) == 1);
  CHECK(zero::minimum(T(2), T(1)) == 1);
  CHECK(zero::minimum(inf, T(1)) == 1);
  CHECK(std::isnan(zero::minimum(nan, T(1))));
  CHECK(std::isnan(zero::minimum(T(1), nan)));

  CHECK(zero::sqrt(T(2)) == std::sqrt(T(2)));
  CHECK(std::isnan(zero::sqrt(T(-1))));
  CHECK(zero::select(true, T(1), T(2)) == 1);
  CHECK(zero::select(false, T(1), T(2)) == 2);

  // Qualified, as in a user's rule.
  check_lanes<T>([](auto a, auto) { return zero::sign(a); });
  check_lanes<T>([](auto a, auto) { return zero::abs(a); });
  check_lanes<T>([](auto a, auto b) { return zero::maximum(a, b); });
  check_lanes<T>([](auto a, auto b) { return zero::minimum(a, b); });
  check_lanes<T>([](auto a, auto) { return zero::sqrt(a); });
  check_lanes<T>([](auto a, auto b) { return a + b; });
  check_lanes<T>([](auto a, auto b) { return a - b; });
  check_lanes<T>([](auto a, auto b) { return a * b; });
  check_lanes<T>([](auto a, auto b) { return a / b; });
  check_lanes<T>([](auto a, auto) { return -a; });
  check_lanes<T>([](auto a, auto b) { return zero::select(a < b, a, b); });
  check_lanes<T>([](auto a, auto b) { return zero::select(a <= b, a, b); });
  check_lanes<T>([](auto a, auto b) { return zero::select(a > b, a, b); });
  check_lanes<T>([](auto a, auto b) { return zero::select(a >= b, a, b); });
  check_lanes<T>([](auto a, auto b) { return zero::select(a == b, a, b); });
  check_lanes<T>([](auto a, auto b) { return zero::select(a != b, a, b); });
  check_lanes<T>([](auto a, auto b) { return a * T(3) - T(2) * b; });
}

static_assert(zero::power(0.5, 3) == 0.125);
static_assert(zero::power(0.999, 6) == 0.994014980014994);  // correctly rounded
static_assert(zero::power(0, 0) == 1 && zero::power(0, 5) == 0 && zero::power(7, 1) == 7);

}  // namespace

TEST_CASE("rules: an option that makes no sense is named, with its value") {
  check_adam_options<false>("Adam");
  check_adam_options<true>("AdamW");
  using zero::Sgd;
  const std::vector<double> negative{nan_value, -1e-3, -infinity, infinity};
  check_options<Sgd>("Sgd", {{"lr", &Sgd::lr, negative},
                             {"momentum", &Sgd::momentum, negative},
                             {"dampening", &Sgd::dampening, {nan_value, infinity, -infinity}},
                             {"weight_decay", &Sgd::weight_decay, negative}});
  CHECK_NOTHROW((Sgd{.lr = 0}.validate()));
  CHECK_NOTHROW((Sgd{.momentum = 0.9, .dampening = -0.5}.validate()));  // PyTorch takes it, too

  using Catch::Matchers::ContainsSubstring;
  CHECK_THROWS_WITH((Sgd{.nesterov = true}.validate()),
                    ContainsSubstring("Sgd: momentum is 0") && ContainsSubstring("nesterov"));
  CHECK_THROWS_WITH((Sgd{.momentum = 0.9, .dampening = 0.1, .nesterov = true}.validate()),
                    ContainsSubstring("Sgd: dampening is 0.1") && ContainsSubstring("nesterov"));
  CHECK_NOTHROW((Sgd{.momentum = 0.9, .nesterov = true}.validate()));
  CHECK_NOTHROW(zero::validate(SignSgd{.lr = nan_value}));  // a rule need not validate
}

TEST_CASE("rules: which slots are used") {
  CHECK(zero::used_slots(zero::Adam{}) == 2);
  CHECK(zero::used_slots(zero::AdamW{.amsgrad = true}) == 3);
  CHECK(zero::used_slots(zero::Sgd{}) == 0);
  CHECK(zero::used_slots(zero::Sgd{.momentum = 0.5}) == 1);
  CHECK(zero::used_slots(SignSgd{}) == 0);
  CHECK(zero::used_slots(ClippedSign{}) == 2);
}

TEMPLATE_TEST_CASE("rules: the same bits wherever arrays are cut, and as the scalar rule", "",
                   float, double) {
  check_bits<zero::Adam, TestType>();
  check_bits<zero::AdamW, TestType>();
  check_bits<zero::Sgd, TestType>();
  check_bits<SignSgd, TestType>();
  check_bits<ClippedSign, TestType>();
}

TEMPLATE_TEST_CASE("rules: unused slots are neither read nor written", "", float, double) {
  check_untouched<zero::Adam, TestType>();
  check_untouched<zero::AdamW, TestType>();
  check_untouched<zero::Sgd, TestType>();
}

TEMPLATE_TEST_CASE("rules: nothing beside the elements is touched", "", float, double) {
  check_surroundings<zero::Adam, TestType>();
  check_surroundings<zero::Sgd, TestType>();
  check_surroundings<ClippedSign, TestType>();
}

TEMPLATE_TEST_CASE("rules: NaN and infinity in a gradient stay in their element", "", float,
                   double) {
  using T = TestType;
  const zero::Adam rule;
  constexpr std::size_t n = 11;
  for (const T bad : {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity()}) {
    for (std::size_t where = 0; where < n; ++where) {
      Arrays<zero::Adam, T> arrays{std::vector<T>(n, T(1)), std::vector<T>(n, T(0.5)), {}};
      for (auto& slot : arrays.state) slot.assign(n, T(0));
      arrays.gradient[where] = bad;
      plain::update(rule, rule.scalars<T>(1), arrays.pointers(2), n);
      for (std::size_t i = 0; i < n; ++i) CHECK(std::isnan(arrays.values[i]) == (i == where));
    }
  }
}

TEMPLATE_TEST_CASE("math: numbers, and packs number by number", "", float, double) {
  check_math<TestType>();
}

TEST_CASE("math: power is as good as its last bit") {
  std::mt19937 random(1);
  for (const double base : {0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 0.9999, 1., 1.01, 2., 3., 1e-3}) {
    for (int n = 0; n < 300; ++n) {
      const auto exponent = static_cast<std::int64_t>(n <= 64 ? n : random() % 100'000);
      // Elsewhere `long double` is no better than what is tested.
      const long double exact = std::pow(static_cast<long double>(base), exponent);
      if (!(exact > 2 * std::numeric_limits<double>::min())) continue;
      if (exact > std::numeric_limits<double>::max() / 2) continue;
      const bool wide = std::numeric_limits<long double>::digits >= 64;
      const long double bound =
          wide ? 0x1p-53L + 0x1p-64L * static_cast<long double>(exponent + 4) : 1e-14L;
      CAPTURE(base, exponent);
      CHECK(std::abs(static_cast<long double>(zero::power(base, exponent)) - exact) <=
            bound * exact);
    }
  }
  // What Adam needs: 1 - beta^t, as good as rounding beta^t itself would make it.
  for (const double beta : {0.9, 0.99, 0.999, 0.9999}) {
    for (const std::int64_t t : {1, 2, 3, 10, 100, 999, 12'345, 1'000'000}) {
      const long double exact =
          -std::expm1(static_cast<long double>(t) * std::log(static_cast<long double>(beta)));
      const auto got = static_cast<long double>(1 - zero::power(beta, t));
      CAPTURE(beta, t);
      CHECK(std::abs(got - exact) <= 0x1p-53L + 0x1p-53L * exact);
    }
  }
  constexpr std::int64_t forever = std::numeric_limits<std::int64_t>::max();
  CHECK(zero::power(0.999, forever) == 0);
  CHECK(zero::power(1, forever) == 1);
  CHECK(std::isinf(zero::power(1.001, forever)));
  CHECK(zero::power(2, -0) == 1);
  CHECK(zero::power(2, 1023) == std::ldexp(1., 1023));
  CHECK(std::isinf(zero::power(2, 1024)));
  CHECK(zero::power(0.5, 1074) == std::numeric_limits<double>::denorm_min());
  CHECK(zero::power(std::numeric_limits<double>::denorm_min(), 1) ==
        std::numeric_limits<double>::denorm_min());
  CHECK(zero::power(0.5, 1100) == 0);
  CHECK(zero::power(-2, 3) == -8);
  CHECK(zero::power(-2, 2) == 4);
  CHECK(std::isnan(zero::power(nan_value, 2)));
}

namespace {

/// As a user would write it: compound assignment, and a scalar where a number of the element's
/// kind is meant.
struct Compound {
  double lr = 0.1;
  static constexpr std::array<std::string_view, 1> slots{"largest"};
  template <class Real>
  struct Scalars {
    Real lr, floor;
  };
  template <class Real>
  ZERO_HOST_DEVICE Scalars<Real> scalars(std::int64_t) const {
    return {static_cast<Real>(lr), static_cast<Real>(-0.5)};
  }
  template <class X, class Real>
  ZERO_HOST_DEVICE static void update(X& value, const X& gradient, X& largest,
                                      const Scalars<Real>& s) {
    largest = zero::maximum(largest, zero::abs(gradient));
    X step = gradient;
    step *= s.lr;
    step /= largest;
    value -= step;
    value += zero::select(value > X(0), step, X(0));
    value = zero::maximum(value, s.floor);
    value = zero::minimum(value, X(2));
  }
};
static_assert(zero::UpdateRule<Compound, float> && zero::UpdateRule<Compound, double>);

}  // namespace

TEMPLATE_TEST_CASE("a rule may use compound assignment and scalars", "", float, double) {
  using T = TestType;
  std::vector<T> values, gradients, largest;
  for (int i = 0; i < 37; ++i) {
    values.push_back(static_cast<T>(i % 7) / 3 - 1);
    gradients.push_back(static_cast<T>(i % 11) / 5 - 1);
    largest.push_back(static_cast<T>(i % 3) / 4 + T(0.125));
  }
  std::vector<T> expected = values, expected_largest = largest;
  const Compound rule;
  const auto scalars = rule.scalars<T>(1);
  for (std::size_t i = 0; i < values.size(); ++i) {
    Compound::update(expected[i], gradients[i], expected_largest[i], scalars);
  }
  plain::Arrays<T, 1> arrays{values.data(), gradients.data(), {largest.data()}};
  plain::update(rule, scalars, arrays, values.size());
  CHECK(values == expected);
  CHECK(largest == expected_largest);
}
