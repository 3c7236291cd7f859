// A libtorch model on two ranks with AdamW's state spread over them: DDP and ZeRO in C++.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>
#include <zero/interop/torch.hpp>
#include <zero/zero.hpp>

int main() {
  at::set_num_threads(1);  // a rank has one
  zero::run_ranks(2, [](zero::InProcessCommunicator& comm) {
    torch::nn::Sequential model(torch::nn::Linear(4, 64), torch::nn::ReLU(),
                                torch::nn::Linear(64, 1));
    zero::BasicTorchParams<float> params{*model};
    zero::broadcast_values(params, comm);  // all begin as rank 0 does
    zero::ZeroSharded optimizer{zero::AdamW{.lr = 1e-2}, params, comm};
    zero::TorchHooks hooks{optimizer};  // gradients are ready as autograd makes them

    at::Tensor loss;
    for (int step = 0; step < 200; ++step) {
      const at::Tensor input = torch::rand({32, 4});  // each rank's own
      const at::Tensor target = input.square().sum(1, true);
      model->zero_grad();
      loss = torch::mse_loss(model->forward(input), target);
      loss.backward();
      optimizer.step();  // with the mean of all ranks' gradients
    }
    std::printf("rank %d: loss %.4f, %zu bytes of AdamW's state\n", comm.rank(),
                loss.item<double>(), optimizer.memory().state);
  });
}
