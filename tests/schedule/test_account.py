"""State by kind: the 16 bytes a parameter, and what is kept here instead."""

from __future__ import annotations

from shapes import ELEMS, FORMATS, small_of, units_of

from offload.partition.states import StateTable
from offload.partition.weights import Weights
from offload.schedule.account import account
from offload.schedule.placement import Formats

NUM = 2 * ELEMS


def test_adam_in_mixed_precision_is_sixteen_bytes_a_parameter() -> None:
    found = account(units_of(2), FORMATS)
    assert found.num_params == found.num_trained == NUM
    assert found.in_memory == {
        "weights": 2 * NUM, "gradients": 2 * NUM, "masters": 4 * NUM,
        "exp_avg": 4 * NUM, "exp_avg_sq": 4 * NUM,
    }  # fmt: skip
    assert found.per_param(found.in_memory) == 16


def test_here_the_master_is_its_low_half() -> None:
    found = account(units_of(2), FORMATS)
    assert found.here["masters"] == 2 * NUM
    assert found.per_param(found.here) == 14


def test_smaller_state_counts_as_it_is_kept() -> None:
    bf16 = StateTable.of(("exp_avg", "exp_avg_sq"), "bf16")
    assert account(units_of(2, bf16), Formats(2, 2, 2, bf16)).here["exp_avg"] == 2 * NUM
    int8 = StateTable.of(("exp_avg", "exp_avg_sq"), "int8")
    here = account(units_of(2, int8), Formats(2, 2, 2, int8)).here
    assert here["exp_avg"] == NUM + 4 * NUM // 256  # a byte, and a scale for each 256


def test_one_state_or_none() -> None:
    for names in (("sum",), ()):
        states = StateTable.of(names, "fp32")
        found = account(units_of(1, states), Formats(2, 2, 2, states))
        assert sum(found.in_memory.values()) == (8 + 4 * len(names)) * ELEMS
        assert set(found.here) == {"weights", "gradients", "masters", *names}


def test_whole_fp32_weights_have_no_second_master() -> None:
    states = StateTable(weights=Weights("float32"))
    found = account(units_of(1, states), Formats(4, 4, 4, states))
    assert found.in_memory["masters"] == 0
    assert found.in_memory["weights"] == found.in_memory["gradients"] == 4 * ELEMS
    assert found.here["weights"] + found.here["masters"] == 4 * ELEMS


def test_fp16_keeps_a_whole_master() -> None:
    states = StateTable(weights=Weights("float16"))
    assert account(units_of(1, states), Formats(2, 2, 2, states)).here["masters"] == 4 * ELEMS


def test_frozen_tensors_have_weights_alone() -> None:
    found = account([small_of(0)], FORMATS)
    assert (found.num_params, found.num_trained) == (128, 64)
    assert found.in_memory["weights"] == 2 * 128
    assert found.in_memory["exp_avg"] == 4 * 64
