// SPDX-License-Identifier: Apache-2.0
// The framework of examples/bert alone: gradients against finite differences, exp against the
// library's, and sums whose bits don't depend on where the memory lies.
#include "bert/model.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>
#include <zero/bfloat16.hpp>

#include "bert/batch.hpp"
#include "bert/config.hpp"
#include "bert/input_error.hpp"
#include "bert/keeper.hpp"
#include "bert/kernels.hpp"
#include "catch.hpp"

namespace {

constexpr bert::BatchSize size{3, 7, 2};

bert::Config small() {
  return {.name = "test",
          .layers = 2,
          .hidden = 12,
          .heads = 3,
          .intermediate = 20,
          .vocabulary = 17,
          .positions = 9,
          .segments = 2};
}

bert::Batch batch() {
  bert::Batch made;
  made.sequences = size.sequences;
  made.length = size.length;
  made.predictions = size.predictions;
  for (std::size_t i = 0; i < size.tokens(); ++i) {
    made.tokens.push_back(static_cast<std::int32_t>(i * 5 % 17));
    made.segments.push_back(static_cast<std::int32_t>(i % size.length / 4));
  }
  made.positions = {1, 5, 2, 3, 4, 6};
  made.labels = {3, 0, 16, 7, 7, 9};
  made.weights = {1, 1, 1, 1, 1, 0};
  return made;
}

// Larger weights than a model starts with, so that no gradient is next to nothing.
template <class T>
void spread(bert::Model<T>& model) {
  for (auto& tensor : model.tensors()) {
    std::vector<double> noise(tensor.size);
    bert::fill_normal(noise.data(), tensor.size, 0.3, 7);
    for (std::size_t i = 0; i < tensor.size; ++i) {
      using Real = bert::compute_t<T>;
      T& value = tensor.values.get()[i];
      value = static_cast<T>(static_cast<Real>(value) + static_cast<Real>(noise[i]));
    }
  }
}

// Weights are there only while they are acquired, and a gradient's memory is NaN at first.
template <class T>
class StrictKeeper final : public bert::Keeper<T> {
 public:
  StrictKeeper(bert::Model<T>& model, std::uint64_t seed)
      : tensors_(model.tensors()),
        gradients_(tensors_.size()),
        times_(tensors_.size()),
        in_use_(1 + static_cast<std::size_t>(tensors_.back().shape.unit)) {
    for (const auto& tensor : tensors_) shapes_.push_back(tensor.shape);
    initial_.emplace(shapes_, seed);
  }
  void next_step() { std::fill(times_.begin(), times_.end(), 0); }

  void acquire(int unit) override {
    REQUIRE_FALSE(in_use_.at(static_cast<std::size_t>(unit)));
    in_use_[static_cast<std::size_t>(unit)] = true;
    for (auto& tensor : tensors_) {
      if (tensor.shape.unit != unit) continue;
      tensor.values = bert::make_array<T>(tensor.size);
      for (std::size_t i = 0; i < tensor.size; ++i) {
        const double value = (*initial_)(tensor.shape.name, i);
        tensor.values.get()[i] = static_cast<T>(static_cast<bert::compute_t<T>>(value));
      }
    }
  }
  void release(int unit) override {
    REQUIRE(in_use_.at(static_cast<std::size_t>(unit)));
    in_use_[static_cast<std::size_t>(unit)] = false;
    for (auto& tensor : tensors_) {
      if (tensor.shape.unit == unit) tensor.values.reset();
    }
  }
  T* gradient(std::size_t i) override {
    constexpr auto none = std::numeric_limits<bert::compute_t<T>>::quiet_NaN();
    gradients_[i].assign(tensors_[i].size, static_cast<T>(none));
    return gradients_[i].data();
  }
  void complete(std::size_t i) override { REQUIRE(++times_[i] == 1); }

  [[nodiscard]] const std::vector<T>& gradient_of(std::size_t i) const {
    REQUIRE(times_[i] == 1);
    return gradients_[i];
  }
  [[nodiscard]] bool nothing_in_use() const {
    return std::find(in_use_.begin(), in_use_.end(), true) == in_use_.end();
  }

 private:
  std::vector<bert::Tensor<T>>& tensors_;
  std::vector<bert::Shape> shapes_;
  std::optional<bert::InitialValues<T>> initial_;
  std::vector<std::vector<T>> gradients_;
  std::vector<int> times_;
  std::vector<bool> in_use_;
};

void require_gradients(double dropout) {
  bert::Model<double> model(small(), size, 1);
  spread(model);
  const bert::Batch data = batch();
  const double loss = model.forward(data, dropout, 42);
  model.backward(3);
  REQUIRE(std::isfinite(loss));
  std::vector<std::vector<double>> gradients;
  for (const auto& tensor : model.tensors()) {
    gradients.emplace_back(tensor.gradient.get(), tensor.gradient.get() + tensor.size);
  }
  const double h = 1e-5;
  for (std::size_t t = 0; t < model.tensors().size(); ++t) {
    auto& tensor = model.tensors()[t];
    double most = 0, error = 0;
    for (std::size_t i = 0; i < tensor.size; i += std::max<std::size_t>(1, tensor.size / 23)) {
      double& value = tensor.values.get()[i];
      const double before = value;
      value = before + h;
      const double above = model.forward(data, dropout, 42);
      value = before - h;
      const double below = model.forward(data, dropout, 42);
      value = before;
      const double slope = 3 * (above - below) / (2 * h);
      most = std::max(most, std::abs(slope));
      error = std::max(error, std::abs(slope - gradients[t][i]));
    }
    INFO(tensor.shape.name << ": the largest slope " << most << ", the largest error " << error);
    // A key's bias moves all scores of a query alike, which softmax doesn't see.
    if (!tensor.shape.name.ends_with("key.bias")) CHECK(most > 1e-4);
    CHECK(error < 1e-7);
  }
}

}  // namespace

TEMPLATE_TEST_CASE("a keeper is asked for what is used, and told of what is not", "[bert]", float,
                   zero::bfloat16) {
  bert::Model<TestType> model(small(), size, 1);
  bert::Model<TestType> bare(small(), size, 1, {.values = false, .gradients = false});
  StrictKeeper<TestType> keeper(bare, 1);
  bare.keep_by(&keeper);
  const bert::Batch data = batch();
  for (int step = 0; step < 2; ++step) {
    keeper.next_step();
    (void)bare.forward(data, 0.1, 6);  // a forward alone may come between
    CHECK(model.forward(data, 0.1, 7) == bare.forward(data, 0.1, 7));
    model.backward(3);
    bare.backward(3);
    CHECK(keeper.nothing_in_use());
    for (std::size_t i = 0; i < model.tensors().size(); ++i) {
      const auto& tensor = model.tensors()[i];
      INFO(tensor.shape.name);
      CHECK(std::memcmp(tensor.gradient.get(), keeper.gradient_of(i).data(),
                        tensor.size * sizeof(TestType)) == 0);
    }
  }
}

TEST_CASE("gradients are the slopes of the loss", "[bert]") { require_gradients(0); }

TEST_CASE("gradients are the slopes of the loss with dropout", "[bert]") { require_gradients(0.2); }

TEST_CASE("dropout keeps the expected value and drops its share", "[bert]") {
  std::vector<float> x(100000, 1.0F);
  bert::dropout(x.data(), x.size(), 0.25, 5);
  const auto zeros = std::count(x.begin(), x.end(), 0.0F);
  CHECK(std::abs(static_cast<double>(zeros) - 25000) < 700);
  CHECK(*std::max_element(x.begin(), x.end()) == 1 / 0.75F);
}

TEST_CASE("a model starts at the loss of guessing", "[bert]") {
  bert::Config config = small();
  config.vocabulary = 300;
  bert::Model<float> model(config, size, 3);
  CHECK(std::abs(model.forward(batch()) - std::log(300.0F)) < 0.1F);
}

TEST_CASE("a loss that diverges keeps growing", "[bert]") {
  std::vector<float> logits{0, 1000, 3};
  CHECK(bert::softmax(logits.data(), 3) == 1000.0F);  // of the label 0 the loss would be 1000
  CHECK(logits[1] == 1.0F);
}

TEST_CASE("float computes what double does", "[bert]") {
  bert::Model<double> exact(small(), size, 1);
  bert::Model<float> model(small(), size, 1);
  bert::Model<zero::bfloat16> narrow(small(), size, 1);
  // All three from the numbers that the narrowest can hold.
  spread(narrow);
  for (std::size_t t = 0; t < exact.tensors().size(); ++t) {
    for (std::size_t i = 0; i < exact.tensors()[t].size; ++i) {
      const auto value = static_cast<float>(narrow.tensors()[t].values.get()[i]);
      model.tensors()[t].values.get()[i] = value;
      exact.tensors()[t].values.get()[i] = value;
    }
  }
  const bert::Batch data = batch();
  const double loss = exact.forward(data);
  CHECK(std::abs(loss - static_cast<double>(model.forward(data))) < 1e-5);
  CHECK(model.forward(data) == narrow.forward(data));  // computed in float all the same
  exact.backward(1);
  model.backward(1);
  narrow.backward(1);
  for (std::size_t t = 0; t < exact.tensors().size(); ++t) {
    INFO(exact.tensors()[t].shape.name);
    double error = 0;
    bool rounded = true;
    for (std::size_t i = 0; i < exact.tensors()[t].size; ++i) {
      const float computed = model.tensors()[t].gradient.get()[i];
      error = std::max(
          error, std::abs(exact.tensors()[t].gradient.get()[i] - static_cast<double>(computed)));
      rounded = rounded && zero::bfloat16(computed) == narrow.tensors()[t].gradient.get()[i];
    }
    CHECK(error < 1e-5);
    CHECK(rounded);
  }
}

TEST_CASE("exponential is within two units of the last place", "[bert]") {
  double error = 0;
  for (float x = -87; x < 88; x += 0.00437F) {
    const double exact = std::exp(static_cast<double>(x));
    error = std::max(error, std::abs(static_cast<double>(bert::exponential(x)) / exact - 1));
  }
  CHECK(error < 2.4e-7);
  CHECK(bert::exponential(0.0F) == 1.0F);
  CHECK(bert::exponential(-1e30F) < 1e-37F);
  CHECK(bert::exponential(std::numeric_limits<float>::infinity()) > 1e38F);
  CHECK(std::isnan(bert::exponential(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("bits don't depend on where memory lies", "[bert]") {
  constexpr std::size_t rows = 9, columns = 67;
  std::vector<float> values(rows * columns);
  bert::fill_normal(values.data(), values.size(), 1.0F, 1);
  const auto results = [&](std::size_t shift) {
    std::vector<float> memory(6 * rows * columns + 64, 0.0F);
    float* x = memory.data() + shift;
    const auto part = [&](std::size_t p) { return x + p * (rows * columns + 1); };
    std::copy(values.begin(), values.end(), x);
    bert::Products<float> products;
    bert::layer_norm(x, rows, columns, values.data(), values.data() + 1, part(1), part(2), part(3));
    bert::softmax(part(3), rows, columns);
    products.multiply(false, true, rows, rows, columns, 1, part(3), columns, x, columns, 0, part(4),
                      rows);
    bert::gelu(part(1), rows * columns, part(5));
    std::vector<float> all;
    for (const std::size_t p : {1U, 3U, 5U}) {
      all.insert(all.end(), part(p), part(p) + rows * columns);
    }
    all.insert(all.end(), part(2), part(2) + rows);
    all.insert(all.end(), part(4), part(4) + rows * rows);
    return all;
  };
  const std::vector<float> first = results(0);
  for (std::size_t shift = 1; shift < 17; ++shift) {
    INFO("shifted by " << shift << " floats");
    CHECK(std::memcmp(first.data(), results(shift).data(), first.size() * sizeof(float)) == 0);
  }
}

TEST_CASE("the bytes of activations are counted before they are allocated", "[bert]") {
  const auto all = [](auto& model) {
    (void)model.forward(batch());
    return model.activation_bytes();
  };
  bert::Model<float> model(small(), size, 1);
  bert::Model<zero::bfloat16> narrow(small(), size, 1);
  CHECK(all(model) == bert::Model<float>::activation_bytes(small(), size));
  CHECK(all(narrow) == bert::Model<zero::bfloat16>::activation_bytes(small(), size));
}

TEST_CASE("the published models have the published sizes", "[bert]") {
  const auto count = [](const char* name, bert::Head head) {
    std::size_t elements = 0;
    const auto shapes = bert::shapes_of(bert::config_of(name), head);
    std::set<std::string> names;
    for (const bert::Shape& shape : shapes) {
      elements += shape.elements();
      names.insert(shape.name);
    }
    CHECK(names.size() == shapes.size());
    return std::pair(elements, shapes.size());
  };
  using bert::Head;
  CHECK(count("large", Head::masked_lm) == std::pair<std::size_t, std::size_t>(335174458, 394));
  CHECK(count("large", Head::pooler) == std::pair<std::size_t, std::size_t>(335141888, 391));
  CHECK(count("base", Head::pooler) == std::pair<std::size_t, std::size_t>(109482240, 199));
  CHECK(count("mini", Head::pooler) == std::pair<std::size_t, std::size_t>(11170560, 71));
  CHECK(count("tiny", Head::pooler) == std::pair<std::size_t, std::size_t>(4385920, 39));
  CHECK(bert::describe(bert::config_of("large"), Head::masked_lm).find("335174458") !=
        std::string::npos);
  CHECK_THROWS_AS(bert::config_of("huge"), bert::InputError);
}
