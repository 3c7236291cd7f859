// SPDX-License-Identifier: Apache-2.0
// A dlib network reads handwritten digits, trained by two ranks: replicated, as plain data
// parallelism does, and with the optimizer's state and the gradients sharded. The losses are the
// same, to the last bit.
//   digits FILE    FILE has 64 grey values of 0 to 16 and the digit in a line, separated by commas
#include <dlib/dnn/core.h>
#include <dlib/dnn/input.h>
#include <dlib/dnn/layers.h>
#include <dlib/dnn/loss.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <fstream>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>
#include <zero/zero.hpp>

#include "marking.hpp"
#include "params.hpp"

namespace {

constexpr int ranks = 2;
constexpr std::size_t epochs = 10;
constexpr std::size_t batch = 32;      // images of a rank in a step
constexpr std::size_t held_out = 261;  // the last images, for the test
constexpr int skipped = 77;            // exit status for CTest

using Image = dlib::matrix<float, 8, 8>;

template <long filters, class Below>
using Con3x3 = dlib::add_layer<zero_dlib::Marking<dlib::con_<filters, 3, 3, 1, 1, 1, 1>>, Below>;
template <unsigned long outputs, class Below>
using Fc = dlib::add_layer<zero_dlib::Marking<dlib::fc_<outputs, dlib::FC_HAS_BIAS>>, Below>;
using Net = dlib::loss_multiclass_log<
    Fc<10,
       dlib::relu<Fc<64, dlib::max_pool<2, 2, 2, 2, dlib::relu<Con3x3<16, dlib::input<Image>>>>>>>>;

struct Digits {
  std::vector<Image> images;
  std::vector<unsigned long> labels;
};

/// @throw std::runtime_error on a line that isn't 64 grey values and a digit
Digits read(std::istream& in, const std::string& path) {
  Digits digits;
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    const auto number = [&](double most, int end) {
      double value = -1;
      if (!(fields >> value && value >= 0 && value <= most && fields.get() == end)) {
        throw std::runtime_error(path + ":" + std::to_string(digits.images.size() + 1) +
                                 ": expected 64 numbers of 0 to 16 and a digit, between commas");
      }
      return value;
    };
    Image image;
    for (float& grey : image) grey = static_cast<float>(number(16, ',') / 16);
    digits.labels.push_back(static_cast<unsigned long>(number(9, EOF)));
    digits.images.push_back(image);
  }
  return digits;
}

/// What one rank has to tell.
struct Result {
  std::vector<double> losses;  // of its own batches
  std::size_t state = 0;       // bytes
  std::size_t gradients = 0;   // bytes that stay between steps, dlib's and the optimizer's
  double seconds = 0;
  std::size_t right = 0;  // of the test images
};
using Results = std::array<Result, ranks>;

template <class Stage>
Results train(const Digits& digits, const Net& initial) {
  Results results;
  zero::run_ranks(ranks, [&](zero::InProcessCommunicator& comm) {
    Net net = initial;  // dlib draws initial values from std::rand, which ranks would share
    auto parameters = zero_dlib::parameters_of(net);
    zero::ZeroSharded optimizer{zero::Adam{.lr = 2e-3}, parameters, comm, Stage{}};
    // Without this line it works as well, but nothing is reduced before step().
    zero_dlib::mark_gradients(net, [&](std::size_t i) { optimizer.mark_ready(i); });

    Result& result = results[static_cast<std::size_t>(comm.rank())];
    const std::size_t steps = (digits.images.size() - held_out) / (batch * ranks);
    const auto begin = std::chrono::steady_clock::now();
    for (std::size_t epoch = 0; epoch < epochs; ++epoch) {
      for (std::size_t step = 0; step < steps; ++step) {
        const auto first = static_cast<std::ptrdiff_t>(
            (step * ranks + static_cast<std::size_t>(comm.rank())) * batch);
        const auto images = digits.images.begin() + first;
        result.losses.push_back(net.compute_parameter_gradients(
            images, images + static_cast<std::ptrdiff_t>(batch), digits.labels.begin() + first));
        optimizer.step();  // instead of net.update_parameters(solvers, rate)
      }
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    result.seconds = took.count();
    result.state = optimizer.memory().state;
    result.gradients = optimizer.memory().gradients;
    for (const auto& parameter : parameters) {
      result.gradients += parameter.gradient().size_bytes();
    }
    for (std::size_t i = digits.images.size() - held_out; i < digits.images.size(); ++i) {
      if (net(digits.images[i]) == digits.labels[i]) ++result.right;
    }
  });
  return results;
}

void print(const char* stage, const Results& results) {
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const Result& of = results[rank];
    const std::size_t steps = of.losses.size() / epochs;
    std::printf("%-10s %4zu %9zu %9zu %7.2f %5zu/%zu ", stage, rank, of.state, of.gradients,
                of.seconds, of.right, held_out);
    for (std::size_t epoch = 1; epoch < epochs; epoch += 2) {
      const auto first = of.losses.begin() + static_cast<std::ptrdiff_t>(epoch * steps);
      const double sum = std::accumulate(first, first + static_cast<std::ptrdiff_t>(steps), 0.0);
      std::printf(" %.6f", sum / static_cast<double>(steps));
    }
    std::puts("");
  }
}

bool same(const Results& a, const Results& b) {
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (a[rank].losses != b[rank].losses || a[rank].right != b[rank].right) return false;
  }
  return true;
}

int run(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    std::printf("skipped: there is no %s; scikit-learn's wheel has digits.csv.gz to unpack there\n",
                path.c_str());
    return skipped;
  }
  const Digits digits = read(file, path);
  if (digits.images.size() < held_out + batch * ranks) {
    throw std::runtime_error(path + ": too few images: " + std::to_string(digits.images.size()));
  }
  Net initial;
  initial(digits.images[0]);  // the first forward pass makes the parameters

  const Results replicated = train<zero::Replicated>(digits, initial);
  const Results stage1 = train<zero::Stage1>(digits, initial);
  const Results stage2 = train<zero::Stage2>(digits, initial);
  std::printf("%-10s %4s %9s %9s %7s %9s  %s\n", "stage", "rank", "state B", "grads B", "seconds",
              "right", "mean loss of each second epoch");
  print("replicated", replicated);
  print("1", stage1);
  print("2", stage2);
  const bool equal = same(replicated, stage1) && same(replicated, stage2);
  std::printf("losses: %s\n", equal ? "the same, bit for bit" : "DIFFERENT");
  if (replicated[0].right < held_out * 8 / 10) {
    throw std::runtime_error("the network has learned too little");
  }
  return equal ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: digits FILE\n", stderr);
    return 2;
  }
  try {
    return run(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "digits: %s\n", error.what());
    return 1;
  }
}
