"""Which flat buffers stay in host memory, by plan (DESIGN M4).

A step uses units in a cycle, so keeping what was used last would never hit: the set is fixed.

    weights   read twice a step, for forward and backward    front units first: they have the
                                                             least time before they are needed
    state     read once, for the update                      units spread evenly over the order, so
                                                             that reads stay even over a step

Residency saves reads; every generation is still written, unless durability is "none".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from offload.config import Wanted
from offload.errors import BudgetError
from offload.partition.unit import STORE_ALIGN_BYTES, Role, Unit, round_up


@dataclass(frozen=True)
class Candidate:
    """A flat buffer that may stay in host memory."""

    unit: int
    role: Role
    num_bytes: int  # padded
    reads: int  # times that a step would read it; weights: twice


def candidates(
    units: Sequence[Unit], role_bytes: Callable[[Unit, Role], int], *, wanted: Wanted
) -> Iterator[Candidate]:
    """What may stay in host memory, most useful first.  `units` are in forward order.

    What a fetch brings counts as weights, the rest of a unit's roles as state.
    """
    if wanted.weights != "disk":
        for unit in units:
            for role in unit.states.weights.fetched:
                yield from _candidate(unit, role, role_bytes, reads=2)
    if wanted.state in ("auto", "host"):
        for position in spread_order(len(units)):
            unit = units[position]
            for role in unit.roles:
                if role not in unit.states.weights.fetched:
                    yield from _candidate(unit, role, role_bytes, reads=1)


def _candidate(
    unit: Unit, role: Role, role_bytes: Callable[[Unit, Role], int], *, reads: int
) -> Iterator[Candidate]:
    num_bytes = round_up(role_bytes(unit, role), STORE_ALIGN_BYTES)
    if num_bytes:
        yield Candidate(unit.index, role, num_bytes, reads)


def states_of(
    units: Sequence[Unit], role_bytes: Callable[[Unit, Role], int]
) -> Iterator[Candidate]:
    """All state, for a place that is asked for."""
    yield from candidates(units, role_bytes, wanted=Wanted(weights="disk", state="host"))


def choose(offered: Iterable[Candidate], room: int) -> list[Candidate]:
    """Take in order what fits into `room` bytes."""
    chosen = []
    for candidate in offered:
        if candidate.num_bytes <= room:
            chosen.append(candidate)
            room -= candidate.num_bytes
    return chosen


def unwritten(
    units: Sequence[Unit], persistent: Unit | None, resident: Sequence[Candidate]
) -> frozenset[tuple[int, Role]]:
    """The buffers that nobody reads from disk in a step, so that none need be written.

    A fetch reads all roles of a unit's weights unless all of them stay.  Small tensors always stay.
    """
    stay = {(each.unit, each.role) for each in resident}
    found = set(stay)
    for unit in units:
        weights = {(unit.index, role) for role in unit.states.weights.fetched}
        if not weights <= stay:
            found -= weights
    if persistent is not None and (found or not units):
        found |= {(persistent.index, role) for role in persistent.roles}
    return frozenset(found)


def check_forced(offered: Sequence[Candidate], chosen: Sequence[Candidate], wanted: Wanted) -> None:
    """Raise BudgetError where something shall be in host memory and does not fit."""
    for what, where in (("weights", wanted.weights), ("state", wanted.state)):
        of_kind = [each for each in offered if (each.reads > 1) == (what == "weights")]
        total = sum(each.num_bytes for each in of_kind)
        missing = total - sum(each.num_bytes for each in set(of_kind) & set(chosen))
        if where == "host" and missing:
            raise BudgetError(
                f"placement: expected all {what} in host memory, {total:,} bytes,"
                f" got room for all but {missing:,}. Raise host_memory by as much, or use"
                f' "auto" for what fits.'
            )


def spread_order(count: int) -> list[int]:
    """The numbers below `count`, so that every beginning of the list is spread evenly, from 0 on.

    Van der Corput's sequence: the bits of 0, 1, 2, ... reversed.
    """
    bits = max(count - 1, 0).bit_length()
    reversed_bits = (int(f"{index:0{bits}b}"[::-1], 2) if bits else 0 for index in range(1 << bits))
    return [index for index in reversed_bits if index < count]
