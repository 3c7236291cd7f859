// SPDX-License-Identifier: Apache-2.0
// Ranks with unlike numbers of batches: the bits of a serial loop over the batches that there are,
// and what ends a join early.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "plain_update.hpp"
#include "ranks.hpp"
#include "zero/join.hpp"
#include "zero/observer.hpp"
#include "zero/optim/adam.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;
using ranks::Failure;
using ranks::Model;
using Kind = ranks::Failure::Kind;
using zero::JoinEnd;
using zero::JoinMean;
using zero::JoinOptions;
using Counts = std::vector<int>;

/// Looking into each other's memory, and through collectives alone.
using Ways = std::tuple<ranks::Way<true, zero::Stage1, zero::NoView>,
                        ranks::Way<false, zero::Stage1, zero::NoView>>;

struct UpdateCounter {
  std::size_t updates = 0;
  void begin(const zero::Event&) {}
  void end(const zero::Event& event) { updates += event.phase == zero::Phase::update ? 1 : 0; }
};

constexpr zero::Adam rule{.lr = 0.05};
constexpr std::size_t on_rank_0_alone = 1;  ///< parameter whose gradient only rank 0 has
constexpr std::size_t nowhere = 3;          ///< parameter without a gradient

Model<> make_model() {
  Model<> model;
  for (const std::size_t elements : std::array<std::size_t, 5>{31, 3, 17, 5, 40}) {
    model.emplace_back("p" + std::to_string(model.size()), std::vector<std::size_t>{elements});
  }
  ranks::draw_values(model);
  return model;
}

bool has_gradient(int rank, std::size_t i) {
  return i != nowhere && (i != on_rank_0_alone || rank == 0);
}

/// As a backward pass would: makes the gradients that this rank has.
void backward(Model<>& model, int rank, int batch) {
  for (auto& tensor : model) tensor.own_gradient().resize(tensor.values().size());
  ranks::draw_gradients(model, rank, batch);
  for (std::size_t i = 0; i < model.size(); ++i) {
    if (!has_gradient(rank, i)) std::vector<float>().swap(model[i].own_gradient());
  }
}

/// What is left of the last batch; any use of it would show.
void spoil(Model<>& model) {
  for (auto& tensor : model) {
    std::fill(tensor.own_gradient().begin(), tensor.own_gradient().end(),
              std::numeric_limits<float>::quiet_NaN());
  }
}

template <class Way, class Comm>
auto make_optimizer(Model<>& model, Comm& comm, zero::Settings settings = {}) {
  return Way::optimizer(rule, model, comm, settings, 64, UpdateCounter{});
}

/// Values and step counts: what all ranks must agree about.
struct Trained {
  std::vector<std::vector<float>> values{};
  std::vector<std::int64_t> steps{};
  [[maybe_unused]] friend bool operator==(const Trained&, const Trained&) = default;
};

template <class Optimizer>
Trained trained(const Model<>& model, const Optimizer& optimizer) {
  Trained all;
  for (std::size_t i = 0; i < model.size(); ++i) {
    all.values.emplace_back(model[i].values().begin(), model[i].values().end());
    all.steps.push_back(optimizer.steps(i));
  }
  all.steps.push_back(optimizer.steps());
  return all;
}

/// The sum in rank order of the gradients of a batch, of the ranks that have such a batch.
struct Batch {
  Batch(const Counts& counts, int batch) {
    for (std::size_t r = 0; r < counts.size(); ++r) {
      if (batch >= counts[r]) continue;
      Model<> model = make_model();
      backward(model, static_cast<int>(r), batch);
      sums.resize(model.size());
      for (std::size_t i = 0; i < model.size(); ++i) {
        const std::vector<float>& gradient = model[i].own_gradient();
        sums[i].resize(std::max(sums[i].size(), gradient.size()));
        for (std::size_t k = 0; k < gradient.size(); ++k) sums[i][k] += gradient[k];
      }
      ++ranks;
    }
  }
  std::vector<std::vector<float>> sums{};  ///< empty where no rank has one
  int ranks = 0;
};

/// A loop over whole tensors and the batches that there are.
Trained serial(const Counts& counts, JoinMean mean, double (*lr_at)(int) = nullptr) {
  const Model<> model = make_model();
  Trained all;
  for (const auto& tensor : model) {
    all.values.emplace_back(tensor.values().begin(), tensor.values().end());
  }
  all.steps.assign(model.size() + 1, 0);
  std::vector<std::array<std::vector<float>, zero::Adam::slots.size()>> state(model.size());
  const int steps = *std::max_element(counts.begin(), counts.end());
  for (int step = 0; step < steps; ++step) {
    Batch batch(counts, step);
    const double ranks =
        mean == JoinMean::all_ranks ? static_cast<double>(counts.size()) : batch.ranks;
    zero::Adam now = rule;
    if (lr_at != nullptr) now.lr = lr_at(step);
    ++all.steps.back();
    for (std::size_t i = 0; i < model.size(); ++i) {
      std::vector<float>& sum = batch.sums[i];
      if (sum.empty()) continue;
      for (float& x : sum) x *= static_cast<float>(1.0 / ranks);
      plain::Arrays<float, zero::Adam::slots.size()> arrays{all.values[i].data(), sum.data(), {}};
      for (std::size_t s = 0; s < zero::used_slots(rule); ++s) {
        state[i][s].resize(sum.size());
        arrays.state[s] = state[i][s].data();
      }
      plain::update(now, now.scalars<float>(++all.steps[i]), arrays, sum.size());
    }
  }
  return all;
}

/// `body(rank, model, comm, optimizer)` on each rank; what each threw.
template <class Way, class Body>
std::vector<Failure> on_ranks(std::size_t world, zero::Settings settings, Body body) {
  std::vector<Failure> failures(world);
  ranks::rethrow_any(ranks::run(
      static_cast<int>(world),
      [&](zero::InProcessCommunicator inner) {
        Model<> model = make_model();
        auto comm = Way::wrap(inner);
        auto optimizer = make_optimizer<Way>(model, comm, settings);
        const auto r = static_cast<std::size_t>(inner.rank());
        failures[r] = ranks::attempt([&] { body(r, model, comm, optimizer); });
      },
      {.timeout = std::chrono::seconds(30)}, ranks::Leaves::when_all_have));
  return failures;
}

void check_none_failed(const std::vector<Failure>& failures) {
  for (const Failure& failure : failures) CHECK(failure.text == "");
}

/// Trains `counts[r]` batches on rank r, within a join.
template <class Way>
std::vector<Trained> train(const Counts& counts, const JoinOptions& options) {
  std::vector<Trained> all(counts.size());
  std::vector<std::size_t> updates(counts.size());
  std::vector<std::size_t> buckets(counts.size());
  check_none_failed(
      on_ranks<Way>(counts.size(), {}, [&](std::size_t r, Model<>& model, auto&, auto& optimizer) {
        spoil(model);  // of a rank that has no batch at all
        optimizer.join(
            [&] {
              for (int batch = 0; batch < counts[r]; ++batch) {
                backward(model, static_cast<int>(r), batch);
                // Some say what is ready, some leave it to the step.
                if (batch % 2 == 0 && has_gradient(static_cast<int>(r), 0)) {
                  optimizer.mark_ready(0);
                }
                optimizer.step();
              }
              spoil(model);
            },
            options);
        all[r] = trained(model, optimizer);
        updates[r] = optimizer.observer().updates;
        buckets[r] = optimizer.layout().buckets(0);
      }));
  for (std::size_t r = 0; r < counts.size(); ++r) {
    CHECK(updates[r] == buckets[r] * static_cast<std::size_t>(all[r].steps.back()));
  }
  return all;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("PT #54318: ranks with unlike numbers of batches", "[peer_faults]", Ways) {
  std::vector<Counts> cases{{0, 2, 1}, {4, 0}, {0, 0, 0}, {2, 2}, {3, 1, 0, 2}};
  for (int world = 1; world <= 4; ++world) {
    Counts counts;
    for (int r = 0; r < world; ++r) counts.push_back(3 + r);
    cases.push_back(counts);
  }
  for (const Counts& counts : cases) {
    for (const JoinMean mean : {JoinMean::all_ranks, JoinMean::ranks_with_input}) {
      INFO("world " << counts.size() << ", rank 0 has " << counts[0] << " batches, mean "
                    << static_cast<int>(mean));
      const Trained right = serial(counts, mean);
      CHECK(right.steps[on_rank_0_alone] == counts[0]);
      CHECK(right.steps[nowhere] == 0);
      for (const Trained& mine : train<TestType>(counts, {.mean = mean})) CHECK(mine == right);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("clipping and loss scales while some serve", "", Ways) {
  const Counts counts{1, 5, 3};
  constexpr int infinite = 3;  // the batch that is skipped, when rank 1 alone has input
  const auto settings = [](double scale) {
    return zero::Settings{
        .gradient_scale = scale,
        .loss_scale = zero::LossScale{.scale = 1, .growth = 2, .backoff = 0.25, .interval = 1}};
  };
  const auto spoil_batch = [](int batch, Model<>& model) {
    if (batch == infinite) model[0].own_gradient()[2] = std::numeric_limits<float>::infinity();
  };
  // The same batches on one rank, already summed.
  Trained right;
  std::vector<std::optional<double>> norms;
  double loss_scale = 0;
  check_none_failed(on_ranks<TestType>(
      1, settings(1.0 / 3), [&](std::size_t, Model<>& model, auto&, auto& optimizer) {
        optimizer.clip_grad_norm(0.5);
        for (int batch = 0; batch < 5; ++batch) {
          const Batch all(counts, batch);
          for (std::size_t i = 0; i < model.size(); ++i) model[i].own_gradient() = all.sums[i];
          spoil_batch(batch, model);
          norms.push_back(optimizer.step().outcome().gradient_norm);
        }
        right = trained(model, optimizer);
        loss_scale = optimizer.loss_scale();
      }));
  REQUIRE(right.steps.back() == 4);
  REQUIRE(norms[0] > 0.5);
  std::vector<Trained> all(3);
  std::vector<std::optional<double>> norms_of_1;
  std::vector<double> loss_scales(3);
  check_none_failed(on_ranks<TestType>(
      3, settings(1.0 / 3), [&](std::size_t r, Model<>& model, auto&, auto& optimizer) {
        optimizer.clip_grad_norm(0.5);
        optimizer.join([&] {
          for (int batch = 0; batch < counts[r]; ++batch) {
            backward(model, static_cast<int>(r), batch);
            spoil_batch(batch, model);
            const auto norm = optimizer.step().outcome().gradient_norm;
            if (r == 1) norms_of_1.push_back(norm);
          }
        });
        all[r] = trained(model, optimizer);
        loss_scales[r] = optimizer.loss_scale();
      }));
  for (const Trained& mine : all) CHECK(mine == right);
  norms[infinite] = norms_of_1[infinite];  // what is not finite differs from itself
  CHECK(norms_of_1 == norms);
  CHECK(loss_scales == std::vector<double>(3, loss_scale));
}

TEMPLATE_LIST_TEST_CASE("ranks that serve follow a schedule", "", Ways) {
  constexpr auto lr_at = [](int step) { return 0.1 / (1 + step); };
  const Counts counts{1, 4, 2};
  std::vector<Trained> all(3);
  const auto train_with = [&](bool follow) {
    return on_ranks<TestType>(3, {}, [&](std::size_t r, Model<>& model, auto&, auto& optimizer) {
      const auto schedule = [&] {
        optimizer.group(0).lr = lr_at(static_cast<int>(optimizer.steps()));
      };
      JoinOptions options;
      if (follow) options.before_serving = schedule;
      optimizer.join(
          [&] {
            for (int batch = 0; batch < counts[r]; ++batch) {
              schedule();
              backward(model, static_cast<int>(r), batch);
              optimizer.step();
            }
          },
          options);
      all[r] = trained(model, optimizer);
    });
  };
  check_none_failed(train_with(true));
  for (const Trained& mine : all) CHECK(mine == serial(counts, JoinMean::all_ranks, lr_at));
  for (const Failure& failure : train_with(false)) {
    CHECK(failure.kind == Kind::usage);
    CHECK_THAT(failure.text, ContainsSubstring("JoinOptions::before_serving"));
  }
}

TEMPLATE_LIST_TEST_CASE("several optimizers are served in their order", "", Ways) {
  const Counts counts{4, 0, 2};
  const Trained right = serial(counts, JoinMean::all_ranks);
  std::vector<Trained> first(3), second(3);
  std::vector<Failure> failures =
      on_ranks<TestType>(3, {}, [&](std::size_t r, Model<>& model, auto& comm, auto& optimizer) {
        Model<> other = make_model();
        auto also = make_optimizer<TestType>(other, comm);
        zero::join(
            [&] {
              for (int batch = 0; batch < counts[r]; ++batch) {
                backward(model, static_cast<int>(r), batch);
                backward(other, static_cast<int>(r), batch);
                optimizer.step();
                also.step();
              }
            },
            optimizer, also);
        first[r] = trained(model, optimizer);
        second[r] = trained(other, also);
      });
  check_none_failed(failures);
  for (std::size_t r = 0; r < 3; ++r) {
    CHECK(first[r] == right);
    CHECK(second[r] == right);
  }
  // A body that steps them in another order is told, as are those who serve it.
  failures =
      on_ranks<TestType>(3, {}, [&](std::size_t r, Model<>& model, auto& comm, auto& optimizer) {
        Model<> other = make_model();
        auto also = make_optimizer<TestType>(other, comm);
        backward(model, static_cast<int>(r), 0);
        zero::join(
            [&] {
              if (r == 1) also.step();
            },
            optimizer, also);
      });
  for (const Failure& failure : failures) {
    CHECK(failure.kind == Kind::usage);
    CHECK_THAT(failure.text, ContainsSubstring("another optimizer"));
  }
}

TEMPLATE_LIST_TEST_CASE("JoinEnd::raise: all ranks hear in which step inputs ended", "", Ways) {
  const JoinOptions raise{.when_first_ends = JoinEnd::raise};
  const Counts counts{4, 2, 3};
  std::vector<std::array<int, 2>> ended(3);
  std::vector<Trained> at_end(3), afterwards(3);
  check_none_failed(
      on_ranks<TestType>(3, {}, [&](std::size_t r, Model<>& model, auto&, auto& optimizer) {
        const auto step = [&](int batch) {
          backward(model, static_cast<int>(r), batch);
          optimizer.step();
        };
        try {
          optimizer.join(
              [&] {
                for (int batch = 0; batch < counts[r]; ++batch) step(batch);
                optimizer.group(0).lr /= 2;  // for the step that is not taken: may differ
              },
              raise);
        } catch (const zero::InputsEnded& end) {
          ended[r][0] = end.rank();
        }
        optimizer.group(0).lr = rule.lr;
        at_end[r] = trained(model, optimizer);
        // Bodies may catch it, and return; further steps there would be answered by nobody.
        const Failure of_join = ranks::attempt([&] {
          optimizer.join(
              [&] {
                if (r == 0) return;
                try {
                  step(2);
                } catch (const zero::InputsEnded& end) {
                  ended[r][1] = end.rank();
                  if (ranks::attempt([&] { optimizer.mark_ready(0); }).kind != Kind::usage ||
                      ranks::attempt([&] { optimizer.step(); }).kind != Kind::usage) {
                    ended[r][1] = -1;
                  }
                }
              },
              raise);
        });
        if ((of_join.kind == Kind::none) != (r != 0)) ended[r][1] = -2;
        // As many batches everywhere: nobody is left over.
        optimizer.join([&] { step(5); }, raise);
        afterwards[r] = trained(model, optimizer);
      }));
  CHECK(ended == std::vector<std::array<int, 2>>{{1, 0}, {1, 0}, {1, 0}});
  const Trained right = serial({2, 2, 2}, JoinMean::all_ranks);
  for (const Trained& mine : at_end) CHECK(mine == right);
  for (const Trained& mine : afterwards) {
    CHECK(mine == afterwards[0]);
    CHECK(mine.steps.back() == 3);
  }
}

TEMPLATE_LIST_TEST_CASE("what leaves a body reaches those who serve it", "", Ways) {
  const std::vector<Failure> failures =
      on_ranks<TestType>(3, {}, [&](std::size_t r, Model<>& model, auto&, auto& optimizer) {
        optimizer.join([&] {
          if (r == 0) return;
          for (int batch = 0; batch < 3; ++batch) {
            backward(model, static_cast<int>(r), batch);
            if (r == 1 && batch == 1) {
              optimizer.mark_ready(4);  // some of it is on its way
              throw std::runtime_error("the disk is full");
            }
            optimizer.step();
          }
        });
      });
  CHECK(failures[1].kind == Kind::other);
  CHECK(failures[1].text == "the disk is full");
  for (const std::size_t r : {std::size_t{0}, std::size_t{2}}) {
    CHECK(failures[r].kind == Kind::communicator);
    CHECK(failures[r].cause == zero::CommunicatorFailure::aborted);
    CHECK_THAT(failures[r].text, ContainsSubstring("the disk is full"));
  }
}

TEMPLATE_LIST_TEST_CASE("what one rank's join refuses, all refuse, and nothing has changed", "",
                        Ways) {
  /// `misuse(r, model, optimizer)` is refused on all ranks; then they train as if it never was.
  const auto check = [](const std::string& text, zero::Settings settings, auto misuse) {
    INFO(text);
    std::vector<Failure> refusals(3);
    std::vector<Trained> all(3);
    check_none_failed(
        on_ranks<TestType>(3, settings, [&](std::size_t r, Model<>& model, auto&, auto& optimizer) {
          const std::string before = ranks::snapshot(model, optimizer);
          backward(model, static_cast<int>(r), 7);
          refusals[r] = ranks::attempt([&] { misuse(r, model, optimizer); });
          if (ranks::snapshot(model, optimizer) != before) refusals[r] = {};
          for (int batch = 0; batch < 2; ++batch) {
            backward(model, static_cast<int>(r), batch);
            if (settings.gradients == zero::Gradients::reduced) spoil(model);
            if (settings.gradients == zero::Gradients::reduced) break;
            optimizer.step();
          }
          all[r] = trained(model, optimizer);
        }));
    for (const Failure& refusal : refusals) {
      CHECK(refusal.kind == Kind::usage);
      CHECK_THAT(refusal.text, ContainsSubstring(text));
    }
    if (settings.gradients == zero::Gradients::reduced) return;
    for (const Trained& mine : all) CHECK(mine == serial({2, 2, 2}, JoinMean::all_ranks));
  };
  const auto no_batch = [] {};

  check("rank 1 steps outside of a join", {}, [&](std::size_t r, Model<>&, auto& optimizer) {
    r == 1 ? (void)optimizer.step() : optimizer.join(no_batch);
  });
  check("rank 1 steps in a join", {}, [&](std::size_t r, Model<>&, auto& optimizer) {
    r != 1 ? (void)optimizer.step() : optimizer.join([&] { optimizer.step(); });
  });
  check("rank 2's JoinOptions differ", {}, [&](std::size_t r, Model<>&, auto& optimizer) {
    const auto end = r == 2 ? JoinEnd::raise : JoinEnd::serve;
    optimizer.join(no_batch, {.when_first_ends = end});
  });
  check(
      "rank 1 refused the step, so no rank took it and nothing has changed: join: the body ended "
      "with gradients marked",
      {}, [&](std::size_t r, Model<>&, auto& optimizer) {
        optimizer.join([&] {
          if (r == 1) optimizer.mark_ready(4);
          if (r == 2) optimizer.step();
        });
      });
  check("parameter 2 ('p2') is still leased", {}, [&](std::size_t r, Model<>&, auto& optimizer) {
    std::optional<decltype(optimizer.gradient(2))> lease;
    optimizer.join([&] {
      if (r == 1) lease.emplace(optimizer.gradient(2));
    });
  });
  check("still accumulating", {}, [&](std::size_t r, Model<>&, auto& optimizer) {
    std::optional<decltype(optimizer.accumulate())> scope;
    optimizer.join([&] {
      if (r == 1) scope.emplace(optimizer.accumulate());
    });
  });
  check("already", {}, [&](std::size_t, Model<>&, auto& optimizer) {
    zero::join(no_batch, optimizer, optimizer);
  });
  check("Settings::gradient_scale says otherwise", {.gradient_scale = 1.0 / 3},
        [&](std::size_t, Model<>&, auto& optimizer) {
          optimizer.join(no_batch, {.mean = JoinMean::ranks_with_input});
        });
  check("no reduced gradients", {.gradients = zero::Gradients::reduced},
        [&](std::size_t, Model<>&, auto& optimizer) { optimizer.join(no_batch); });
}

TEMPLATE_LIST_TEST_CASE("a join within a join is refused", "", Ways) {
  const std::vector<Failure> failures =
      on_ranks<TestType>(2, {}, [&](std::size_t, Model<>&, auto&, auto& optimizer) {
        optimizer.join([&] { optimizer.join([] {}); });
      });
  for (const Failure& failure : failures) {
    CHECK(failure.kind == Kind::usage);
    CHECK_THAT(failure.text, ContainsSubstring("don't nest joins"));
  }
}
