"""Copies, reading again or holding: the choice follows from costs and from the room."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shapes import units_of

from offload.config import Wanted
from offload.partition.unit import Role, Unit
from offload.schedule.resident import Candidate, candidates, spread_order, unwritten
from offload.schedule.undo import HELD, Terms, Undo, choose_undo, in_memory

AMPLE = 1 << 40
NONE = Terms("speculate", one_side=True, shared=True, clips=True)
TWO = replace(NONE, one_side=False)
UNITS = units_of(8)
EVERY = {unit.index for unit in UNITS}


def role_bytes(unit: Unit, role: Role) -> int:
    return unit.role_bytes(role)


ALL = list(candidates(UNITS, role_bytes, wanted=Wanted("host", "host")))
SIZES = in_memory(UNITS, ALL)


def choose(terms: Terms, *, stays: list[Candidate] = ALL, room: int = AMPLE) -> Undo:
    left = unwritten(UNITS, None, stays) if terms.one_side else frozenset()
    return choose_undo(UNITS, stays, left, room=room, terms=terms)


@pytest.mark.parametrize("terms", [NONE, TWO])
def test_nothing_is_chosen_where_nothing_runs_ahead(terms: Terms) -> None:
    found = choose(replace(terms, overlap="hold"))
    assert found == HELD
    assert not list(found.lines())


def test_copies_hold_all_state_of_a_unit() -> None:
    sizes = {unit.index: sum(unit.role_bytes(role) for role in unit.roles) for unit in UNITS}
    assert choose(NONE).num_bytes == sum(sizes.values())
    assert choose(NONE).copied == EVERY
    assert not choose(NONE).held


@pytest.mark.parametrize("overlap", ["auto", "speculate"])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("read_bytes_per_s", [None, 0.1e9, 0.3e9, 0.9e9, 5e9])
def test_with_two_sides_the_cheaper_way_is_taken(overlap, clips, read_bytes_per_s) -> None:
    terms = replace(TWO, overlap=overlap, clips=clips, read_bytes_per_s=read_bytes_per_s)
    found = choose(terms)
    total = sum(SIZES.values())
    assert found.copied == (EVERY if terms.copy_s(total) < terms.read_s(total) else set())
    assert not found.held
    assert found.overlap == overlap
    told = "\n".join(found.lines())
    assert f"{terms.copy_s(total):.4f} s a step by copies" in told
    assert f"{terms.read_s(total):.4f} s by reading again" in told
    way = "work on copies" if found.copied else "are read again"
    assert told.startswith(f"undo    of units that stay 8 {way}: ")
    assert found.read == EVERY - found.copied


def test_both_ways_occur_and_without_clipping_no_copy_is_made() -> None:
    slow = replace(TWO, read_bytes_per_s=0.1e9)
    assert choose(slow).copied
    assert not choose(replace(slow, read_bytes_per_s=5e9)).copied
    assert not choose(replace(slow, clips=False)).copied


@pytest.mark.parametrize("num", range(9))
@pytest.mark.parametrize("terms", [NONE, replace(TWO, read_bytes_per_s=0.1e9)])
def test_copies_never_exceed_the_room_and_are_spread_over_the_units(terms: Terms, num: int) -> None:
    room = sum(sorted(SIZES.values())[:num])
    found = choose(terms, room=room)
    assert found.num_bytes == sum(SIZES[index] for index in found.copied) <= room
    assert all(SIZES[index] > room - found.num_bytes for index in EVERY - found.copied)
    if len(set(SIZES.values())) == 1:
        assert found.copied == set(spread_order(8)[:num])
    assert found.held == (EVERY - found.copied if terms.one_side else set())
    assert found.overlap == ("hold" if terms.one_side and not num else "speculate")


def test_with_one_side_a_unit_that_is_written_in_place_waits() -> None:
    partly = [each for each in ALL if (each.unit, each.role) != (3, Role.EXP_AVG)]
    found = choose(NONE, stays=partly)
    assert found.held == {3}
    assert found.copied == EVERY - {3}
    assert choose(NONE, stays=[]).overlap == "hold"


def test_where_the_processors_compute_auto_holds_with_one_side() -> None:
    auto = replace(NONE, overlap="auto")
    assert choose(auto).overlap == "hold"
    assert choose(replace(auto, shared=False)).copied == EVERY
    assert "8 wait: " in (told := "".join(choose(auto).lines()))
    assert "gain nothing" in told
