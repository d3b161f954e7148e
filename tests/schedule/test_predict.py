"""The predicted step against sums made by hand, and the definition of the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shapes import ELEMS, FORMATS, layout_of

from offload.metrics.bound import Rates
from offload.schedule.placement import Formats
from offload.schedule.predict import Speeds, Threads, predict
from offload.schedule.traffic import Uses, step_traffic
from offload.schedule.work import Attention, Product, Work

FAST = 1e30
INFINITE = Speeds(flops=FAST, attention=FAST, activations=FAST, take=FAST, fill=FAST, update=FAST)
ALONE = Threads(compute=1, update=1, processors=2, shared=True)
WORK = Work((Product(64, 128, count=3),), None, tokens=100, seq=100)
FLOPS = 6 * 3 * 64 * 128 * 100


def speeds(**rates: float) -> Speeds:
    return Speeds(**{**INFINITE.__dict__, **rates})


def test_attention_has_a_rate_of_its_own() -> None:
    layout, uses = layout_of(), Uses.guessed(3, 1)
    work = Work((), Attention(2, 64), tokens=100, seq=50)
    told = predict(
        layout, uses, step_traffic(layout, uses), work=work, rates=None, threads=ALONE,
        speeds=speeds(attention=3 * 2 * 2 * 64 * 50 * 100 / 2),
    )  # fmt: skip
    assert told.step_s == pytest.approx(2.0)


def found(*, micro_steps=1, by_layers=False, kept=(), rates=None, threads=ALONE, held=False, **own):
    formats = FORMATS if micro_steps == 1 else Formats(2, 2, 4)
    layout = layout_of(formats=formats)
    layout = replace(layout, placement=replace(layout.placement, kept=frozenset(kept)))
    uses = Uses.guessed(3, micro_steps, by_layers=by_layers)
    traffic = step_traffic(layout, uses)
    told = predict(
        layout, uses, traffic, work=WORK, speeds=speeds(**own), threads=threads, rates=rates,
        held=held,
    )  # fmt: skip
    return told, traffic


def test_compute_is_arithmetic_over_the_rate_of_products() -> None:
    told, _ = found(flops=FLOPS / 2)
    assert told.step_s == pytest.approx(2.0)
    assert told.bound.by == "compute"
    assert told.forward_s == pytest.approx(2 / 3)
    assert told.bound.terms["processors"] == pytest.approx(1.0)  # one thread of two processors


def test_weights_are_filled_twice_a_micro_step_and_gradients_taken_once() -> None:
    filled, _ = found(fill=2 * 3 * ELEMS * 2)  # forward and backward, two bytes a weight
    assert filled.step_s == pytest.approx(1.0)
    twice, _ = found(micro_steps=2, fill=2 * 3 * ELEMS * 2)
    assert twice.step_s == pytest.approx(2.0)
    by_layers, _ = found(micro_steps=2, by_layers=True, fill=2 * 3 * ELEMS * 2)
    assert by_layers.step_s == pytest.approx(1.0)
    stay, _ = found(micro_steps=2, kept=[0, 1, 2], fill=3 * ELEMS * 2)
    assert stay.step_s == pytest.approx(1.0)
    taken, _ = found(take=(3 * ELEMS + 64) * (2 + 2))  # two bytes read and two written
    assert taken.step_s == pytest.approx(1.0)


def test_an_update_reads_state_and_gradients_and_writes_state_which_is_summed_up() -> None:
    padded = 3 * ELEMS * 12 + 4 * 4096  # the small tensors' four roles, a page each
    told, _ = found(update=3 * padded + (3 * ELEMS + 64) * 2)
    assert told.update_s == pytest.approx(1.0)
    assert told.bound.by == "update"
    assert told.step_s == pytest.approx(1.0)


def test_updates_take_processors_from_a_model_that_uses_all_of_them() -> None:
    padded = 3 * ELEMS * 12 + 4 * 4096
    update = 3 * padded + (3 * ELEMS + 64) * 2
    both = Threads(compute=2, update=1, processors=2, shared=True)
    told, _ = found(flops=FLOPS / 2, update=update, threads=both)
    assert told.step_s == pytest.approx(2.0 + 0.5)
    assert told.bound.terms["processors"] == pytest.approx(2.5)
    beside_a_gpu = Threads(compute=2, update=1, processors=2, shared=False)
    told, _ = found(flops=FLOPS / 2, update=update, threads=beside_a_gpu)
    assert told.step_s == pytest.approx(2.0)
    assert "processors" not in told.bound.terms


def test_drives_bound_a_step_by_what_it_moves() -> None:
    _, traffic = found()
    read = sum(traffic.read.values()) - traffic.lent // 2  # half of it is found where it was
    written = sum(traffic.written.values())
    told, _ = found(rates=Rates(read / 2, written / 3, (read + written) / 4))
    terms = told.bound.terms
    assert terms["disk_read"] == pytest.approx(2.0)
    assert terms["disk_write"] == pytest.approx(3.0)
    assert terms["disk_mixed"] == pytest.approx(4.0)
    assert told.step_s == pytest.approx(4.0)
    assert told.bound.by == "disk_mixed"


def test_unknown_drives_take_no_time() -> None:
    told, _ = found(flops=FLOPS)
    assert told.bound.terms["disk_read"] == 0


def test_only_the_last_micro_step_has_the_update_beside_it() -> None:
    _, traffic = found(micro_steps=2)
    moved = sum(
        size for name, size in traffic.read.items() if name.startswith("update.")
    ) - traffic.lent // 2 + sum(traffic.written.values())  # fmt: skip
    weights = traffic.total - moved - traffic.lent // 2
    rates = Rates(FAST, FAST, moved / 10)
    told, _ = found(micro_steps=2, rates=rates, flops=FLOPS / 8)
    one_pass = 4.0  # of compute; longer than its weights take
    assert one_pass > weights / 2 / rates.mixed
    assert told.step_s == pytest.approx(one_pass + 10 + weights / 2 / rates.mixed)
    assert told.step_s > told.bound.seconds


def test_an_update_that_is_held_runs_beside_the_next_forward_alone() -> None:
    _, traffic = found()
    update = sum(traffic.written.values()) + sum(
        size for name, size in traffic.read.items() if name.startswith("update.")
    )
    forward = sum(size for name, size in traffic.read.items() if name.startswith("forward."))
    rates = Rates(FAST, FAST, (update + forward) / 5)
    told, _ = found(held=True, rates=rates, flops=FLOPS / 6)
    assert told.step_s == pytest.approx(5 + 4)  # the drive for five, backward for four
