# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's optimizers computed, for tests/checkpoint/torch_test.cpp and tests/checkpoint/python/torch_live.py.

    generate.py write FOLDER    of each case CASE.torch.safetensors, the state after some steps, and
                                CASE.steps.safetensors, what the next ones started from and came to
    generate.py check FOLDER    has PyTorch load CASE.zero.safetensors, which zero wrote of the same state, and
                                take the next steps: bits are as recorded. CASE.after.safetensors, where it is
                                there, is what zero's own next steps came to.
"""

import pathlib
import sys
import tempfile

import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed.optim import ZeroRedundancyOptimizer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "examples" / "checkpoint"))

from safetensors.torch import load_file, save_file
from torch_state import load_optimizer, save_optimizer

SHAPES = {"body.weight": [4, 3], "body.bias": [4], "scale": [], "late": [3], "head.weight": [2, 4]}
BEFORE, AFTER = 4, 3
FIRST_OF_LATE = BEFORE + 2  # the step that first has a gradient of the parameter "late"


class Case:
    def __init__(self, dtype, groups, optimizer, names=False, **options):
        self.dtype, self.groups, self.make, self.names, self.options = dtype, groups, optimizer, names, options

    def optimizer(self, values):
        groups = [dict(options, params=[values[name] for name in names]) for names, options in self.groups]
        return self.make(groups, **self.options)

    def named(self):
        return [name for names, _ in self.groups for name in names]


def redundancy(groups, **options):
    if torch.distributed.is_initialized():
        return ZeroRedundancyOptimizer(groups[0]["params"], torch.optim.Adam, **options)
    return torch.optim.Adam(groups, **options)


EVERYTHING = [(list(SHAPES), {})]
CASES = {
    "adam": Case(torch.float64, EVERYTHING, torch.optim.Adam, lr=0.01, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1),
    "adamw": Case(
        torch.float32,
        [
            (["head.weight", "body.weight"], {"amsgrad": True, "weight_decay": 0.1}),
            (["body.bias", "scale", "late"], {"maximize": True, "weight_decay": 0}),
        ],
        torch.optim.AdamW,
        names=True,
        lr=0.003,
        betas=(0.9, 0.99),
    ),
    "sgd": Case(
        torch.float64,
        [
            (["body.weight", "head.weight"], {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
            (["body.bias", "late"], {"momentum": 0.5, "dampening": 0.25}),
            (["scale"], {"lr": 0.1}),
        ],
        torch.optim.SGD,
        lr=0.02,
    ),
    # Of two processes, consolidated.
    "redundancy": Case(torch.float32, EVERYTHING, redundancy, lr=0.01, betas=(0.8, 0.95)),
}


def gradients(case, step):
    """Of one step, counted from 1, each a multiple of 1/64."""
    draw = torch.Generator().manual_seed(step)
    all_of_them = {
        name: (torch.randint(-64, 65, shape, generator=draw).to(case.dtype) / 64) for name, shape in SHAPES.items()
    }
    return {name: g for name, g in all_of_them.items() if name != "late" or step >= FIRST_OF_LATE}


def take_step(optimizer, values, of_step):
    for name, value in values.items():
        value.grad = of_step[name].clone() if name in of_step else None
    optimizer.step()


def write(folder, rank=0, only=None):
    for name, case in CASES.items():
        if only is not None and name != only:
            continue
        draw = torch.Generator().manual_seed(100)
        values = {
            key: torch.nn.Parameter(torch.randint(-64, 65, shape, generator=draw).to(case.dtype) / 64)
            for key, shape in SHAPES.items()
        }
        optimizer = case.optimizer(values)
        for step in range(1, BEFORE + 1):
            take_step(optimizer, values, gradients(case, step))
        if hasattr(optimizer, "consolidate_state_dict"):
            optimizer.consolidate_state_dict(to=0)
        if rank == 0:
            save_optimizer(optimizer, folder / f"{name}.torch.safetensors", case.named() if case.names else None)
        record = {f"values.0.{key}": value.detach().clone() for key, value in values.items()}
        for step in range(1, AFTER + 1):
            of_step = gradients(case, BEFORE + step)
            record.update({f"gradients.{step}.{key}": g for key, g in of_step.items()})
            take_step(optimizer, values, of_step)
            record.update({f"values.{step}.{key}": value.detach().clone() for key, value in values.items()})
        if rank == 0:
            save_file(record, folder / f"{name}.steps.safetensors")


def write_as_process(rank, folder, meeting):
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    write(folder, rank, "redundancy")
    torch.distributed.destroy_process_group()


def require(holds, what):
    if not holds:
        sys.exit(what)


def values_of(case, record, step):
    return {name: torch.nn.Parameter(record[f"values.{step}.{name}"].clone()) for name in SHAPES}


def continued(case, record, file):
    """The optimizer after the next steps from `file`'s state, whose values must be the recorded ones."""
    values = values_of(case, record, 0)
    optimizer = case.optimizer(values)
    for group in optimizer.param_groups:
        group["lr"] = 77.0  # must come from the file
    optimizer.load_state_dict(load_optimizer(file, case.named() if case.names else None))
    for step in range(1, AFTER + 1):
        take_step(optimizer, values, gradients(case, BEFORE + step))
        for name, value in values.items():
            right = record[f"values.{step}.{name}"]
            require(torch.equal(value.detach(), right), f"{file}: step {step} makes another {name!r}")
    return optimizer


def check(folder):
    for name, case in CASES.items():
        record = load_file(folder / f"{name}.steps.safetensors")
        ended = continued(case, record, folder / f"{name}.zero.safetensors").state_dict()
        after = folder / f"{name}.after.safetensors"
        if after.exists():
            check_after(case, record, ended, after)
        print(f"{name}: as PyTorch's own")


def check_after(case, record, ended, file):
    """State that zero came to by steps of its own is PyTorch's, but for rounding."""
    state = load_optimizer(file, case.named() if case.names else None)
    tolerance = 1e-12 if case.dtype == torch.float64 else 1e-5
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for position, of_one in ended["state"].items():
        for key, right in of_one.items():
            if right is None:
                continue
            index = indices[position]
            got = state["state"][index][key]
            require(got.shape == right.shape, f"{file}: state.{index}.{key} has the shape {list(got.shape)}")
            close = torch.allclose(got, right, rtol=tolerance, atol=tolerance)
            require(close, f"{file}: state.{index}.{key} differs: {got} instead of {right}")
    case.optimizer(values_of(case, record, AFTER)).load_state_dict(state)


def write_all(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name in CASES:
        if name != "redundancy":
            write(folder, only=name)
    with tempfile.TemporaryDirectory() as meeting:
        torch.multiprocessing.spawn(write_as_process, (folder, f"{meeting}/meeting"), nprocs=2)
    print(f"PyTorch {torch.__version__}: {folder}", flush=True)


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "check"):
        sys.exit(__doc__)
    {"write": write_all, "check": check}[sys.argv[1]](pathlib.Path(sys.argv[2]))


if __name__ == "__main__":
    main()
