"""Measure what this machine computes and moves, in about two seconds: for `offload plan`.

    products     forward and backward of the model's largest products, at most 512 tokens
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
from offload.schedule.work import Attention, Work

MAX_TOKENS, MAX_WIDTH, MAX_SHAPES = 512, 4096, 4
MAX_SEQ, HEAD, MAX_HEADS = 1024, 64, 16
STREAM_ELEMS = 32 << 20  # 128 MiB in fp32: beyond the caches
FILL_ELEMS = 16 << 20
LEAST_ROUNDS, LEAST_S = 5, 0.15


@dataclass(frozen=True)
class Wanted:
    """What a prediction needs to know."""

    work: Work
    tokens: int  # of a micro-step
    compute_dtype: torch.dtype
    device: torch.device
    threads: Threads
    fill_threads: int

    def shapes(self) -> dict[tuple[int, int, int], float]:
        """(tokens, inputs, outputs) -> share of the arithmetic, the largest shares alone."""
        found: dict[tuple[int, int, int], float] = {}
        tokens = min(self.tokens, MAX_TOKENS)
        for product in self.work.products:
            shape = (tokens, min(product.inputs, MAX_WIDTH), min(product.outputs, MAX_WIDTH))
            found[shape] = found.get(shape, 0.0) + product.forward_flops
        largest = sorted(found, key=lambda shape: -found[shape])[:MAX_SHAPES]
        total = sum(found[shape] for shape in largest)
        return {shape: found[shape] / total for shape in largest if total}

    def names(self) -> dict[str, Callable[[], float]]:
        """What is to be measured, by the name under which it is kept."""
        where = _machine(self.device, self.threads.compute)
        dtype = str(self.compute_dtype).removeprefix("torch.")
        found: dict[str, Callable[[], float]] = {}
        for shape in self.shapes():
            name = f"{where}: {dtype} products {' x '.join(map(str, shape))}"
            found[name] = partial(_products, shape, self.compute_dtype, self.device)
        if self.work.attention is not None:
            found[f"{where}: {dtype} {self._attention()}"] = partial(
                _attention, self.work.attention, self._seq, self.compute_dtype, self.device
            )
        here = _machine(torch.device("cpu"), self.threads.compute)
        for count in {1, self.threads.update, self.threads.compute}:
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
        seconds = sum(
            share / measured[f"{where}: {dtype} products {' x '.join(map(str, shape))}"]
            for shape, share in self.shapes().items()
        )
        flops = 1.0 / seconds if seconds else 0.0
        attention = 0.0
        if self.work.attention is not None:
            attention = measured[f"{where}: {dtype} {self._attention()}"]
        stream = {count: measured[f"{here}: stream on {count}"]
                  for count in (1, self.threads.update, self.threads.compute)}  # fmt: skip
        fill = measured[f"{where}: fill {dtype} on {self.fill_threads}"]
        return Speeds(
            flops, attention, stream[self.threads.compute], stream[1], fill,
            stream[self.threads.update],
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


def _products(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> float:  # fmt: skip
    tokens, inputs, outputs = shape
    x = torch.randn(tokens, inputs, device=device).to(dtype).requires_grad_()
    weight = torch.randn(outputs, inputs, device=device).to(dtype).requires_grad_()
    grad = torch.randn(tokens, outputs, device=device).to(dtype)

    def once() -> None:
        x.grad = weight.grad = None
        F.linear(x, weight).backward(grad)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 6.0 * tokens * inputs * outputs / _seconds(once)


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
