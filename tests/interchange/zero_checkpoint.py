"""Write a checkpoint in the layout of DeepSpeed's ZeRO stage 3, from whole tensors."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

CLASS = "deepspeed.runtime.fp16.loss_scaler.LossScaler"


def write(
    folder: Path, model: nn.Module, moments: Mapping[str, tuple[Tensor, Tensor]], *,
    num_ranks: int, num_groups: int, step: int,
) -> None:  # fmt: skip
    """`moments` of the trainable parameters; frozen ones are those without."""
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text(folder.name)
    parameters = dict(model.named_parameters())
    groups = [list(moments)[i::num_groups] for i in range(num_groups)]
    frozen = {name: p.detach() for name, p in parameters.items() if name not in moments}
    shapes = [OrderedDict((name, parameters[name].shape) for name in group) for group in groups]
    for rank in range(num_ranks):

        def share(tensor: Tensor, rank: int = rank) -> Tensor:
            each = -(-tensor.numel() // num_ranks)
            padded = torch.zeros(each * num_ranks)
            padded[: tensor.numel()] = tensor.detach().flatten()
            return padded[rank * each : (rank + 1) * each].clone()

        def flat(tensors: list[Tensor], share=share) -> Tensor:
            return torch.cat([share(tensor) for tensor in tensors])

        name = f"zero_pp_rank_{rank}_mp_rank_00"
        states = {
            i: {
                "step": torch.tensor(float(step)) if i % 2 else step,
                "exp_avg": flat([moments[name][0] for name in group]),
                "exp_avg_sq": flat([moments[name][1] for name in group]),
            }
            for i, group in enumerate(groups)
        }
        zero = {
            "zero_stage": 3,
            "loss_scaler": _foreign_object(),
            "partition_count": num_ranks,
            "optimizer_state_dict": {"state": states, "param_groups": [{"lr": 0.1}]},
            "fp32_flat_groups": [flat([parameters[name] for name in group]) for group in groups],
        }
        torch.save({"optimizer_state_dict": zero}, folder / f"bf16_{name}_optim_states.pt")
        _forget_foreign_class()
        torch.save(
            {
                "module": OrderedDict((n, torch.empty(0)) for n in parameters)
                | dict(model.named_buffers()),
                "buffer_names": [n for n, _ in model.named_buffers()],
                "param_shapes": shapes,
                "frozen_param_shapes": {n: value.shape for n, value in frozen.items()},
                "frozen_param_fragments": {n: share(value) for n, value in frozen.items()},
                "shared_params": _shared(model),
                "global_steps": step,
            },
            folder / f"{name}_model_states.pt",
        )


def _shared(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    shared = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            shared[name] = first[id(parameter)]
    return shared


def _foreign_object() -> object:
    """An instance of a class that the reader cannot import."""
    module_name, _, name = CLASS.rpartition(".")
    parts = module_name.split(".")
    for i in range(len(parts)):
        path = ".".join(parts[: i + 1])
        sys.modules[path] = types.ModuleType(path)
    kind = type(name, (), {"__module__": module_name, "__qualname__": name})
    setattr(sys.modules[module_name], name, kind)
    found = kind()
    found.cur_scale = 1.0
    return found


def _forget_foreign_class() -> None:
    for path in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[path]
