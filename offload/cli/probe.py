"""Measure what this machine computes and moves, in about three seconds: for `offload plan`.

    products     forward and backward of the model's largest products, at most 512 tokens; several
                 in turn, as in a step: weights have left the near caches before they are used again
    between      a norm, a gate and a sum on the inputs and outputs of these, the same way
    attention    the same of dot products over its sequences, at most 1024 long
    stream       a block of memory read and written in place: what bounds an update
    fill         weights converted into new memory, as a fetch does

Kept in the drive's profile by a name that says what was measured, and on what.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from offload import kernels
from offload.cli.machine import processor_name
from offload.runtime.binding import new_storage
from offload.schedule.predict import Speeds, Threads
from offload.schedule.work import Attention, Product, Work

MAX_TOKENS, MAX_WIDTH, MAX_SHAPES = 512, 4096, 4
MAX_SEQ, HEAD, MAX_HEADS = 1024, 64, 16
IN_TURN_BYTES = 16 << 20  # of weights: beyond the caches that a processor has for itself
STREAM_ELEMS = 32 << 20  # 128 MiB in fp32: beyond the caches
FILL_ELEMS = 16 << 20
LEAST_ROUNDS, LEAST_S = 5, 0.15


@dataclass(frozen=True)
class Shape:
    """A product, and how many of it take turns."""

    tokens: int
    inputs: int
    outputs: int
    count: int

    def __str__(self) -> str:
        return f"{self.tokens} x {self.inputs} x {self.outputs}, {self.count} in turn"


@dataclass(frozen=True)
class Share:
    """Of a shape, in all shapes that are measured."""

    flops: float
    elems: float  # into and out of it


@dataclass(frozen=True)
class Wanted:
    """What a prediction needs to know."""

    work: Work
    tokens: int  # of a micro-step
    compute_dtype: torch.dtype
    device: torch.device
    threads: Threads
    fill_threads: int

    def shapes(self) -> dict[Shape, Share]:
        """The products with the largest shares of the arithmetic."""
        found: dict[tuple[int, int], list[Product]] = {}
        for product in self.work.products:
            width = min(product.inputs, MAX_WIDTH), min(product.outputs, MAX_WIDTH)
            found.setdefault(width, []).append(product)
        flops = {width: sum(each.forward_flops for each in of) for width, of in found.items()}
        largest = sorted(flops, key=lambda width: -flops[width])[:MAX_SHAPES]
        elems = {
            width: sum((each.inputs + each.outputs) * each.count * each.share for each in of)
            for width, of in found.items()
        }
        both = sum(flops[width] for width in largest), sum(elems[width] for width in largest)
        itemsize, tokens = self.compute_dtype.itemsize, min(self.tokens, MAX_TOKENS)
        return {
            Shape(
                tokens, inputs, outputs,
                max(1, min(count, IN_TURN_BYTES // (inputs * outputs * itemsize))),
            ): Share(flops[inputs, outputs] / both[0], elems[inputs, outputs] / both[1])
            for inputs, outputs in largest
            for count in [sum(each.count for each in found[inputs, outputs])]
            if all(both)
        }  # fmt: skip

    def names(self) -> dict[str, Callable[[], float]]:
        """What is to be measured, by the name under which it is kept."""
        where = _machine(self.device, self.threads.compute)
        dtype = str(self.compute_dtype).removeprefix("torch.")
        found: dict[str, Callable[[], float]] = {}
        for shape in self.shapes():
            for what, measure in (("products", _products), ("between", _between)):
                name = f"{where}: {dtype} {what} {shape}"
                found[name] = partial(measure, shape, self.compute_dtype, self.device)
        if self.work.attention is not None:
            found[f"{where}: {dtype} {self._attention()}"] = partial(
                _attention, self.work.attention, self._seq, self.compute_dtype, self.device
            )
        here = _machine(torch.device("cpu"), self.threads.compute)
        for count in {1, self.threads.update}:
            found[f"{here}: stream on {count}"] = partial(_stream, count)
        fill = f"{where}: fill {dtype} on {self.fill_threads}"
        found[fill] = partial(_fill, self.compute_dtype, self.device, self.fill_threads)
        return found

    @property
    def _seq(self) -> int:
        return min(self.work.seq, MAX_SEQ)

    def _attention(self) -> str:
        found = self.work.attention
        assert found is not None
        kind = "causal attention" if found.causal else "attention"
        return f"{kind} {_heads(found)} x {self._seq} x {HEAD}"

    def speeds(self, measured: Mapping[str, float]) -> Speeds:
        """From what was measured under `names`."""
        where = _machine(self.device, self.threads.compute)
        here = _machine(torch.device("cpu"), self.threads.compute)
        dtype = str(self.compute_dtype).removeprefix("torch.")
        shapes = self.shapes()
        of_flops = sum(
            share.flops / measured[f"{where}: {dtype} products {shape}"]
            for shape, share in shapes.items()
        )
        of_elems = sum(
            share.elems / measured[f"{where}: {dtype} between {shape}"]
            for shape, share in shapes.items()
        )
        attention = 0.0
        if self.work.attention is not None:
            attention = measured[f"{where}: {dtype} {self._attention()}"]
        stream = {count: measured[f"{here}: stream on {count}"]
                  for count in (1, self.threads.update)}  # fmt: skip
        fill = measured[f"{where}: fill {dtype} on {self.fill_threads}"]
        return Speeds(
            1.0 / of_flops if of_flops else 0.0, attention, 1.0 / of_elems if of_elems else 0.0,
            stream[1], fill, stream[self.threads.update],
        )  # fmt: skip


def missing(wanted: Wanted, known: Mapping[str, float]) -> dict[str, Callable[[], float]]:
    """What has to be measured, beyond what is `known`."""
    return {name: probe for name, probe in wanted.names().items() if name not in known}


def _machine(device: torch.device, threads: int) -> str:
    """Rates of another machine, torch or number of threads are not these."""
    name = processor_name()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}, {threads} threads"


def _products(shape: Shape, dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second, forward of all in turn and backward of all."""
    xs = _several(shape.count, (shape.tokens, shape.inputs), dtype, device)
    weights = _several(shape.count, (shape.outputs, shape.inputs), dtype, device)
    grad = torch.randn(shape.tokens, shape.outputs, device=device).to(dtype)

    def once() -> None:
        found = [F.linear(x, weight) for x, weight in zip(xs, weights, strict=True)]
        for each in reversed(found):
            each.backward(grad)
        _forget(*xs, *weights)

    flops = 6.0 * shape.count * shape.tokens * shape.inputs * shape.outputs
    return flops / _seconds(once)


def _between(shape: Shape, dtype: torch.dtype, device: torch.device) -> float:
    """Elements per second of inputs, which a norm makes and a sum takes on, and of outputs, one
    half of which gates the other; forward of all in turn and backward of all."""
    xs = _several(shape.count, (shape.tokens, shape.inputs), dtype, device)
    ys = _several(shape.count, (shape.tokens, shape.outputs), dtype, device)
    scale = torch.ones(shape.inputs, device=device, dtype=dtype, requires_grad=True)

    def once() -> None:
        found = []
        for x, y in zip(xs, ys, strict=True):
            gate, up = y.tensor_split(2, dim=-1)
            gated = F.silu(gate[:, : up.shape[1]]) * up
            found += [x + F.rms_norm(x, (shape.inputs,), scale), gated]
        for each in reversed(found):
            each.backward(each.detach())
        _forget(*xs, *ys, scale)

    return shape.count * shape.tokens * (shape.inputs + shape.outputs) / _seconds(once)


def _several(
    count: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(count)]


def _forget(*tensors: torch.Tensor) -> None:
    """Drop their gradients, behind the device's work."""
    if tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)
    for each in tensors:
        each.grad = None


def _heads(attention: Attention) -> int:
    return max(1, min(attention.width // HEAD, MAX_HEADS))


def _attention(
    attention: Attention, seq: int, dtype: torch.dtype, device: torch.device
) -> float:  # fmt: skip
    heads = _heads(attention)
    query, key, value, grad = (
        torch.randn(1, heads, seq, HEAD, device=device).to(dtype).requires_grad_() for _ in range(4)
    )

    def once() -> None:
        query.grad = key.grad = value.grad = None
        found = F.scaled_dot_product_attention(query, key, value, is_causal=attention.causal)
        found.backward(grad)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    one_layer = Attention(1, heads * HEAD, attention.causal)
    return 3.0 * seq * one_layer.forward_flops(seq) / _seconds(once)


def _stream(threads: int) -> float:
    block = new_storage(STREAM_ELEMS, torch.float32, torch.device("cpu")).fill_(1.0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return 2.0 * block.nbytes / _seconds(lambda: block.mul_(1.0))
    finally:
        torch.set_num_threads(before)


def _fill(dtype: torch.dtype, device: torch.device, threads: int) -> float:
    """Bytes that arrive, per second."""
    halves = new_storage(FILL_ELEMS, torch.bfloat16, torch.device("cpu")).fill_(1.0)
    if device.type == "cuda":
        pinned = halves.pin_memory()

        def copy() -> None:
            pinned.to(device).to(dtype)
            torch.cuda.synchronize(device)

        return FILL_ELEMS * dtype.itemsize / _seconds(copy)
    pool = kernels.Threads(threads)
    try:
        if dtype is torch.float16:
            halves = halves.to(torch.float16)

        def convert() -> None:
            kernels.convert(
                halves, new_storage(FILL_ELEMS, dtype, device), threads=pool
            )  # fmt: skip

        return FILL_ELEMS * dtype.itemsize / _seconds(convert)
    finally:
        pool.close()


def _seconds(once: Callable[[], object]) -> float:
    """The median of some rounds, the first one left out."""
    once()
    times: list[float] = []
    while len(times) < LEAST_ROUNDS or sum(times) < LEAST_S:
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return median(times)
