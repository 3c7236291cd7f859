#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Time a step of PyTorch's ZeroRedundancyOptimizer with Adam over Gloo, on two processes.

    benchmarks/peers/torch_zero.py SHAPES.json

SHAPES.json lists the extents of each tensor. Prints the seconds of eleven steps as JSON: gradients are
summed over ranks in buckets of 25 MiB, of which they are views, as DistributedDataParallel does after
backward, and ZeroRedundancyOptimizer updates each rank's tensors and broadcasts them. Needs torch:
`apt-get install python3-torch` for the system's python3, or `pip install torch`; zero_mpi_bench runs it by
$PYTHON, or python3.
"""

import json
import os
import socket
import sys
import time

RANKS = 2
STEPS = 11
BUCKET_ELEMENTS = 25 * 2**20 // 4

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch.distributed.optim import ZeroRedundancyOptimizer
except ImportError:
    sys.exit("not installed: apt-get install python3-torch (or pip install torch), and run it again")


def train(rank, port, shapes, seconds):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.set_num_threads(max(1, (os.cpu_count() or RANKS) // RANKS))
    parameters = [torch.nn.Parameter(torch.full(shape, 1e-2)) for shape in shapes]
    buckets = []
    waiting = list(reversed(parameters))
    while waiting:
        members, size = [], 0
        while waiting and (not members or size + waiting[0].numel() <= BUCKET_ELEMENTS):
            members.append(waiting.pop(0))
            size += members[-1].numel()
        bucket, at = torch.full((size,), 1e-3), 0
        for parameter in members:
            parameter.grad = bucket[at:at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        buckets.append(bucket)
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, parameters_as_bucket_view=True,
                                        lr=1e-3)
    for step in range(STEPS + 1):
        for bucket in buckets:
            bucket.fill_(1e-3)
        dist.barrier()
        begin = time.perf_counter()
        for bucket in buckets:
            dist.all_reduce(bucket)
            bucket.div_(RANKS)
        optimizer.step()
        dist.barrier()
        if rank == 0 and step > 0:
            seconds.append(time.perf_counter() - begin)
    dist.destroy_process_group()


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        shapes = json.load(file)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with mp.Manager() as manager:
        seconds = manager.list()
        mp.spawn(train, (port, shapes, seconds), nprocs=RANKS)
        print(json.dumps({"seconds": list(seconds),
                          "remark": f"PyTorch {torch.__version__}, ZeroRedundancyOptimizer over Gloo, K={RANKS}, "
                                    "bucket views"}))


if __name__ == "__main__":
    main()
