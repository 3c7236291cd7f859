# SPDX-License-Identifier: Apache-2.0
"""The state of a PyTorch optimizer in one safetensors file, as zero::load_torch and save_torch take it.

    from torch_state import load_optimizer, save_optimizer

    save_optimizer(optimizer, "state.safetensors")                     # for zero::load_torch
    optimizer.load_state_dict(load_optimizer("state.safetensors"))     # what zero::save_torch wrote

A ZeroRedundancyOptimizer works the same: save on one rank, after `consolidate_state_dict(to=rank)`
on all; load on all.

A parameter keeps its name in the file where PyTorch knows it (`torch.optim.Adam(
model.named_parameters())`, since 2.6) or is told here: `names` lists those of all parameters, group
by group. Without names, parameters are matched by their order.

The weights are no part of it. `zero-checkpoint weights` writes them, of tied ones once:

    from safetensors.torch import load_model
    load_model(model, "weights.safetensors")
"""

import json

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def save_optimizer(optimizer, file, names=None):
    """Writes `optimizer`, or what its `state_dict()` returned, to `file`."""
    state_dict = optimizer if isinstance(optimizer, dict) else optimizer.state_dict()
    tensors = {}
    for index, state in state_dict["state"].items():
        for key, value in state.items():
            if value is None:  # SGD without momentum
                continue
            if isinstance(value, (int, float)):  # `step`, before PyTorch 1.12
                value = torch.tensor(float(value))
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"state[{index}][{key!r}] is a {type(value).__name__}, no tensor or number")
            # A copy, since no two tensors of a file may share memory.
            tensors[f"state.{index}.{key}"] = value.detach().cpu().contiguous().clone()
    groups = [{key: _plain(key, value) for key, value in group.items()} for group in state_dict["param_groups"]]
    if names is not None:
        names = list(names)
        count = sum(len(group["params"]) for group in groups)
        if len(names) != count:
            raise ValueError(f"there are {len(names)} names, but {count} parameters")
        for group in groups:
            group["param_names"], names = names[: len(group["params"])], names[len(group["params"]) :]
    save_file(tensors, file, {"format": "pt", "param_groups": json.dumps(groups, allow_nan=False)})


def load_optimizer(file, names=None):
    """What `file` holds, for `load_state_dict`.

    PyTorch knows parameters by their order alone. With `names`, those of all parameters as the optimizer has them,
    group by group, the file's are put in that order.
    """
    with safe_open(file, "pt") as tensors:
        metadata = tensors.metadata() or {}
        if "param_groups" not in metadata:
            raise ValueError(f"{file}: its metadata has no 'param_groups', so it is no optimizer's state")
        state = {}
        for name in tensors.keys():
            kind, index, key = name.split(".", 2)
            if kind != "state":
                raise ValueError(f"{file}: tensor {name!r} is not called state.INDEX.KEY")
            state.setdefault(int(index), {})[key] = tensors.get_tensor(name)
    groups = json.loads(metadata["param_groups"])
    for group in groups:
        if "betas" in group:
            group["betas"] = tuple(group["betas"])
    if names is not None:
        _order(file, groups, list(names))
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _order(file, groups, names):
    for number, group in enumerate(groups):
        wanted, names = names[: len(group["params"])], names[len(group["params"]) :]
        index_of = dict(zip(group.get("param_names", []), group["params"]))
        if sorted(wanted) != sorted(index_of):
            raise ValueError(f"{file}: group {number} has the parameters {sorted(index_of)}, not {sorted(wanted)}")
        group["params"], group["param_names"] = [index_of[name] for name in wanted], wanted
    if names:
        raise ValueError(f"{file}: has no parameters {names}")


def _plain(key, value):
    """An option as JSON has it."""
    if isinstance(value, torch.Tensor):  # a learning rate may be one
        return value.item()
    if isinstance(value, (tuple, list)):
        return [_plain(key, each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"the option {key!r} is a {type(value).__name__}, which JSON doesn't have")
