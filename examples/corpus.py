"""Real text without a network: the standard library's documentation, or its source.

documents --every tenth--> validation        bytes, or byte pairs merged into a small vocabulary
          --the others---> training
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]
VALIDATION_EVERY = 10
BPE_VOCAB = 1024
BPE_SAMPLE_BYTES = 1_000_000


@dataclass(frozen=True)
class Corpus:
    """Token ids of whole documents, disjoint between the two parts."""

    vocab: int
    train: Tensor  # (tokens,) int64
    validation: Tensor  # (tokens,) int64

    def unigram_entropy(self) -> float:
        """Nats per token of the validation text: the loss of the best guess without any context."""
        counts = torch.bincount(self.validation, minlength=self.vocab).double()
        share = counts[counts > 0] / counts.sum()
        return float(-(share * share.log()).sum())


def documents(text: str) -> Iterator[bytes]:
    """`docs`: 465 kB of English prose; `source`: some 30 MB of Python."""
    if text == "docs":
        from pydoc_data.topics import topics

        yield from (topics[name].encode() for name in sorted(topics))
    else:
        yield from (
            path.read_bytes()
            for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
            if "site-packages" not in path.parts
        )


def load(text: str, vocab: str) -> Corpus:
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for index, document in enumerate(documents(text)):
        parts[index % VALIDATION_EVERY == 0].append(document)
    train, validation = (to_bytes(b"\n\n".join(parts[part])) for part in (False, True))
    if vocab == "bpe":
        merges = learn_merges(train[:BPE_SAMPLE_BYTES], BPE_VOCAB - 256)
        train, validation = merge_all(train, merges), merge_all(validation, merges)
    size = BPE_VOCAB if vocab == "bpe" else 256
    return Corpus(size, torch.from_numpy(train), torch.from_numpy(validation))


def to_bytes(data: bytes) -> Ids:
    return np.frombuffer(data, np.uint8).astype(np.int64)


def learn_merges(ids: Ids, num_merges: int) -> list[tuple[int, int]]:
    """Byte pair encoding: again and again give the most frequent pair an id of its own."""
    merges: list[tuple[int, int]] = []
    for new in range(256, 256 + num_merges):
        counts = np.bincount(ids[:-1] * new + ids[1:])
        first, second = divmod(int(counts.argmax()), new)
        merges.append((first, second))
        ids = merge(ids, (first, second), new)
    return merges


def merge_all(ids: Ids, merges: list[tuple[int, int]]) -> Ids:
    for new, pair in enumerate(merges, start=256):
        ids = merge(ids, pair, new)
    return ids


def merge(ids: Ids, pair: tuple[int, int], new: int) -> Ids:
    """Replace each `pair` by `new`, from the left where pairs overlap ("aaa" -> "(aa)a")."""
    at = np.flatnonzero((ids[:-1] == pair[0]) & (ids[1:] == pair[1]))
    if pair[0] == pair[1] and len(at):
        run_start = np.maximum.accumulate(np.where(np.diff(at, prepend=-2) > 1, at, 0))
        at = at[(at - run_start) % 2 == 0]
    ids = ids.copy()
    ids[at] = new
    return np.delete(ids, at + 1)


class Batches:
    """Windows of the training text in random order; `state_dict` makes the order resumable."""

    def __init__(self, tokens: Tensor, *, batch: int, seq: int, seed: int) -> None:
        self._tokens, self._batch, self._seq = tokens, batch, seq
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both (batch, seq)."""
        starts = torch.randint(
            len(self._tokens) - self._seq, (self._batch, 1), generator=self._generator
        )
        return windows(self._tokens, starts, self._seq)

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._generator.set_state(state["generator"])


def windows(tokens: Tensor, starts: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    at = starts + torch.arange(seq)
    return tokens[at], tokens[at + 1]
