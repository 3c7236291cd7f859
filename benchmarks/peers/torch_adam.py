#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own Adam on the GPU, fused and by foreach, as a fraction of what a copy within the device
reaches: the rows that zero_cuda_bench prints of zero's. Reads the models' tensors from standard
input, as `zero_cuda_bench shapes` prints them."""
import json
import statistics
import sys

try:
    import torch
except ImportError:
    torch = None

PAIRS = 15
BYTES = 28  # of an element: values, gradients and two slots are read, all but gradients written


def skip(why):
    print(json.dumps({"name": "torch adam", "skipped": why}))
    sys.exit(0)


def seconds(work):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def measure(model, way):
    name = f"torch adam fp32, {way}/{model['name']}"
    elements = sum(model["tensors"])
    if elements * 30 > torch.cuda.mem_get_info()[0] * 0.9:
        print(json.dumps({"name": name, "skipped": f"needs {elements * 30 >> 20} MiB"}))
        return
    values = [torch.full((n,), 0.01, device="cuda", requires_grad=True) for n in model["tensors"]]
    for tensor in values:
        tensor.grad = torch.full_like(tensor, 0.01)
    source = torch.zeros(elements * BYTES // 2, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    optimizer = torch.optim.Adam(values, **{way: True})
    for _ in range(2):
        optimizer.step()
        target.copy_(source)
    torch.cuda.synchronize()
    ratios, steps = [], []
    for k in range(PAIRS):
        first = seconds(optimizer.step if k % 2 == 0 else lambda: target.copy_(source))
        second = seconds(optimizer.step if k % 2 == 1 else lambda: target.copy_(source))
        step, copy = (first, second) if k % 2 == 0 else (second, first)
        ratios.append(copy / step)
        steps.append(step)
    print(json.dumps({
        "name": name, "unit": "of a copy's speed", "median": statistics.median(ratios),
        "min": min(ratios), "max": max(ratios),
        "remark": f"{elements * BYTES / statistics.median(steps) / 1e9:.4g} GB/s, "
                  f"PyTorch {torch.__version__}"}), flush=True)


def main():
    if torch is None:
        skip("python3 has no torch")
    if not torch.cuda.is_available():
        skip(f"PyTorch {torch.__version__} sees no GPU")
    for line in sys.stdin:
        model = json.loads(line)
        for way in ("fused", "foreach"):
            try:
                measure(model, way)
            except RuntimeError as error:
                print(json.dumps({"name": f"torch adam fp32, {way}/{model['name']}",
                                  "error": str(error).splitlines()[0]}), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
