"""Everything a user may do to an evicted parameter; a process of its own, since a crash ends it.

Prints one line per operation before it starts and one after: `served`, `refused` or what is wrong.
"""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from case import Case
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

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
    "vmap": lambda p: torch.vmap(lambda row: row * 2)(p),
    "vmap-of-a-closure": lambda p: torch.vmap(lambda row: p @ row)(torch.ones(3, p.shape[1])),
    "func-grad": lambda p: torch.func.grad(lambda q: (q * q).sum())(p),
    "func-grad-of-a-dict": lambda p: torch.func.grad(lambda d: d["p"].sum())({"p": p})["p"],
    "func-vjp": lambda p: torch.func.vjp(torch.sum, p)[0],
    "func-jvp": lambda p: torch.func.jvp(torch.sum, (p,), (p,))[1],
    "func-jacrev": lambda p: torch.func.jacrev(lambda q: (q * q).sum())(p),
    "func-jacfwd": lambda p: torch.func.jacfwd(torch.sum)(p),
    "func-hessian": lambda p: torch.func.hessian(lambda q: (q[0] ** 3).sum())(p),
    "func-linearize": lambda p: torch.func.linearize(torch.sum, p)[0],
    "functionalize": lambda p: torch.func.functionalize(lambda q: q + 1)(p),
    "forward-mode": lambda p: dual(p),
    "jacobian": lambda p: torch.autograd.functional.jacobian(torch.sum, p),
    "checkpoint": lambda p: checkpoint(torch.neg, p, use_reentrant=False),
    "compile": lambda p: torch.compile(torch.neg, backend="eager")(p),
    "custom-function": lambda p: Doubled.apply(p),
    "operator": lambda p: torch.ops.aten.neg.default(p),
    "as-subclass": lambda p: p.as_subclass(torch.Tensor),
    "make-a-list": lambda p: torch.tensor([p[0, 0], p[0, 1]]),
    "to-the-same": lambda p: p.to("cpu"),
    "type-of-another": lambda p: p.to(torch.ones(1, dtype=torch.float64)),
    "contiguous": lambda p: p.contiguous(),
    "storage": lambda p: torch.empty(0).set_(p.untyped_storage()),
    "typed-storage": lambda p: p._typed_storage().tolist(),
    "pointer": lambda p: ctypes.c_float.from_address(p.data_ptr()).value,
    "dlpack-itself": lambda p: np.from_dlpack(p),
    "numpy-itself": lambda p: p.numpy(),
    "copy": copy.copy,
    "reduce": lambda p: torch.multiprocessing.reductions.reduce_tensor(p),
    "safetensors": lambda p: safetensors.torch.save({"p": p}),
    "swap-tensors": lambda p: torch.utils.swap_tensors(p, nn.Parameter(torch.zeros(p.shape))),
    "set-data": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "set-item": lambda p: p.__setitem__(0, 1.0),
    "in-place-on-itself": lambda p: p.add_(1.0),
    "resize": lambda p: p.resize_(3),
    "out-into": lambda p: torch.neg(torch.zeros(p.shape), out=p),
    "gather-in-a-list": lambda p: torch.cat([p, p]),
    "collate": lambda p: torch.utils.data.default_collate([p, p]),
    "quantize": lambda p: torch.quantize_per_tensor(p, 0.1, 0, torch.qint8).dequantize(),
    "sparse": lambda p: p.to_sparse().to_dense(),
    "contains": lambda p: float(1e30 in p),
    "stack-of-modules": lambda p: torch.func.stack_module_state([Holder(p), Holder(p)])[0]["p"],
    "functional-call": lambda p: torch.func.functional_call(
        nn.Linear(1, 1, bias=False), {"weight": p}, (torch.ones(1, p.shape[1]),)
    ),
}


# C code that takes a tensor and asks nobody: each runs in a fork, which may crash.
BYPASSING: dict[str, Callable[[Param], torch.Tensor]] = {
    "tensor": lambda p: torch.tensor(p),
    "script": lambda p: torch.jit.script(scripted)(p),
    "new-tensor": lambda p: torch.zeros(1).new_tensor(p),
    "Tensor": lambda p: torch.Tensor(p),
    "set": lambda p: torch.empty(0).set_(p),
    "capsule": lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p.requires_grad_(False))),
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


class Holder(nn.Module):
    def __init__(self, p: Param) -> None:
        super().__init__()
        self.p = p


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p: Tensor) -> Tensor:
        return p * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 2


def dual(p: Param) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(p, torch.ones(p.shape)).sum()).tangent


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
    except RuntimeError as error:  # torch's compiler wraps it, with its own text around
        if not isinstance(error, StateError) and "engine.gathered" not in str(error):
            raise
        say(f"refused {name}: {' '.join(str(error).split())}")
        return
    expected = operation(twin)
    if isinstance(value, list) and isinstance(value[0], torch.Tensor):
        value, expected = torch.stack(value), torch.stack(expected)
    if isinstance(value, bytes | type(None)):
        say(f"wrong {name}: nothing refused it")
    else:
        say(f"{'served' if flat(value) == flat(expected) else 'wrong'} {name}")


def attempt_in_a_fork(name: str, operation: Callable[[Param], Tensor], param: Param) -> None:
    say(f"try {name}")
    child = os.fork()
    if child == 0:
        os._exit(0 if operation(param).isnan().all() else 1)
    status = os.waitpid(child, 0)[1]
    say(f"bypassed {name}: {status}")


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
