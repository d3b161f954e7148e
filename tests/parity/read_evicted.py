"""Everything a user may do to an evicted parameter; a process of its own, since a crash ends it.

Prints one line per operation before it starts and one after: `served`, `refused` or what is wrong.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from case import Case
from torch import Tensor, nn

from offload import OffloadEngine
from offload.errors import StateError

Param = nn.Parameter

VALUES: dict[str, Callable[[Param], object]] = {
    "sum": lambda p: p.sum(),
    "add": lambda p: p + 1,
    "radd": lambda p: 1 + p,
    "matmul": lambda p: p @ p.t(),
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach().clone(),
    "detach-alone": lambda p: p.detach(),
    "data": lambda p: p.data.clone(),
    "data-alone": lambda p: p.data,
    "numpy": lambda p: p.detach().numpy().copy(),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p[0, 0].item(),
    "index": lambda p: p[0],
    "iterate": lambda p: list(p),
    "compare": lambda p: p == p,
    "float": lambda p: p.float(),
    "double": lambda p: p.double(),
    "cpu": lambda p: p.cpu().clone(),
    "view": lambda p: p.view(-1).clone(),
    "reshape": lambda p: p.reshape(-1).clone(),
    "transpose": lambda p: p.t().contiguous(),
    "isfinite": lambda p: p.isfinite().all(),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "stack": lambda p: torch.stack([p, p]),
    "foreach": lambda p: torch._foreach_add([p], 1.0),
    "equal": lambda p: torch.equal(p, p),
    "copy-out": lambda p: torch.empty(p.shape).copy_(p.detach()),
    "copy-in": lambda p: p.data.copy_(torch.zeros(p.shape)),
    "initialise": lambda p: nn.init.normal_(p),
    "fill": lambda p: p.data.fill_(1.0),
    "in-place": lambda p: p.data.mul_(2.0),
    "to-double": lambda p: p.to(torch.float64),
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.dumps(p),
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).clone(),
    "linear": lambda p: torch.nn.functional.linear(torch.ones(2, p.shape[1]), p),
    "parameters-to-vector": lambda p: nn.utils.parameters_to_vector([p]),
    "as_tensor": lambda p: torch.as_tensor(p).clone(),
    "asarray": lambda p: np.asarray(p.detach()).copy(),
    "array": lambda p: np.array(p),
    "new-parameter": lambda p: nn.Parameter(p).clone(),
    "new-parameter-alone": lambda p: nn.Parameter(p),
    "format": lambda p: float(f"{p[0, 0]:.3f}"),
    "truth": lambda p: bool(p[0, 0]),
    "chunk": lambda p: p.chunk(2)[0].clone(),
    "einsum": lambda p: torch.einsum("ij->j", p),
    "out": lambda p: torch.neg(p, out=torch.empty(p.shape)),
    "where": lambda p: torch.where(p > 0, p, 0.0),
    "gradient": lambda p: torch.autograd.grad((p * 2).sum(), p)[0],
    "share-memory": lambda p: p.share_memory_(),
    "pin": lambda p: p.is_pinned(),
    "zeros-like": lambda p: torch.zeros_like(p),
    "ones-like": lambda p: torch.ones_like(p, dtype=torch.float64),
    "broadcast": lambda p: torch.broadcast_to(p, (2, *p.shape)).clone(),
    "masked": lambda p: p[p > 0],
    "sort": lambda p: torch.sort(p).values,
}


# These read the data below `__torch_function__`: each runs in a fork, which may crash.
BYPASSING: dict[str, Callable[[Param], object]] = {
    "vmap": lambda p: torch.vmap(lambda row: row * 2)(p),
    "new-tensor": lambda p: torch.tensor(p),
    "func-grad": lambda p: torch.func.grad(lambda q: (q * q).sum())(p),
    "script": lambda p: torch.jit.script(scripted)(p),
}

ON_THE_MODEL: dict[str, Callable[[nn.Module], object]] = {
    "double": lambda m: m.double(),
    "half": lambda m: m.half(),
    "apply": lambda m: m.apply(initialise),
    "share_memory": lambda m: m.share_memory(),
}


def initialise(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.zeros_(param)


def scripted(p: Tensor) -> Tensor:
    return p * 2


def check_metadata(param: Param, shape: tuple[int, ...]) -> None:
    assert tuple(param.shape) == shape == tuple(param.size())
    assert param.numel() == shape[0] * shape[1]
    assert len(param) == shape[0]
    assert param.dim() == 2
    assert param.dtype is torch.float32
    assert param.device.type == "cpu"
    assert param.requires_grad
    assert param.is_leaf
    assert isinstance(param, nn.Parameter)
    assert str(shape[0]) in repr(param)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def flat(value: object) -> list[float]:
    return torch.as_tensor(value).detach().double().flatten().tolist()


def attempt(name: str, operation: Callable[[Param], object], param: Param, twin: Param) -> None:
    say(f"try {name}")
    try:
        value = operation(param)
    except StateError as error:
        say(f"refused {name}: {error}")
        return
    expected = operation(twin)
    if isinstance(value, list) and isinstance(value[0], torch.Tensor):
        value, expected = torch.stack(value), torch.stack(expected)
    if isinstance(value, bytes | type(None)):
        say(f"wrong {name}: nothing refused it")
    else:
        say(f"{'served' if flat(value) == flat(expected) else 'wrong'} {name}")


def attempt_in_a_fork(name: str, operation: Callable[[Param], object], param: Param) -> None:
    say(f"try {name}")
    child = os.fork()
    if child == 0:
        with contextlib.suppress(StateError):
            operation(param)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        say(f"crashed {name}")


def attempt_on_the_model(name: str, operation: Callable[[nn.Module], object], model) -> None:
    say(f"try {name}")
    try:
        operation(model)
    except RuntimeError as error:  # torch wraps what `load_state_dict` raised
        text = str(error).replace("\n", " ")
        say(f"refused {name}: {text}" if "gathered" in text else f"wrong {name}: {text}")
    else:
        say(f"wrong {name}: nothing refused it")


def main() -> None:
    case = Case(num_steps=1)
    with case.engine(Path(sys.argv[1])) as engine:
        train_a_step(engine, case, 0)
        param = engine.module.blocks[1].up.weight
        twin = nn.Parameter(engine.module.state_dict()["blocks.1.up.weight"].float())
        check_metadata(param, tuple(twin.shape))
        for name, operation in VALUES.items():
            attempt(name, operation, param, twin)
        for name, operation in BYPASSING.items():
            attempt_in_a_fork(name, operation, param)
        for name, on_model in ON_THE_MODEL.items():
            attempt_on_the_model(name, on_model, engine.module)
        check_metadata(engine.module.blocks[1].up.weight, tuple(twin.shape))
        after = engine.module.state_dict()["blocks.1.up.weight"].float()
        assert torch.equal(after, twin), "a refused edit changed the weights"
        train_a_step(engine, case, 1)
        say("trained on")


def train_a_step(engine: OffloadEngine, case: Case, step: int) -> None:
    engine.backward(engine(*case.batches(step)[0]))
    engine.step()


if __name__ == "__main__":
    main()
