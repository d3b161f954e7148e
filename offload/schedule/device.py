"""Divide the device budget: what must fit, and the units whose weights stay gathered.

    device budget >= largest unit's weights + one prefetch + most gradients of a unit
                     + tied gradients + small tensors and theirs + state that is placed there
    beside a GPU     another unit's gradients, which are copied out while that one computes
    what is left     weights of front units, then filled once a step instead of at each use

A unit that stays keeps its storage from its first use on; a step makes its contents old, and they
are brought up to date in place: from host memory where its weights stay there too, else from disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from offload.config import Wanted
from offload.errors import BudgetError
from offload.partition.unit import Unit
from offload.schedule.placement import Formats


def weight_bytes(units: Sequence[Unit], formats: Formats) -> int:
    """Device bytes of the gathered weights of `units`."""
    return sum(unit.num_elems * formats.compute_of(unit) for unit in units)


def gradient_bytes(
    units: Sequence[Unit], formats: Formats, *, alive: int = 1
) -> dict[int, tuple[int, int]]:
    """Device bytes of gradients while backward is in each unit, by index: of its own, and more of
    tied weights.

    Of a tied weight autograd keeps what one module gives until backward has been in the others.
    The sum is made beside what is added, so in the last of them there are three.  `units`: all of
    them, small tensors too.  `alive`: micro-steps whose gradients are there at once: all of them in
    layer-major order.
    """
    tied = {unit.index: unit.tied_elems * formats.compute_of(unit) for unit in units}
    waiting = sum(tied.values())
    return {
        unit.index: (
            alive * unit.trainable_elems * formats.compute_of(unit),
            alive * (waiting - tied[unit.index]) + 2 * tied[unit.index],
        )
        for unit in units
    }


def other_bytes(
    units: Sequence[Unit], persistent: Unit | None, formats: Formats, *, alive: int = 1
) -> int:
    """Device bytes of the most gradients in a unit, and of small tensors and theirs; `alive` as for
    `gradient_bytes`.
    """
    return sum(size for _, size in _other_parts(units, persistent, formats, alive=alive))


def _other_parts(
    units: Sequence[Unit], persistent: Unit | None, formats: Formats, *, alive: int
) -> Iterator[tuple[str, int]]:
    gradients = f"gradients of {alive} micro-steps" if alive > 1 else "gradients"
    small = [persistent] if persistent is not None else []
    found = gradient_bytes([*units, *small], formats, alive=alive)
    largest = max(units, key=lambda unit: sum(found[unit.index]), default=None)
    if largest is not None:
        own, tied = found[largest.index]
        yield f"{gradients} of unit {largest.name!r}", own
        if tied:
            yield f"{gradients} of tied weights, in parts", tied
    for unit in small:
        yield "small tensors", weight_bytes([unit], formats)
        yield f"their {gradients}", found[unit.index][0]


def leaving_bytes(
    device_memory: int, units: Sequence[Unit], persistent: Unit | None, formats: Formats, *,
    alive: int = 1,
) -> int:  # fmt: skip
    """Device bytes for gradients on their way out, beside those of the unit at work: as many as its
    own where the budget has room for them, else none; `alive` as for `other_bytes`.
    """
    if not formats.landing:
        return 0
    size = max((own for own, _ in gradient_bytes(units, formats, alive=alive).values()), default=0)
    least = device_least_bytes(units, persistent, formats, alive=alive)
    return size if device_memory >= least + size else 0


def choose_kept(
    units: Sequence[Unit], device_memory: int, formats: Formats, *, taken: int, wanted: Wanted
) -> frozenset[int]:
    """The units that stay on the device, from the front as far as the budget allows.

    `units` are in forward order, `taken`: bytes of gradients, small tensors and state.  Beside them
    the largest of the others must fit twice: in use, and as a prefetch.  Raises BudgetError where
    all shall stay and do not fit.
    """
    if wanted.weights not in ("auto", "device"):
        return frozenset()
    room, total = device_memory - taken, weight_bytes(units, formats)
    if total <= room:
        return frozenset(unit.index for unit in units)
    if wanted.weights == "device":
        raise BudgetError(
            f"placement: expected room for all weights on the device, {total:,} bytes beside"
            f" {taken:,} of gradients, small tensors and state, got {device_memory:,} in all."
            f' Set device_memory={total + taken} or more, or use "auto" for what fits.'
        )
    kept: list[Unit] = []
    for unit in units:
        others = [each for each in units if each not in kept and each is not unit]
        beside = 2 * max((weight_bytes([each], formats) for each in others), default=0)
        if weight_bytes([*kept, unit], formats) + beside <= room:
            kept.append(unit)
    return frozenset(unit.index for unit in kept)


def device_least_bytes(
    units: Sequence[Unit], persistent: Unit | None, formats: Formats, *, alive: int = 1
) -> int:
    """The least `device_memory` (DESIGN M2); `alive` as for `other_bytes`."""
    return sum(size for _, size in _device_parts(units, persistent, formats, alive=alive))


def _device_parts(
    units: Sequence[Unit], persistent: Unit | None, formats: Formats, *, alive: int, state: int = 0
) -> Iterator[tuple[str, int]]:
    by_size = sorted(units, key=lambda unit: -unit.num_elems * formats.compute_of(unit))
    for what, unit in zip(("weights of the largest unit", "one prefetch,"), by_size, strict=False):
        yield f"{what} {unit.name!r}", weight_bytes([unit], formats)
    yield from _other_parts(units, persistent, formats, alive=alive)
    if state:
        yield "state that is placed on the device", state


def check_device(
    device_memory: int, units: Sequence[Unit], persistent: Unit | None, formats: Formats, *,
    state: int = 0, alive: int = 1,
) -> None:  # fmt: skip
    """Raise BudgetError, with the sum, unless the device can hold the largest unit at work.

    `state`: bytes of state that are placed there; `alive` as for `other_bytes`.
    """
    parts = list(_device_parts(units, persistent, formats, alive=alive, state=state))
    least = sum(size for _, size in parts)
    if device_memory < least:
        arithmetic = " + ".join(f"{size:,} ({what})" for what, size in parts)
        raise BudgetError(
            f"device_memory is too small: expected at least {least:,} bytes = {arithmetic},"
            f" got {device_memory:,}. Set device_memory={least} or more."
        )
