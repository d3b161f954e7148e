"""DeepSpeed's learning-rate schedules as torch schedulers, over optimizer steps.

    k steps are done; what the next one uses:

    LRRangeTest     min (1 + rate k/size), or floor(k/size) with staircase
    OneCycle        min .. max .. min, linear in k, maybe in stairs; then min / (1 + rate k'/size)
                    beta_1 the other way round; then max (1 + rate k'/size)
    WarmupLR        min .. max, as k-1 or its logarithm grows; then max
    WarmupDecayLR   the same; then linear to min at the last step
    WarmupCosineLR  the same in shares of the group's rate; then half a cosine to its least share

The warm-up counts from the second step, and the first uses its least value (WarmupCosineLR: 0;
OneCycle: the least momentum): that is how DeepSpeed calls its schedulers, and files shall mean the
same here.  Sources: Smith, arXiv:1803.09820 (range test, one cycle); Loshchilov and Hutter,
arXiv:1608.03983 (cosine).  Values may be lists, one for each parameter group.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from offload.errors import ConfigError

_LOG = logging.getLogger(__name__)
PerGroup = float | Sequence[float]
_ONE_CYCLE_BETA2 = 0.99


class _Schedule(LRScheduler):
    """Sets each group's rate to `rate(steps done, group's number)`."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> None:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])  # torch wants it where a run goes on
        super().__init__(optimizer, last_epoch=last_batch_iteration)

    def rate(self, done: int, group: int) -> float:
        """The learning rate of a group's next step."""
        raise NotImplementedError

    def get_lr(self) -> list[float | torch.Tensor]:
        return [self.rate(self.last_epoch, index) for index in range(len(self.base_lrs))]


class LRRangeTest(_Schedule):
    """Raise the rate until training breaks, to find what it bears."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000, lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False, *, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        """`lr_range_test_step_size`: steps in which the rate grows by rate times its start."""
        _check_at_least("lr_range_test_step_size", lr_range_test_step_size, 1)
        self._least = _per_group(lr_range_test_min_lr, optimizer, "lr_range_test_min_lr")
        self._size = lr_range_test_step_size
        self._growth = lr_range_test_step_rate
        self._stairs = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rate(self, done: int, group: int) -> float:
        intervals = done // self._size if self._stairs else done / self._size
        return self._least[group] * (1 + self._growth * intervals)


class OneCycle(_Schedule):
    """Up and down once, beta_1 down and up, where the optimizer has betas; then decay."""

    def __init__(  # noqa: PLR0913 (the names are DeepSpeed's)
        self, optimizer: torch.optim.Optimizer, cycle_min_lr: PerGroup, cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0, cycle_first_step_size: int = 2000, *,
        cycle_second_step_size: int | None = None, cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None, decay_step_size: int = 0,
        cycle_momentum: bool = True, cycle_min_mom: float = 0.8, cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        """Sizes are steps: of the way up, of the way down (null: the same), of a unit of decay.

        Stair counts: levels of either way (0: none).  `decay_step_size` 0: no decay.
        """
        _check_at_least("cycle_first_step_size", cycle_first_step_size, 1)
        second = cycle_second_step_size
        stairs = cycle_second_stair_count
        self._bounds = [
            _per_group(cycle_min_lr, optimizer, "cycle_min_lr"),
            _per_group(cycle_max_lr, optimizer, "cycle_max_lr"),
        ]
        self._ways = [cycle_first_step_size, second or cycle_first_step_size]
        first = cycle_first_stair_count
        self._stairs = [first, first if stairs is None else stairs]
        self._decay = [decay_step_size, decay_lr_rate, decay_mom_rate]
        self._momenta = [cycle_min_mom, cycle_max_mom] if cycle_momentum else []
        if self._momenta and "betas" not in optimizer.defaults:
            _LOG.warning("OneCycle: the optimizer has no betas, so only its rate cycles.")
            self._momenta = []
        super().__init__(optimizer, last_batch_iteration)

    def height(self, done: int) -> float:
        """Where in the cycle the next step is, from 0 to 1 and back to 0."""
        up, down = self._ways
        way = done > up
        gone, size = (max(up + down - done, 0), down) if way else (done, up)
        levels = self._stairs[way]
        return gone * levels // size / levels if levels else gone / size

    def _units(self, done: int) -> float:
        """Units of decay since the end of the cycle."""
        size = self._decay[0]
        return max(done - sum(self._ways), 0) / size if size else 0.0

    def rate(self, done: int, group: int) -> float:
        low, high = (bound[group] for bound in self._bounds)
        return (low + (high - low) * self.height(done)) / (1 + self._decay[1] * self._units(done))

    def momentum(self, done: int) -> float:
        """Of the next step: beta_1."""
        low, high = self._momenta
        if done == 0:
            return low
        return (high - (high - low) * self.height(done)) * (1 + self._decay[2] * self._units(done))

    def get_lr(self) -> list[float | torch.Tensor]:
        """Sets betas too, as torch's OneCycleLR does; beta_2 is DeepSpeed's in all groups."""
        if self._momenta:
            for group in self.optimizer.param_groups:
                group["betas"] = (self.momentum(self.last_epoch), _ONE_CYCLE_BETA2)
        return super().get_lr()


class _Warmup:
    """The share that is reached: 0 to 1 by step number `num_steps`."""

    def __init__(self, num_steps: int, kind: str) -> None:
        _check_at_least("warmup_num_steps", num_steps, 0)
        if kind not in ("log", "linear"):
            raise ConfigError(f"warmup_type: expected log or linear, got {kind!r}. Correct it.")
        self.num_steps = max(num_steps, 2)
        self.is_log = kind == "log"

    def share(self, done: int) -> float:
        count = max(done - 1, 0)
        if count >= self.num_steps:
            return 1.0
        if self.is_log:
            return math.log(count + 1) / math.log(self.num_steps)
        return count / self.num_steps


class WarmupLR(_Schedule):
    """Warm up; then stay."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None, warmup_num_steps: int = 1000,
        warmup_type: str = "log", *, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        """`warmup_max_lr` null: the rate of each group."""
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self._least = _per_group(warmup_min_lr, optimizer, "warmup_min_lr")
        self._most = _per_group(warmup_max_lr, optimizer, "warmup_max_lr")
        self._num_steps, self._kind = warmup_num_steps, warmup_type
        self._share(0)
        super().__init__(optimizer, last_batch_iteration)

    def _share(self, done: int) -> float:
        return _Warmup(self._num_steps, self._kind).share(done)

    def rate(self, done: int, group: int) -> float:
        return self._least[group] + (self._most[group] - self._least[group]) * self._share(done)


class WarmupDecayLR(WarmupLR):
    """Warm up; then go down in a straight line."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0, warmup_max_lr: PerGroup | None = 1e-3,
        warmup_num_steps: int = 1000, *, warmup_type: str = "log", last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        """`total_num_steps`: with those of the warm-up."""
        self._total = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type,
            last_batch_iteration=last_batch_iteration,
        )  # fmt: skip

    def _share(self, done: int) -> float:
        warm, count = max(self._num_steps, 2), max(done - 1, 0)
        if count < warm:
            return super()._share(done)
        return max((self._total - count) / max(self._total - warm, 1), 0.0)


class WarmupCosineLR(_Schedule):
    """Warm up; then down half a cosine; all in shares of each group's rate."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_num_steps: int,
        warmup_min_ratio: float = 0.0, warmup_num_steps: int = 1000, cos_min_ratio: float = 1e-4,
        *, warmup_type: str = "log", last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        """`total_num_steps`: with those of the warm-up."""
        self._total = total_num_steps
        self._least = [warmup_min_ratio, cos_min_ratio]
        self._num_steps, self._kind = warmup_num_steps, warmup_type
        _Warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def ratio(self, done: int) -> float:
        """The share of a group's rate for the next step."""
        if done == 0:
            return 0.0
        warmup, count = _Warmup(self._num_steps, self._kind), done - 1
        if count < warmup.num_steps:
            return self._least[0] + (1 - self._least[0]) * warmup.share(done)
        left = self._total - warmup.num_steps
        gone = min(count - warmup.num_steps + 1, left) / left if left > 0 else 1.0
        return self._least[1] + (1 - self._least[1]) * (1 + math.cos(math.pi * gone)) / 2

    def rate(self, done: int, group: int) -> float:
        return float(self.base_lrs[group]) * self.ratio(done)


OWN: Mapping[str, type[LRScheduler]] = {
    each.__name__: each for each in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def scheduler_class(kind: str, params: Mapping[str, Any]) -> type[LRScheduler]:
    """The class that a file names: one of these, or of torch; raises ConfigError.

    `params` are checked against its constructor's names.
    """
    cls = OWN.get(kind, getattr(lr_scheduler, kind, None))
    if not (isinstance(cls, type) and issubclass(cls, LRScheduler)):
        near = difflib.get_close_matches(kind, OWN, n=1, cutoff=0.4)
        raise ConfigError(
            f"config, scheduler.type: expected one of {', '.join(OWN)}, or a class of"
            f" torch.optim.lr_scheduler, got {kind!r}. Take {(near or ['WarmupLR'])[0]!r}."
        )
    known = list(inspect.signature(cls).parameters)[1:]
    for key in params:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
            raise ConfigError(f"config, scheduler.params: {kind} has no setting {key!r}. {hint}")
    missing = [
        name
        for name, one in list(inspect.signature(cls).parameters.items())[1:]
        if one.default is inspect.Parameter.empty and name not in params
    ]
    if missing:
        raise ConfigError(
            f"config, scheduler.params: {kind} needs {', '.join(missing)}, got none. Set it;"
            ' "auto" is filled by transformers only.'
        )
    _check_kinds(kind, cls, params)
    return cls


def _check_kinds(kind: str, cls: type[LRScheduler], params: Mapping[str, Any]) -> None:
    """Refuse values that the constructor could not compute with."""
    signature = inspect.signature(cls).parameters
    for key, value in params.items():
        annotation = str(signature[key].annotation).removesuffix(" | None")
        expected, fits = _KINDS.get(annotation if kind in OWN else "", _OF_TORCH)
        if value is not None and not fits(value):
            hint = "Remove the quotes." if isinstance(value, str) else "Correct it."
            raise ConfigError(
                f"config, scheduler.params.{key}: expected {expected}, got {value!r}. {hint}"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    """1e3 is one."""
    return _is_number(value) and float(value).is_integer()


def _is_one_or_each(value: Any) -> bool:
    many = isinstance(value, list | tuple)
    return all(map(_is_number, value)) if many else _is_number(value)


def _is_no_quoted_number(value: Any) -> bool:
    try:
        return not (isinstance(value, str) and math.isfinite(float(value)))
    except ValueError:
        return True


# By the annotations of the classes here; torch's take texts too.
_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("an integer", _is_integer),
    "float": ("a number", _is_number),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "str": ("a text", lambda value: isinstance(value, str)),
    "PerGroup": ("a number, or one for each group", _is_one_or_each),
}
_OF_TORCH = ("a number", _is_no_quoted_number)


def _per_group(value: PerGroup, optimizer: torch.optim.Optimizer, name: str) -> list[float]:
    count = len(optimizer.param_groups)
    if not isinstance(value, Sequence):
        return [float(value)] * count
    if len(value) != count:
        raise ConfigError(
            f"{name}: expected one value, or one for each of {count} parameter groups, got"
            f" {len(value)}."
        )
    return [float(each) for each in value]


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name}: expected at least {least}, got {value}.")
