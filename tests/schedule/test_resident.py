"""What stays in host memory: against every possible choice on small cases."""

from __future__ import annotations

import itertools
import random

import pytest

from offload.config import Wanted
from offload.errors import BudgetError
from offload.partition.states import StateTable
from offload.partition.unit import Role, TensorSpec, Unit, lay_out
from offload.partition.weights import EXACT, SPLIT, Weights
from offload.schedule.resident import (
    Candidate,
    candidates,
    check_forced,
    choose,
    spread_order,
)

ANYWHERE = Wanted()


def make_units(sizes: list[int], states: StateTable) -> list[Unit]:
    specs = [TensorSpec(f"w{i}", (size,)) for i, size in enumerate(sizes)]
    return [lay_out(f"unit{i}", i, [spec], states=states) for i, spec in enumerate(specs)]


def role_bytes(unit: Unit, role: Role) -> int:
    return unit.role_bytes(role)


def offer(sizes: list[int], wanted: Wanted = ANYWHERE, weights: Weights = SPLIT) -> list[Candidate]:
    units = make_units(sizes, StateTable(weights=weights))
    return list(candidates(units, role_bytes, wanted=wanted))


def saved(chosen: list[Candidate]) -> int:
    return sum(each.num_bytes * each.reads for each in chosen)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_within_one_buffer_of_the_best(seed: int) -> None:
    rng = random.Random(seed)
    offered = offer([rng.choice([4096, 8192, 12288]) for _ in range(3)])
    assert len(offered) == 12
    largest = max(each.num_bytes * each.reads for each in offered)
    for room in range(0, sum(each.num_bytes for each in offered) + 4096, 3 * 4096):
        chosen = choose(offered, room)
        assert sum(each.num_bytes for each in chosen) <= room
        best = max(
            saved(list(subset))
            for count in range(len(offered) + 1)
            for subset in itertools.combinations(offered, count)
            if sum(each.num_bytes for each in subset) <= room
        )
        assert best - saved(chosen) < largest


def test_weights_come_before_state_and_the_front_before_the_back() -> None:
    offered = offer([4096] * 4)
    assert [each.unit for each in offered[:4]] == [0, 1, 2, 3]
    assert {each.role for each in offered[:4]} == {Role.PARAM}
    assert [each.unit for each in offered[4::3]] == [0, 2, 1, 3]


def test_whole_fp32_weights_are_both_halves() -> None:
    offered = offer([4096] * 2, weights=EXACT)
    assert [each.role for each in offered[:4]] == [Role.PARAM, Role.MASTER_LO] * 2
    assert {each.reads for each in offered[:4]} == {2}
    assert {each.role for each in offered[4:]} == {Role.EXP_AVG, Role.EXP_AVG_SQ}


def test_what_shall_be_on_disk_is_not_offered() -> None:
    assert not offer([4096], wanted=Wanted("disk", "disk"))
    assert {each.role for each in offer([4096], wanted=Wanted("host", "disk"))} == {Role.PARAM}


def test_what_shall_be_in_memory_and_does_not_fit_is_refused() -> None:
    offered = offer([4096] * 2)
    check_forced(offered, choose(offered, 16384), Wanted("host", "auto"))
    with pytest.raises(
        BudgetError, match=r"all state .* 81,920 bytes, got room for all but 81,920"
    ):
        check_forced(offered, choose(offered, 16384), Wanted("auto", "host"))


def test_frozen_units_offer_only_weights() -> None:
    unit = lay_out("unit", 0, [TensorSpec("w", (4096,), trainable=False)])
    offered = list(candidates([unit], role_bytes, wanted=Wanted()))
    assert [(each.role, each.num_bytes) for each in offered] == [(Role.PARAM, 8192)]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 100])
def test_every_beginning_of_the_spread_order_is_spread(count: int) -> None:
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    for length in range(1, count + 1):
        chosen = sorted(order[:length])
        assert chosen[0] == 0
        gaps = [b - a for a, b in itertools.pairwise([*chosen, count])]
        assert max(gaps) <= 4 * count / length + 1
