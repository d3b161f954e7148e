"""The boundary to the update kernels of csrc/simd: check every tensor, then pass its address.

    update       master, states <- one fused update by a row's algorithm and the states' formats
    adam_split, adam_whole            the same for Adam with fp32 moments
    state_decode, state_encode        a state from and to fp32
    grad_take    dst <- round(src), or dst += round(src), with the sum of squares of the result
    convert, join, split                                              change of format

Tensors (torch on CPU, or numpy) may have any shape; they must be contiguous, and sizes must agree.
The GIL is released while a kernel runs.  All variants give the same bits; the environment variable
OFFLOAD_SIMD forces one.  Any thread may call a kernel, but one `Threads` serves one call at a time.
"""

from __future__ import annotations

import errno
import hashlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from _offload_native import ffi, lib

from offload.errors import ConfigError, StateError

Array = torch.Tensor | npt.NDArray[Any]

VARIANTS = ("avx512", "avx2", "neon", "portable")  # best first

ROW = np.dtype(
    [
        ("algorithm", np.uint32),
        ("step", np.uint32),
        *(
            (name, np.float32)
            for name in (
                "grad_scale", "l2", "decay", "beta1", "one_minus_beta1", "beta2",
                "one_minus_beta2", "step_size", "inv_sqrt_bias2", "eps",
            )
        ),
    ]
)  # fmt: skip
"""One row of hyper-parameters, whatever the algorithm: `struct simd_row`."""

ADAM_ROW = ROW

BLOCK_ELEMS: int = lib.SIMD_BLOCK
"""Elements that share a scale in the formats of eight bits."""

NORM = np.dtype(
    [
        ("lanes", np.float64, (16,)),
        ("total", np.float64),
        ("count", np.uint64),
        ("nonfinite", np.uint64),
    ]
)
"""The running sum of squares of one tensor: `struct simd_norm`."""

_FORMATS = {"float32": lib.SIMD_F32, "bfloat16": lib.SIMD_BF16, "float16": lib.SIMD_F16}
_FLOATS = tuple(_FORMATS)
_STATES = {
    "float32": lib.SIMD_F32, "bfloat16": lib.SIMD_BF16, "uint16": lib.SIMD_BF16,  # bf16's bits
    "int8": lib.SIMD_I8, "uint8": lib.SIMD_U8,
}  # fmt: skip
_HIGH = ("bfloat16", "uint16", "int16")
_LOW = ("int16",)
_HALVES = ("bfloat16", "float16")
_F32 = ("float32",)


def variant() -> str:
    """Name the variant in use; ConfigError when OFFLOAD_SIMD names one that cannot run here."""
    _check_environment()
    return str(ffi.string(lib.simd_variant()).decode())


def supported() -> tuple[str, ...]:
    """Name the variants that run on this machine, best first."""
    return tuple(name for name in VARIANTS if lib.simd_supported(name.encode()))


def select(name: str | None) -> None:
    """Use the variant `name` from now on in this process; None: choose again as at the start."""
    if lib.simd_select(ffi.NULL if name is None else name.encode()):
        wanted = os.environ.get("OFFLOAD_SIMD") if name is None else name
        raise ConfigError(_unknown_variant(str(wanted)))


@cache
def _check_environment() -> None:
    forced = os.environ.get("OFFLOAD_SIMD")
    if forced and forced not in supported():
        raise ConfigError(f"environment variable OFFLOAD_SIMD: {_unknown_variant(forced)}")


def _unknown_variant(name: str) -> str:
    names = ", ".join(supported())
    return f"kernel variant: expected one of {names} on this processor, got {name!r}. Unset it."


class Threads:
    """A fixed number of threads, the caller's included, for the calls that accept `threads=`.

    One caller at a time.  A forked child must open its own.  Closing twice is fine.
    """

    def __init__(self, num_threads: int) -> None:
        out = ffi.new("simd_pool **")
        error = lib.simd_pool_open(num_threads, out) if 0 < num_threads < 2**32 else -errno.EINVAL
        if error == -errno.EINVAL:
            raise ConfigError(f"kernel threads: expected 1 to 1024, got {num_threads}. Lower it.")
        if error:
            raise StateError(
                f"kernel threads: cannot start {num_threads}: {os.strerror(-error)}. Use fewer."
            )
        self.num_threads = num_threads
        self._pool = out[0]
        self._close = weakref.finalize(self, lib.simd_pool_close, out[0])

    def close(self) -> None:
        """Join the threads."""
        self._close()

    @property
    def pool(self) -> Any:
        """The `simd_pool *`."""
        if not self._close.alive:
            raise StateError(
                "kernel threads: expected open threads, got closed ones. Open new ones."
            )
        return self._pool

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def adam_row(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    *,
    decoupled: bool,
    grad_scale: float = 1.0,
) -> np.void:
    """Compute what is equal for all elements of a tensor in a step, in double, rounded once.

    `step` counts from 1.  `decoupled`: AdamW's decay (w *= 1 - lr * weight_decay), else Adam's
    (g += weight_decay * w).
    Formula: Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101.
    """
    if step < 1:
        raise StateError(f"Adam step count: expected >= 1, got {step}. Count the step before it.")
    row = np.zeros((), ROW)
    row["algorithm"], row["step"] = lib.SIMD_ADAM, step % 2**32
    row["grad_scale"] = grad_scale
    row["l2"] = 0.0 if decoupled else weight_decay
    row["decay"] = 1.0 - lr * weight_decay if decoupled else 1.0
    row["beta1"], row["beta2"] = betas
    row["one_minus_beta1"] = 1.0 - betas[0]
    row["one_minus_beta2"] = 1.0 - betas[1]
    row["step_size"] = lr / (1.0 - betas[0] ** step)
    row["inv_sqrt_bias2"] = 1.0 / (1.0 - betas[1] ** step) ** 0.5
    row["eps"] = eps
    return _void(row)


def _void(row: npt.NDArray[Any]) -> np.void:
    scalar = row[()]
    assert isinstance(scalar, np.void)
    return scalar


class Norm:
    """Sums of squares of `num_tensors` tensors: the same bits however their pieces are cut."""

    def __init__(self, num_tensors: int) -> None:
        self.sums: npt.NDArray[np.void] = np.zeros(num_tensors, NORM)

    def reset(self, index: int | None = None) -> None:
        """Forget what was added to tensor `index`; None: to all."""
        self.sums[slice(None) if index is None else index] = np.zeros((), NORM)

    def value(self, index: int) -> float:
        """Return the sum of squares of tensor `index`; NaN if an element is Inf or NaN."""
        return float(lib.simd_norm_value(self.pointer(index)))

    def nonfinite(self, index: int) -> int:
        """Return how many elements of tensor `index` were Inf or NaN."""
        return int(self.sums[index]["nonfinite"])

    def total(self) -> float:
        """Return the norm over all tensors, summed in order in fp64; NaN if an element was."""
        squares = 0.0
        for index in range(len(self.sums)):
            squares += self.value(index)
        return float(squares**0.5)

    def pointer(self, index: int) -> Any:
        """The `simd_norm *` of tensor `index`; valid as long as this object."""
        if not 0 <= index < len(self.sums):
            raise StateError(f"norm: expected a tensor index below {len(self.sums)}, got {index}.")
        return ffi.cast("simd_norm *", self.sums.ctypes.data + index * NORM.itemsize)


@dataclass(frozen=True)
class Split:
    """A master in two halves, updated in place (DESIGN T2)."""

    hi: Array  # (n,) bf16, or its bits as uint16 or int16: the weight
    lo: Array  # (n,) int16


@dataclass(frozen=True)
class Whole:
    """A master that is kept whole, updated in place."""

    master: Array  # (n,) fp32
    weight: Array | None = None  # (n,) bf16 or fp16, written only: the master, rounded


@dataclass(frozen=True)
class State:
    """One state of an algorithm, updated in place; the type of `data` is its format.

    In eight bits (int8, or uint8 for what is never negative) each block of BLOCK_ELEMS elements
    has a scale.
    """

    name: str
    data: Array  # (n,) fp32, bf16, int8 or uint8
    scale: Array | None = None  # (ceil(n / 256),) fp32


@dataclass(frozen=True)
class Origin:
    """Where in which tensor a piece begins: with the step it chooses how state is rounded."""

    key: int = 0  # tensor_key(name)
    first: int = 0  # element; in eight bits a multiple of BLOCK_ELEMS


def tensor_key(name: str) -> int:
    """Hash the name of a parameter to the 64 bits that its rounding is keyed by."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def update(
    master: Split | Whole,
    states: Sequence[State],  # as the algorithm of `row` wants them; Adam: exp_avg, exp_avg_sq
    grad: Array,  # (n,) bf16, fp16 or fp32; read only
    *,
    row: np.void,  # ROW
    origin: Origin = Origin(),
    threads: Threads | None = None,
) -> bool:
    """Update master and states in one pass.

    True: a master, its rounded weight, or a state in eight bits became Inf or NaN.
    """
    at = ffi.new("simd_streams *")
    checked = [*_place_master(at, master), *_place_states(at, states, origin)]
    gradient = _check("grad", grad, _FLOATS)
    num_elems = _same_size(*checked, gradient)
    at.grad, at.grad_format = gradient.cast("void *"), gradient.format
    at.key, at.first = origin.key, origin.first
    kept = _kept(row)
    arguments = (at, num_elems, ffi.cast("simd_row *", kept.ctypes.data))
    if threads is None:
        return bool(_status("update", lib.simd_update(*arguments)))
    return bool(_status("update", lib.simd_pool_update(threads.pool, *arguments)))


def _place_master(at: Any, master: Split | Whole) -> list[_Flat]:
    if isinstance(master, Split):
        high = _check("hi", master.hi, _HIGH, writes=True)
        low = _check("lo", master.lo, _LOW, writes=True)
        # Of nothing, an address may be none: the halves' presence says that the master is split.
        at.hi, at.lo = ffi.cast("uint16_t *", high.address or 2), low.cast("int16_t *")
        return [high, low]
    whole = _check("master", master.master, _F32, writes=True)
    at.master = whole.cast("float *")
    if master.weight is None:
        return [whole]
    copy = _check("weight", master.weight, _HALVES, writes=True)
    at.weight, at.weight_format = copy.cast("void *"), copy.format
    return [whole, copy]


def _place_states(at: Any, states: Sequence[State], origin: Origin) -> list[_Flat]:
    found = []
    if len(states) > 2:
        raise StateError(f"states: expected at most 2, got {len(states)}.")
    for index, state in enumerate(states):
        data = _check(state.name, state.data, tuple(_STATES), writes=True)
        at.state[index], at.state_format[index] = data.cast("void *"), _STATES[data.dtype]
        if (scale := _check_scale(state, data, origin.first, writes=True)) is not None:
            at.scale[index] = scale.cast("float *")
        found.append(data)
    return found


def _check_scale(state: State, data: _Flat, first: int, *, writes: bool = False) -> _Flat | None:
    """Refuse scales where there are none, or another number of them than of blocks."""
    blocked = data.dtype in ("int8", "uint8")
    if blocked is (state.scale is None):
        wanted = "scales" if blocked else "no scales"
        raise StateError(f"{state.name}: expected {wanted} with {data.dtype}.")
    if state.scale is None:
        return None
    scale = _check(f"scale of {state.name}", state.scale, _F32, writes=writes)
    num_blocks = -(-data.num_elems // BLOCK_ELEMS)
    if scale.num_elems != num_blocks or first % BLOCK_ELEMS:
        raise StateError(
            f"scale of {state.name}: expected {num_blocks} scales, for blocks of {BLOCK_ELEMS} from"
            f" the tensor's first element, got {scale.num_elems}, from element {first}."
        )
    return scale


def adam_split(
    hi: Array,  # (n,) bf16, or its bits as uint16 or int16: the weight
    lo: Array,  # (n,) int16: low half of the fp32 master
    exp_avg: Array,  # (n,) fp32
    exp_avg_sq: Array,  # (n,) fp32
    grad: Array,  # (n,) bf16, fp16 or fp32; read only
    *,
    row: np.void,  # ROW
    threads: Threads | None = None,
) -> bool:
    """Update weight, master and fp32 moments; True if a master became Inf or NaN."""
    states = _fp32_moments(exp_avg, exp_avg_sq)
    return update(Split(hi, lo), states, grad, row=row, threads=threads)


def adam_whole(
    master: Array,  # (n,) fp32
    exp_avg: Array,  # (n,) fp32
    exp_avg_sq: Array,  # (n,) fp32
    grad: Array,  # (n,) bf16, fp16 or fp32; read only
    *,
    row: np.void,  # ROW
    weight: Array | None = None,  # (n,) bf16 or fp16, written only: the master, rounded
    threads: Threads | None = None,
) -> bool:
    """Update a master that is kept whole; True if it, or its rounded weight, became Inf or NaN."""
    states = _fp32_moments(exp_avg, exp_avg_sq)
    return update(Whole(master, weight), states, grad, row=row, threads=threads)


def _fp32_moments(exp_avg: Array, exp_avg_sq: Array) -> list[State]:
    for name, moment in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        _check(name, moment, _F32)
    return [State("exp_avg", exp_avg), State("exp_avg_sq", exp_avg_sq)]


def state_decode(state: State, dst: Array) -> None:
    """Write a state to `dst`, (n,) fp32."""
    data, target = (
        _check(state.name, state.data, tuple(_STATES)),
        _check("dst", dst, _F32, writes=True),
    )
    scale = _check_scale(state, data, 0)
    error = lib.simd_state_decode(
        data.cast("void *"), ffi.NULL if scale is None else scale.cast("float *"),
        _STATES[data.dtype], target.cast("float *"), _same_size(data, target),
    )  # fmt: skip
    _status("state_decode", error)


def state_encode(
    src: Array, state: State, *, index: int, step: int, origin: Origin = Origin()
) -> bool:
    """Write `src`, (n,) fp32, to a state, rounded as an update at `step` would round state `index`.

    True: Inf or NaN cannot be encoded in eight bits; their blocks became NaN.
    """
    source = _check("src", src, _F32)
    data = _check(state.name, state.data, tuple(_STATES), writes=True)
    scale = _check_scale(state, data, origin.first, writes=True)
    status = lib.simd_state_encode(
        source.cast("float *"), data.cast("void *"),
        ffi.NULL if scale is None else scale.cast("float *"), _STATES[data.dtype],
        _same_size(source, data), origin.key, origin.first, step % 2**32, index,
    )  # fmt: skip
    return bool(_status("state_encode", status))


def rounding_numbers(
    num_elems: int, dtype: str, *, index: int, step: int, origin: Origin
) -> npt.NDArray[np.uint32]:
    """The numbers, of 16 (bfloat16) or 20 bits, that elements are rounded with; for tests."""
    numbers = np.empty(num_elems, np.uint32)
    error = lib.simd_random(
        origin.key, origin.first, step % 2**32, _STATES[dtype], index,
        ffi.cast("uint32_t *", numbers.ctypes.data), num_elems,
    )  # fmt: skip
    _status("rounding_numbers", error)
    return numbers


def _kept(row: np.void) -> npt.NDArray[Any]:
    """The row in memory that stays for the call."""
    if getattr(row, "dtype", None) != ROW:
        raise StateError(f"row: expected a value of adam_row(), got {type(row).__name__}.")
    return np.array(row)


def grad_take(
    src: Array,  # (n,) bf16, fp16 or fp32
    dst: Array,  # (n,) fp32, or `round_to` when not accumulating
    *,
    round_to: torch.dtype,
    accumulate: bool,
    norm: Norm | None = None,
    index: int = 0,
) -> None:
    """Store round(src) or add it to `dst`; add the result's squares to tensor `index` of `norm`."""
    source, target = _check("src", src, _FLOATS), _check("dst", dst, _FLOATS, writes=True)
    num_elems = _same_size(source, target)
    round_name = str(round_to).removeprefix("torch.")
    if round_name not in _FLOATS:
        raise StateError(f"round_to: expected one of {', '.join(_FLOATS)}, got {round_name}.")
    if target.dtype != "float32" and (accumulate or target.dtype != round_name):
        wanted = "float32" if accumulate else f"float32 or {round_name}"
        raise StateError(f"dst: expected {wanted}, got {target.dtype}.")
    error = lib.simd_grad_take(
        source.cast("void *"), source.format, _FORMATS[round_name], target.cast("void *"),
        target.format, accumulate, num_elems, ffi.NULL if norm is None else norm.pointer(index),
    )  # fmt: skip
    _status("grad_take", error)


def norm_add(src: Array, norm: Norm, index: int) -> None:
    """Add the squares of the next piece of tensor `index`."""
    source = _check("src", src, _FLOATS)
    error = lib.simd_norm_add(
        source.cast("void *"), source.format, source.num_elems, norm.pointer(index)
    )
    _status("norm_add", error)


def convert(src: Array, dst: Array, *, threads: Threads | None = None) -> None:
    """Copy with conversion among fp32, bf16 and fp16, to nearest even."""
    source, target = _check("src", src, _FLOATS), _check("dst", dst, _FLOATS, writes=True)
    num_elems = _same_size(source, target)
    arguments = (
        source.cast("void *"), source.format, target.cast("void *"), target.format, num_elems,
    )  # fmt: skip
    if threads is None:
        _status("convert", lib.simd_convert(*arguments))
    else:
        _status("convert", lib.simd_pool_convert(threads.pool, *arguments))


def join(hi: Array, lo: Array, dst: Array, *, threads: Threads | None = None) -> None:
    """Put the exact fp32 master together from its halves."""
    high, low = _check("hi", hi, _HIGH), _check("lo", lo, _LOW)
    target = _check("dst", dst, _F32, writes=True)
    arguments = (
        high.cast("uint16_t *"), low.cast("int16_t *"), target.cast("float *"),
        _same_size(high, low, target),
    )  # fmt: skip
    if threads is None:
        _status("join", lib.simd_join(*arguments))
    else:
        _status("join", lib.simd_pool_join(threads.pool, *arguments))


def split(src: Array, hi: Array, lo: Array) -> None:
    """Take the fp32 master apart: `hi` is it as bf16 (ties away from zero), `lo` the exact rest."""
    source = _check("src", src, _F32)
    high, low = _check("hi", hi, _HIGH, writes=True), _check("lo", lo, _LOW, writes=True)
    num_elems = _same_size(source, high, low)
    error = lib.simd_split(
        source.cast("float *"), high.cast("uint16_t *"), low.cast("int16_t *"), num_elems
    )
    _status("split", error)


@dataclass(frozen=True)
class _Flat:
    """A checked argument: its address and what the kernel must know about it."""

    name: str
    address: int
    dtype: str
    num_elems: int

    @property
    def format(self) -> int:
        return int(_FORMATS[self.dtype])

    def cast(self, kind: str) -> Any:
        return ffi.cast(kind, self.address)


def _check(name: str, array: Array, dtypes: tuple[str, ...], *, writes: bool = False) -> _Flat:
    """Refuse what the kernel would misread; the caller keeps `array` alive."""
    if isinstance(array, torch.Tensor):
        if array.device.type != "cpu":
            raise StateError(f"{name}: expected a tensor on cpu, got one on {array.device}.")
        dtype, contiguous = str(array.dtype).removeprefix("torch."), array.is_contiguous()
        address, num_elems, writable = array.data_ptr(), array.numel(), True
    elif isinstance(array, np.ndarray):
        dtype, contiguous = array.dtype.name, array.flags.c_contiguous
        address, num_elems, writable = array.ctypes.data, array.size, array.flags.writeable
        if not array.dtype.isnative:
            raise StateError(f"{name}: expected native byte order, got {array.dtype.str}.")
    else:
        raise StateError(f"{name}: expected a tensor or array, got {type(array).__name__}.")
    if dtype not in dtypes:
        raise StateError(f"{name}: expected {' or '.join(dtypes)}, got {dtype}.")
    if not contiguous:
        raise StateError(f"{name}: expected contiguous elements, got strides. Copy it first.")
    if writes and not writable:
        raise StateError(f"{name}: expected a writable array, got a read-only one.")
    return _Flat(name, address, dtype, num_elems)


def _same_size(first: _Flat, *others: _Flat) -> int:
    for other in others:
        if other.num_elems != first.num_elems:
            raise StateError(
                f"{other.name}: expected {first.num_elems} elements as {first.name} has, "
                f"got {other.num_elems}."
            )
    return first.num_elems


def _status(call: str, status: int) -> int:
    """Pass on 0 and positive results; negative ones are misuse that the checks above cannot see."""
    if status == -errno.EPERM:
        raise StateError(
            f"{call}: these threads belong to the parent process. Open new ones after the fork."
        )
    if status == -errno.EBUSY:
        raise StateError(f"{call}: these threads are in use by another caller. Use one per caller.")
    if status < 0:
        raise StateError(f"{call}: {os.strerror(-status)}.")
    return status
