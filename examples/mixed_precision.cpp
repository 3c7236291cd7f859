// bfloat16 matrices beside float norm scales in one optimizer, under three precisions, with a
// dynamic loss scale and a gradient that overflows on one rank: what each rank keeps, and how well
// it learns next to a run all in float.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>
#include <zero/zero.hpp>

namespace {

constexpr int ranks = 4;
constexpr int steps = 120;
constexpr int overflowing_step = 30;
constexpr std::size_t inputs = 32, hidden = 128, outputs = 16, batch = 8;
constexpr std::size_t matrix_elements = inputs * hidden + hidden * outputs;

// A framework whose tensors are typed at run time.
using Array = std::variant<std::vector<zero::bfloat16>, std::vector<float>>;
using Span = std::variant<std::span<zero::bfloat16>, std::span<float>>;

enum class Type { bfloat16, float32 };

class Tensor {
 public:
  Tensor(std::string name, std::vector<std::size_t> shape, Type type)
      : name_(std::move(name)), shape_(std::move(shape)) {
    std::size_t elements = 1;
    for (const std::size_t extent : shape_) elements *= extent;
    for (Array* array : {&values_, &gradient_}) {
      if (type == Type::bfloat16) {
        *array = std::vector<zero::bfloat16>(elements);
      } else {
        *array = std::vector<float>(elements);
      }
    }
  }

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::span<const std::size_t> shape() const { return shape_; }
  [[nodiscard]] Span values() const { return span_of(values_); }
  [[nodiscard]] Span gradient() const { return span_of(gradient_); }

  [[nodiscard]] std::vector<float> read() const {
    return std::visit(
        [](const auto& array) {
          std::vector<float> numbers;
          for (const auto x : array) numbers.push_back(static_cast<float>(x));
          return numbers;
        },
        values_);
  }
  void write(std::span<const float> numbers) { write(values_, numbers); }
  void write_gradient(std::span<const float> numbers) { write(gradient_, numbers); }

 private:
  static Span span_of(Array& array) {
    return std::visit([](auto& elements) { return Span(std::span(elements)); }, array);
  }
  static void write(Array& array, std::span<const float> numbers) {
    std::visit(
        [&](auto& elements) {
          using T = typename std::remove_reference_t<decltype(elements)>::value_type;
          std::transform(numbers.begin(), numbers.end(), elements.begin(),
                         [](float x) { return T(x); });
        },
        array);
  }

  std::string name_;
  std::vector<std::size_t> shape_;
  mutable Array values_{}, gradient_{};
};

/// output = relu(scale * rms_norm(input * matrix1)) * matrix2, row by row.
struct Network {
  std::vector<Tensor> tensors;

  Network(unsigned seed, Type matrices) {
    tensors.emplace_back("matrix1", std::vector{inputs, hidden}, matrices);
    tensors.emplace_back("scale", std::vector{hidden}, Type::float32);
    tensors.emplace_back("matrix2", std::vector{hidden, outputs}, matrices);
    std::mt19937 random(seed);
    const auto draw = [&](std::size_t elements, float deviation) {
      std::normal_distribution<float> normal(0, deviation);
      std::vector<float> numbers(elements);
      // To a bfloat16, so that all runs begin with the same numbers.
      for (float& x : numbers) x = static_cast<float>(zero::bfloat16(normal(random)));
      return numbers;
    };
    tensors[0].write(draw(inputs * hidden, 1 / std::sqrt(static_cast<float>(inputs))));
    tensors[1].write(std::vector<float>(hidden, 1.0F));
    tensors[2].write(draw(hidden * outputs, 1 / std::sqrt(static_cast<float>(hidden))));
  }

  struct Result {
    std::vector<float> output;
    float loss = 0;
  };

  /// Where there is a target, the mean squared error. Where `loss_scale` isn't 0, the gradients of
  /// the loss times it.
  Result run(std::span<const float> input, std::span<const float> target = {},
             float loss_scale = 0) {
    const std::vector<float> matrix1 = tensors[0].read(), scale = tensors[1].read(),
                             matrix2 = tensors[2].read();
    const std::size_t rows = input.size() / inputs;
    Result result{std::vector<float>(rows * outputs), 0};
    std::vector<float> to_matrix1(matrix1.size()), to_scale(hidden), to_matrix2(matrix2.size());
    std::array<float, hidden> x{}, y{}, to_x{}, to_y{};
    for (std::size_t row = 0; row < rows; ++row) {
      const float* const in = input.data() + row * inputs;
      float* const out = result.output.data() + row * outputs;
      x.fill(0);
      for (std::size_t i = 0; i < inputs; ++i) {
        for (std::size_t h = 0; h < hidden; ++h) x[h] += in[i] * matrix1[i * hidden + h];
      }
      float squares = 0;
      for (const float value : x) squares += value * value;
      const float factor = 1 / std::sqrt(squares / hidden + 1e-6F);
      for (std::size_t h = 0; h < hidden; ++h) {
        y[h] = std::max(0.0F, scale[h] * x[h] * factor);
        for (std::size_t o = 0; o < outputs; ++o) out[o] += y[h] * matrix2[h * outputs + o];
      }
      if (target.empty()) continue;

      std::array<float, outputs> to_out{};
      for (std::size_t o = 0; o < outputs; ++o) {
        const float error = out[o] - target[row * outputs + o];
        const auto count = static_cast<float>(rows * outputs);
        result.loss += error * error / count;
        to_out[o] = loss_scale * 2 * error / count;
      }
      if (loss_scale == 0) continue;
      float along = 0;  // what the norm takes away
      for (std::size_t h = 0; h < hidden; ++h) {
        to_y[h] = 0;
        for (std::size_t o = 0; o < outputs; ++o) {
          to_matrix2[h * outputs + o] += y[h] * to_out[o];
          to_y[h] += matrix2[h * outputs + o] * to_out[o];
        }
        if (y[h] <= 0) to_y[h] = 0;
        to_scale[h] += to_y[h] * x[h] * factor;
        along += to_y[h] * scale[h] * x[h] * factor / hidden;
      }
      for (std::size_t h = 0; h < hidden; ++h) {
        to_x[h] = factor * (to_y[h] * scale[h] - along * x[h] * factor);
      }
      for (std::size_t i = 0; i < inputs; ++i) {
        for (std::size_t h = 0; h < hidden; ++h) to_matrix1[i * hidden + h] += in[i] * to_x[h];
      }
    }
    if (loss_scale != 0) {
      tensors[0].write_gradient(to_matrix1);
      tensors[1].write_gradient(to_scale);
      tensors[2].write_gradient(to_matrix2);
    }
    return result;
  }

  [[nodiscard]] std::vector<float> numbers() const {
    std::vector<float> all;
    for (const Tensor& tensor : tensors) {
      const std::vector<float> of_one = tensor.read();
      all.insert(all.end(), of_one.begin(), of_one.end());
    }
    return all;
  }
};

struct Report {
  std::array<zero::MemoryReport, ranks> memory{};
  std::array<std::vector<float>, ranks> numbers;  // of all parameters, at the end
  std::array<int, ranks> skipped{};
  std::array<bool, ranks> skip_changed_nothing{};
  float first_loss = 0, loss = 0;  // before and after, on data that no rank has seen
  double loss_scale = 0;
};

template <class Precision>
Report train(Type matrices, Precision precision) {
  Report report;
  zero::run_ranks(ranks, [&](zero::InProcessCommunicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    Network network(1, matrices), teacher(2, Type::float32);
    zero::LossScale loss_scale = zero::LossScale::dynamic(1024);
    loss_scale.interval = 40;  // it grows after as many applied steps in a row
    zero::ZeroSharded optimizer{zero::Adam{.lr = 3e-3}, network.tensors, comm, precision,
                                zero::Settings{.loss_scale = loss_scale}};

    std::mt19937 random(100 + static_cast<unsigned>(rank));  // each rank its own data
    std::normal_distribution<float> normal;
    const auto draw = [&](std::mt19937& from, std::size_t rows) {
      std::vector<float> input(rows * inputs);
      std::generate(input.begin(), input.end(), [&] { return normal(from); });
      return input;
    };
    std::mt19937 for_unseen(99);
    const std::vector<float> unseen = draw(for_unseen, 64);
    const std::vector<float> unseen_target = teacher.run(unseen).output;
    const float first_loss = network.run(unseen, unseen_target).loss;
    for (int step = 0; step < steps; ++step) {
      const std::vector<float> input = draw(random, batch);
      std::vector<float> target = teacher.run(input).output;
      // One rank meets an outlier whose gradient no float can hold.
      if (step == overflowing_step && rank == 1) target[0] = 1e38F;
      network.run(input, target, static_cast<float>(optimizer.loss_scale()));
      const std::vector<float> before = network.numbers();
      if (optimizer.step().outcome().applied) continue;
      ++report.skipped[rank];
      report.skip_changed_nothing[rank] = step == overflowing_step && network.numbers() == before;
    }
    report.memory[rank] = optimizer.memory();
    report.numbers[rank] = network.numbers();
    if (rank != 0) return;
    report.first_loss = first_loss;
    report.loss = network.run(unseen, unseen_target).loss;
    report.loss_scale = optimizer.loss_scale();
  });
  return report;
}

/// Prints a row, and says whether the run kept the promises.
/// @param matrix_bytes of state and masters, for an element of a matrix
/// @param scale_bytes for an element of the scale
bool row(const char* matrices, const char* precision, std::size_t matrix_bytes,
         std::size_t scale_bytes, const Report& report, float wanted_loss) {
  // Sizes that the number of ranks divides, so that each keeps exactly its part.
  const std::size_t formula = (matrix_bytes * matrix_elements + scale_bytes * hidden) / ranks;
  bool good = report.loss < 0.2F * report.first_loss &&
              std::abs(report.loss - wanted_loss) < 0.05F * wanted_loss;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    good = good && report.memory[rank].state + report.memory[rank].master == formula &&
           report.numbers[rank] == report.numbers[0] && report.skipped[rank] == 1 &&
           report.skip_changed_nothing[rank];
  }
  std::printf("%-9s %-20s %11zu / %d %9zu %9zu %9zu %11.0f %8.4f -> %.4f%s\n", matrices, precision,
              matrix_bytes, ranks, formula, report.memory[0].state, report.memory[0].master,
              report.loss_scale, report.first_loss, report.loss, good ? "" : "  NOT AS PROMISED");
  return good;
}

}  // namespace

int main() {
  std::printf(
      "%zu elements of matrices, %zu of a float norm scale, Adam, %d ranks, %d steps, of\n"
      "which all ranks skip number %d, where one's gradient overflows\n\n",
      matrix_elements, hidden, ranks, steps, overflowing_step);
  std::printf("%-9s %-20s %15s %9s %9s %9s %11s %8s\n", "matrices", "precision", "bytes/element",
              "sum", "= state", "+ master", "loss scale", "loss");
  const Report exact = train(Type::float32, zero::MixedPrecision{});
  bool good = row("float", "MixedPrecision", 8, 8, exact, exact.loss);
  // A master of 4 bytes and two moments of 4.
  good &= row("bfloat16", "MixedPrecision", 12, 8, train(Type::bfloat16, zero::MixedPrecision{}),
              exact.loss);
  // A master of 4 bytes and two moments of 2; the scale's moments are of 2, too.
  good &= row("bfloat16", "Bfloat16Slots", 8, 4, train(Type::bfloat16, zero::Bfloat16Slots{1}),
              exact.loss);
  // No master: two moments of 4.
  good &= row("bfloat16", "StochasticPrecision", 8, 8,
              train(Type::bfloat16, zero::StochasticPrecision{1}), exact.loss);
  return good ? 0 : 1;
}
