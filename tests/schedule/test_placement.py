"""How the host budget is divided: what a larger one gives is never less."""

from __future__ import annotations

import pytest

from offload.errors import BudgetError
from offload.partition.states import StateTable
from offload.partition.unit import TensorSpec, Unit, lay_out
from offload.schedule.placement import SLOT_SHARE, Formats, Placement, grad_bytes, place

SHAPES = {
    "equal blocks": [1 << 18, *[1 << 20] * 4],
    "a large embedding": [40_000_000, *[3_000_000] * 30],
    "tiny": [5000, 7000, 5000],
}
FORMATS = Formats(weight=2, compute=4, grad=2)


def units_of(sizes: list[int]) -> list[Unit]:
    specs = [TensorSpec(f"w{i}", (size,)) for i, size in enumerate(sizes)]
    return [lay_out(f"u{i}", i, [spec], states=StateTable()) for i, spec in enumerate(specs)]


def saved_bytes(placement: Placement, host_memory: int, units: list[Unit]) -> int:
    """Transfers of a step that the budget saves: gradients both ways, the rest once at least."""
    held = sum(grad_bytes(unit, FORMATS) for unit in units if unit.index in placement.held)
    return 2 * held + host_memory - placement.slot_bytes - placement.held_bytes


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("chunk_elems", [None, 4096])
def test_a_larger_budget_never_saves_less(sizes, chunk_elems) -> None:
    units = units_of(sizes)
    with pytest.raises(BudgetError) as told:
        place(units, None, FORMATS, host_memory=1, chunk_elems=chunk_elems)
    least = int(str(told.value).rpartition("host_memory=")[2].split()[0])
    most = 20 * sum(sizes)
    before = 0
    for part in range(61):
        budget = least + part * most // 60
        placement = place(units, None, FORMATS, host_memory=budget, chunk_elems=chunk_elems)
        assert placement.total_bytes <= budget
        saved = saved_bytes(placement, budget, units)
        one = placement.fetch_slot_bytes + placement.update_slot_bytes + placement.spill_slot_bytes
        assert saved >= before - one  # slots are whole
        before = max(before, saved)


def test_slots_take_a_third_at_most_and_less_where_all_gradients_fit_then() -> None:
    units = units_of([3_000_000] * 8)
    grads = sum(grad_bytes(unit, FORMATS) for unit in units)
    decided = set()
    for tenths in range(8, 60):
        budget = grads * tenths // 10
        placement = place(units, None, FORMATS, host_memory=budget)
        assert placement.slot_bytes <= SLOT_SHARE * budget
        if grads <= budget * (1 - SLOT_SHARE):
            assert not placement.spilled
        elif grads > budget * (1 - SLOT_SHARE / 2):
            assert placement.spilled
        else:  # it depends on how large a slot is
            continue
        decided.add(bool(placement.spilled))
    assert decided == {True, False}
