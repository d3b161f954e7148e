"""What is refused before an address reaches C: a message names the argument and both values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from offload import kernels
from offload.errors import ConfigError, StateError

ROW = kernels.adam_row(1e-3, (0.9, 0.999), 1e-8, 0.01, 1, decoupled=True)


def arguments(n: int = 8) -> dict[str, Any]:
    return {
        "hi": torch.zeros(n, dtype=torch.bfloat16), "lo": torch.zeros(n, dtype=torch.int16),
        "exp_avg": torch.zeros(n), "exp_avg_sq": torch.zeros(n), "grad": torch.zeros(n), "row": ROW,
    }  # fmt: skip


READ_ONLY = np.zeros(8, np.float32)
READ_ONLY.flags.writeable = False
SWAPPED = np.zeros(8, np.float32).astype(np.dtype("f4").newbyteorder("S"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hi", torch.zeros(8), "hi: expected bfloat16 or uint16 or int16, got float32"),
        ("lo", torch.zeros(8, dtype=torch.bfloat16), "lo: expected int16, got bfloat16"),
        ("exp_avg", torch.zeros(8).double(), "exp_avg: expected float32, got float64"),
        ("exp_avg_sq", torch.zeros(7), "exp_avg_sq: expected 8 elements as hi has, got 7"),
        ("exp_avg", torch.zeros(16)[::2], "exp_avg: expected contiguous"),
        ("exp_avg", np.zeros(16, np.float32)[::2], "exp_avg: expected contiguous"),
        ("exp_avg", READ_ONLY, "exp_avg: expected a writable array"),
        ("grad", SWAPPED, "grad: expected native byte order"),
        ("grad", torch.zeros(8, device="meta"), "grad: expected a tensor on cpu, got one on meta"),
        ("grad", [0.0] * 8, "grad: expected a tensor or array, got list"),
        ("grad", torch.zeros(8, dtype=torch.int16), "grad: expected float32 or bfloat16"),
        ("row", None, "row: expected a value of adam_row"),
        ("row", np.zeros(10, np.float32), "row: expected a value of adam_row"),
    ],
)  # fmt: skip
def test_an_argument_that_the_kernel_would_misread_is_refused(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(StateError, match=message):
        kernels.adam_split(**{**arguments(), name: value})


def test_a_read_only_gradient_is_fine_since_it_is_only_read() -> None:
    assert not kernels.adam_split(**{**arguments(), "grad": READ_ONLY})


REFUSED: list[tuple[Callable[[], None], str]] = [
    (lambda: kernels.convert(torch.zeros(3), torch.zeros(4)), "dst: expected 3 elements"),
    (
        lambda: kernels.grad_take(
            torch.zeros(3), torch.zeros(3).half(), round_to=torch.bfloat16, accumulate=False
        ),
        "dst: expected float32 or bfloat16, got float16",
    ),
    (
        lambda: kernels.grad_take(
            torch.zeros(3), torch.zeros(3).half(), round_to=torch.float16, accumulate=True
        ),
        "dst: expected float32, got float16",
    ),
    (
        lambda: kernels.grad_take(
            torch.zeros(3), torch.zeros(3), round_to=torch.float64, accumulate=True
        ),
        "round_to: expected one of",
    ),
    (lambda: kernels.norm_add(torch.zeros(3), kernels.Norm(2), -1), "below 2, got -1"),
    (
        lambda: kernels.adam_row(1e-3, (0.9, 0.999), 1e-8, 0.0, 0, decoupled=True) and None,
        "step count: expected >= 1, got 0",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_a_call_with_no_meaning_is_refused(call: Callable[[], None], message: str) -> None:
    with pytest.raises(StateError, match=message):
        call()


def test_an_unknown_variant_is_refused_and_the_known_ones_are_named() -> None:
    before = kernels.variant()
    with pytest.raises(ConfigError, match=r"portable.*got 'sse9'"):
        kernels.select("sse9")
    assert kernels.variant() == before


def test_empty_tensors_are_fine() -> None:
    assert not kernels.adam_split(**arguments(0))
    kernels.convert(torch.zeros(0), torch.zeros(0).half())
    norm = kernels.Norm(1)
    kernels.norm_add(torch.zeros(0), norm, 0)
    assert norm.total() == 0.0


def test_the_rows_have_the_layout_of_the_c_structures() -> None:
    from _offload_native import ffi

    for dtype, name in ((kernels.ROW, "simd_row"), (kernels.NORM, "simd_norm")):
        assert dtype.itemsize == ffi.sizeof(name)
        fields = dict(ffi.typeof(name).fields)
        assert list(dtype.names or ()) == list(fields)
        for field, (_, offset) in (dtype.fields or {}).items():
            assert fields[field].offset == offset
