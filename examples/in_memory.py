"""The engine's training with everything in memory: what it must equal bit for bit.

    master  bf16 high half (the weight) + 16 low bits; moments in fp32
    step    gradients rounded to bf16, the exact norm, clipping, one fused update a tensor

The same calls as OffloadEngine's, so that a script can take either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload import kernels


class KernelAdamW(torch.optim.Optimizer):
    """AdamW by the engine's kernel; the model holds the weights in the type that it computes in."""

    def __init__(
        self, model: nn.Module, groups: list[dict[str, Any]], *,
        lr: float, betas: tuple[float, float], max_norm: float,
    ) -> None:  # fmt: skip
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.01})
        self.max_norm, self.grad_norm, self.num_steps = max_norm, 0.0, 0
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._order = [p for p in model.parameters() if p.requires_grad]

    def begin(self, parameter: Tensor) -> None:
        """Cut a parameter into its master's halves; give the model what computes."""
        master = parameter.detach().float().flatten()
        hi, lo = (torch.empty(master.shape, dtype=t) for t in (torch.bfloat16, torch.int16))
        kernels.split(master, hi, lo)
        moments = [
            kernels.State(name, torch.zeros(len(master))) for name in ("exp_avg", "exp_avg_sq")
        ]
        key = kernels.tensor_key(self._names[id(parameter)])
        self.state[parameter] = {"hi": hi, "lo": lo, "moments": moments, "key": key}

    def master(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        joined = torch.empty(parameter.numel())
        kernels.join(state["hi"], state["lo"], joined)
        return joined.view(parameter.shape)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.grad_norm = self._norm()
        factor = min(1.0, self.max_norm / (self.grad_norm + 1e-6))
        self.num_steps += 1
        for group in self.param_groups:
            row = kernels.adam_row(
                group["lr"], group["betas"], group["eps"], group["weight_decay"], self.num_steps,
                decoupled=True, grad_scale=factor,
            )  # fmt: skip
            for parameter in group["params"]:
                state = self.state[parameter]
                halves, origin = (
                    kernels.Split(state["hi"], state["lo"]), kernels.Origin(state["key"])
                )  # fmt: skip
                kernels.update(halves, state["moments"], state["kept"], row=row, origin=origin)
                parameter.copy_(state["hi"].view(parameter.shape))

    def keep_gradients(self) -> None:
        """Take a micro-step's gradients away, each contribution rounded once."""
        for parameter in self._order:
            state, grad = self.state[parameter], parameter.grad
            assert grad is not None, f"{self._names[id(parameter)]}: no gradient"
            rounded = grad.flatten().bfloat16().float()
            state["kept"] = state["kept"] + rounded if "kept" in state else rounded
            parameter.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._order:
            self.state[parameter].pop("kept", None)

    def _norm(self) -> float:
        norm = kernels.Norm(len(self._order))
        for index, parameter in enumerate(self._order):
            kernels.norm_add(self.state[parameter]["kept"], norm, index)
        return math.sqrt(sum(norm.value(index) for index in range(len(self._order))))


class InMemory:
    """`model`, all of whose parameters train, behind the calls of OffloadEngine."""

    def __init__(
        self, model: nn.Module, groups: list[dict[str, Any]], *,
        lr: float, betas: tuple[float, float], clipping: float, accumulation: int,
        compute_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.module, self.accumulation = model, accumulation
        self.optimizer = KernelAdamW(model, groups, lr=lr, betas=betas, max_norm=clipping)
        self.global_step, self._micro_steps = 0, 0
        for parameter in model.parameters():
            self.optimizer.begin(parameter)
            parameter.data = self.optimizer.state[parameter]["hi"].to(compute_dtype).view(
                parameter.shape
            )  # fmt: skip

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @property
    def grad_norm(self) -> float:
        return self.optimizer.grad_norm

    def backward(self, loss: Tensor) -> None:
        (loss / self.accumulation).backward()  # type: ignore[no-untyped-call]
        self.optimizer.keep_gradients()
        self._micro_steps += 1

    def step(self) -> None:
        if self._micro_steps == self.accumulation:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_step, self._micro_steps = self.global_step + 1, 0

    def full_fp32_param(self, parameter: Tensor) -> Tensor:
        return self.optimizer.master(parameter)

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()

    def close(self) -> None:
        pass


def parameter_groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms and biases do not."""
    parts: Mapping[bool, Sequence[nn.Parameter]] = {
        matrix: [p for p in model.parameters() if p.requires_grad and (p.ndim > 1) is matrix]
        for matrix in (True, False)
    }
    return [
        {"params": list(parts[True]), "weight_decay": decay},
        {"params": list(parts[False]), "weight_decay": 0.0},
    ]
