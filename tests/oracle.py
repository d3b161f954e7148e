"""The oracle of bit equality: training in memory, in plain torch, with our kernel as the update.

No engine code: the model holds its own parameters, autograd its own gradients, and the state is
one flat tensor per role and parameter.  What DESIGN promises about numbers is spelt out here once:

    weight   = convert(hi) to compute_dtype            (dtype float32: the whole master;
                                                        float16: the master rounded to it)
    gradient = round(p.grad) to dtype, fp32 sum where a step has several micro-steps
    norm     = sqrt of the fp64 sum, over named_parameters(), of each tensor's sum of squares
    state    = fp32; bf16; or eight bits with a scale per 256 elements, but fp32 in vectors and
               embeddings
    update   = kernels.update on whole tensors, grad_scale = max_norm / (norm + 1e-6) below 1
    float16  : the caller multiplies the loss by `scale`; norm and grad_scale are divided by it;
               it halves where a step is skipped and doubles after `window` others
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offload import kernels

FP32 = torch.float32


@dataclass
class State:
    """One parameter: its master in two halves, or whole beside its weight; moments, step count."""

    hi: Tensor  # (numel,) bf16; or fp16: the weight
    lo: Tensor  # (numel,) int16; or fp32: the master
    moments: tuple[kernels.State, kernels.State]
    key: int  # of the name: chooses how moments are rounded
    moves: torch.dtype  # FP32 for those that stay so in a model of 16 bits
    step: int = 0
    kept: Tensor | None = None  # (numel,) fp32, this step's sum of rounded contributions

    @property
    def exp_avg(self) -> Tensor:
        return self._moment(0)

    @property
    def exp_avg_sq(self) -> Tensor:
        return self._moment(1)

    def _moment(self, index: int) -> Tensor:
        decoded = torch.empty(self.hi.numel())
        kernels.state_decode(self.moments[index], decoded)
        return decoded

    @property
    def master(self) -> Tensor:
        if self.lo.dtype is torch.float32:
            return self.lo.clone()
        joined = torch.empty(self.hi.numel())
        kernels.join(self.hi, self.lo, joined)
        return joined


@dataclass(frozen=True)
class Group:
    """Hyper-parameters of the parameters whose names contain `part`; the defaults are AdamW's."""

    part: str = ""
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def settings(self) -> dict[str, object]:
        """As `torch.optim` spells them."""
        return {
            "lr": self.lr,
            "betas": self.betas,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }


@dataclass
class Oracle:
    """In-memory training of `model`, converted in place.  The first group that names a parameter
    holds it."""

    model: nn.Module
    dtype: torch.dtype
    compute_dtype: torch.dtype
    groups: tuple[Group, ...] = (Group(),)
    clipping: float = 0.0
    decoupled: bool = True
    state_dtype: str = "fp32"
    scale: float = 1.0
    window: int = 1000
    good_steps: int = 0  # since the scale changed
    states: dict[str, State] = field(default_factory=dict)  # of trainable parameters
    grad_norm: float = math.nan

    def __post_init__(self) -> None:
        types = {param.dtype for param in self.model.parameters()}
        mixed = bool(types & {torch.bfloat16, torch.float16})
        kinds = (nn.Embedding, nn.EmbeddingBag)
        embeddings = {id(m.weight) for m in self.model.modules() if isinstance(m, kinds)}
        packs = self.state_dtype == "int8"
        for name, param in self.model.named_parameters():
            plain = param.dim() < 2 or id(param) in embeddings
            kept = "fp32" if plain and packs else self.state_dtype
            moves = FP32 if mixed and param.dtype is FP32 else self.dtype
            state = _split(name, param, kept, moves)
            self._fill(param, state)
            if param.requires_grad:
                self.states[name] = state

    def keep_gradients(self) -> None:
        """End a micro-step: take the model's gradients away."""
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                state = self.states[name]
                rounded = param.grad.flatten().to(state.moves).float()
                state.kept = rounded if state.kept is None else state.kept + rounded
                param.grad = None

    def drop_gradients(self) -> None:
        for state in self.states.values():
            state.kept = None

    def step(self) -> bool:
        """Update from the kept gradients; False where a non-finite one skipped the step."""
        live = {name: state for name, state in self.states.items() if state.kept is not None}
        self.grad_norm = _norm(live.values()) / self.scale
        finite = math.isfinite(self.grad_norm)
        for name, param in self.model.named_parameters():
            if finite and name in live:
                self._update(name, live[name])
                self._fill(param, live[name])
        self.drop_gradients()
        self._rescale(finite)
        return finite

    def _rescale(self, finite: bool) -> None:
        if self.dtype is not torch.float16:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps == self.window:
            self.scale, self.good_steps = self.scale * 2, 0

    def _update(self, name: str, state: State) -> None:
        group = next(group for group in self.groups if group.part in name)
        factor = self.clipping / (self.grad_norm + 1e-6) if self.clipping else 1.0
        state.step += 1
        row = kernels.adam_row(
            group.lr,
            group.betas,
            group.eps,
            group.weight_decay,
            state.step,
            decoupled=self.decoupled,
            grad_scale=min(factor, 1.0) / self.scale,
        )
        half, origin = state.moves is torch.float16, kernels.Origin(state.key)
        master = kernels.Whole(state.lo, state.hi) if half else kernels.Split(state.hi, state.lo)
        kernels.update(master, state.moments, state.kept, row=row, origin=origin)

    def _fill(self, param: Tensor, state: State) -> None:
        """Give the model what computes: the converted high half, or the whole master."""
        weight = state.master if state.moves is FP32 else state.hi.clone()
        computes = FP32 if state.moves is FP32 else self.compute_dtype
        param.data = weight.to(computes).view(param.shape)


_DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.int8, torch.uint8),
}


def _split(name: str, param: Tensor, state_dtype: str, moves: torch.dtype) -> State:
    master = param.detach().float().flatten().contiguous()
    hi = torch.empty(master.numel(), dtype=torch.bfloat16)
    lo = torch.empty(master.numel(), dtype=torch.int16)
    if moves is torch.float16:
        hi, lo = master.half(), master.clone()
    else:
        kernels.split(master, hi, lo)
    moments = []
    for moment, dtype in zip(("exp_avg", "exp_avg_sq"), _DTYPES[state_dtype], strict=True):
        scale = torch.zeros(-(-len(master) // 256)) if state_dtype == "int8" else None
        moments.append(kernels.State(moment, torch.zeros(len(master), dtype=dtype), scale))
    return State(hi, lo, (moments[0], moments[1]), kernels.tensor_key(name), moves)


def _norm(states: Iterable[State]) -> float:
    total = 0.0
    for state in states:
        norm = kernels.Norm(1)
        kernels.norm_add(state.kept, norm, 0)
        if norm.nonfinite(0):
            return math.inf
        total += norm.value(0)
    return math.sqrt(total)
