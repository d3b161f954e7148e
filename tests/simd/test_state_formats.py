"""States in bf16 and eight bits: the documented bits on every variant, however a tensor is cut."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_arrays import OFFSETS, SIZES, Array, State, placed, tame_state, wild_state
from state_reference import decode, encode, fma, numbers

from offload import kernels
from offload.kernels import BLOCK_ELEMS, Origin

FORMATS = {"bf16": ("bfloat16", "bfloat16"), "int8": ("int8", "uint8")}
BITS = {"bfloat16": np.uint16, "int8": np.int8, "uint8": np.uint8, "float32": np.float32}
PAIRS = st.sampled_from(
    [*FORMATS.values(), ("float32", "bfloat16"), ("int8", "float32"), ("bfloat16", "uint8")]
)
GRADS = st.sampled_from(["float32", "bfloat16", "float16"])
SEEDS = st.integers(0, 2**32 - 1)
KEYS = st.integers(0, 2**64 - 1)
FIRST = st.sampled_from([0, BLOCK_ELEMS, 2**32 - BLOCK_ELEMS, 2**40])
STEPS = st.sampled_from([1, 2, 999, 2**31])


def row_at(step: int) -> np.void:
    return kernels.adam_row(1e-3, (0.9, 0.999), 1e-8, 0.01, step, decoupled=True, grad_scale=0.5)


def as_tensor(codes: Array) -> Any:
    """bf16 bits become a torch tensor that shares memory; other arrays stay."""
    if codes.dtype == np.uint16:
        return torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16)
    return codes


class Formatted:
    """An update's streams with both moments in some format."""

    def __init__(self, start: State, names: tuple[str, str], origin: Origin) -> None:
        self.names, self.origin = names, origin
        self.hi, self.lo, self.grad = start.hi.copy(), start.lo.copy(), start.grad
        self.codes: list[Array] = []
        self.scales: list[Array | None] = []
        for index, (name, moment) in enumerate(
            zip(names, (start.exp_avg, start.exp_avg_sq), strict=False)
        ):
            finite = np.where(np.isfinite(moment), moment, np.float32(1))
            values = np.abs(finite) if index else finite
            codes, scale = encode(values, name, np.full(len(values), 7, np.uint32))
            self.codes.append(codes)
            self.scales.append(scale)

    def move(self, offsets: tuple[int, ...]) -> Formatted:
        """The same streams at other addresses."""
        self.hi, self.lo = placed(self.hi, offsets[0]), placed(self.lo, offsets[1])
        self.codes = [placed(codes, o) for codes, o in zip(self.codes, offsets[2:4], strict=True)]
        self.scales = [None if s is None else s.copy() for s in self.scales]
        return self

    def states(self, start: int = 0, stop: int | None = None) -> list[kernels.State]:
        found = []
        for name, codes, scale in zip(
            ("exp_avg", "exp_avg_sq"), self.codes, self.scales, strict=False
        ):
            blocks = slice(start // BLOCK_ELEMS, None if stop is None else -(-stop // BLOCK_ELEMS))
            piece = None if scale is None else scale[blocks]
            found.append(kernels.State(name, as_tensor(codes[start:stop]), piece))
        return found

    def update(self, row: np.void, start: int = 0, stop: int | None = None, **kw: Any) -> bool:
        return kernels.update(
            kernels.Split(self.hi[start:stop], self.lo[start:stop]), self.states(start, stop),
            self.grad[start:stop], row=row,
            origin=Origin(self.origin.key, self.origin.first + start), **kw,
        )  # fmt: skip

    def data(self) -> tuple[bytes, ...]:
        streams = [self.hi, self.lo, *self.codes, *(s for s in self.scales if s is not None)]
        return tuple(stream.tobytes() for stream in streams)

    def master(self) -> Array:
        joined = np.empty(self.hi.shape, np.float32)
        kernels.join(self.hi, self.lo, joined)
        return joined


def reference(state: Formatted, row: np.void, step: int) -> tuple[Array, list[Any]]:
    """The master and the encoded moments after an update, all of it in numpy."""
    k = {name: row[name] for name in kernels.ROW.names or ()}
    w, grad = state.master(), torch.as_tensor(state.grad).float().numpy()
    m, v = (decode(codes, scale) for codes, scale in zip(state.codes, state.scales, strict=True))
    g = fma(k["l2"], w, k["grad_scale"] * grad)
    m = fma(k["one_minus_beta1"], g, k["beta1"] * m)
    v = fma(k["one_minus_beta2"] * g, g, k["beta2"] * v)
    den = fma(np.sqrt(v), k["inv_sqrt_bias2"], k["eps"])
    w = fma(-k["step_size"], m / den, k["decay"] * w)
    moments = []
    for index, (name, x) in enumerate(zip(state.names, (m, v), strict=True)):
        random = numbers(
            len(x), name, index=index, step=step, key=state.origin.key, first=state.origin.first
        )
        moments.append(encode(x, name, random))
    return w, moments


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, n=SIZES, names=PAIRS, grad=GRADS, key=KEYS, first=FIRST, step=STEPS)
def test_an_update_is_decode_formula_and_encode_as_documented(
    seed: int, n: int, names: Any, grad: str, key: int, first: int, step: int
) -> None:
    state = Formatted(tame_state(seed, n, grad), names, Origin(key, first))
    if n:
        master, moments = reference(state, row_at(step), step)
    assert not state.update(row_at(step))
    if n:
        assert np.array_equal(state.master(), master)
        for index, (codes, scale) in enumerate(moments):
            assert np.array_equal(
                decode(state.codes[index], state.scales[index]), decode(codes, scale)
            )
            assert scale is None or np.array_equal(state.scales[index], scale)


@settings(max_examples=80, deadline=None)
@given(
    seed=SEEDS, n=SIZES, names=PAIRS, grad=GRADS, key=KEYS, offsets=OFFSETS, wild=st.booleans(),
    split=st.booleans(),
)  # fmt: skip
def test_all_variants_give_the_same_bits_in_every_format(
    seed: int, n: int, names: Any, grad: str, key: int, offsets: Any, wild: bool, split: bool
) -> None:
    start = (wild_state if wild else tame_state)(seed, n, grad)

    def result(name: str, at: tuple[int, ...]) -> tuple[Any, ...]:
        kernels.select(name)
        state = Formatted(start, names, Origin(key, 512)).move(at)
        if split:
            return state.update(row_at(5)), *state.data()
        whole = kernels.Whole(placed(start.master(), at[0]), torch.zeros(n, dtype=torch.float16))
        reported = kernels.update(
            whole, state.states(), start.grad, row=row_at(5), origin=state.origin
        )
        return reported, whole.master.tobytes(), *state.data()[2:]

    wanted = result("portable", (0,) * 5)
    for name in kernels.supported():
        assert result(name, offsets) == wanted, name


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, n=SIZES, names=PAIRS, cuts=st.lists(st.integers(0, 20), max_size=4))
def test_a_tensor_cut_at_blocks_is_updated_to_the_same_bits(
    seed: int, n: int, names: Any, cuts: list[int]
) -> None:
    start = tame_state(seed, n, "bfloat16")
    whole, pieces = (Formatted(start, names, Origin(99, BLOCK_ELEMS)) for _ in range(2))
    whole.update(row_at(3))
    borders = [0, *sorted({cut * BLOCK_ELEMS for cut in cuts if 0 < cut * BLOCK_ELEMS < n}), n]
    for first, stop in itertools.pairwise(borders):
        pieces.update(row_at(3), first, stop)
    assert pieces.data() == whole.data()


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, n=SIZES, cut=st.floats(0, 1), first=st.integers(0, 1000))
def test_bf16_moments_are_the_same_bits_wherever_a_tensor_is_cut(
    seed: int, n: int, cut: float, first: int
) -> None:
    start, at = tame_state(seed, n, "bfloat16"), int(cut * n)
    whole, pieces = (Formatted(start, FORMATS["bf16"], Origin(99, first)) for _ in range(2))
    whole.update(row_at(3))
    pieces.update(row_at(3), 0, at)
    pieces.update(row_at(3), at, n)
    assert pieces.data() == whole.data()


@pytest.mark.parametrize("names", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("n", [0, 1, 4096, 70_001])
def test_threads_do_not_change_a_bit(names: tuple[str, str], n: int) -> None:
    start = tame_state(3, n, "bfloat16")
    alone, together = (Formatted(start, names, Origin(5, 0)) for _ in range(2))
    alone.update(row_at(2))
    with kernels.Threads(3) as threads:
        together.update(row_at(2), threads=threads)
    assert together.data() == alone.data()
