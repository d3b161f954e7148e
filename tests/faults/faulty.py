"""A small training run on a drive that misbehaves at one block, and its reference without.

step 0 on a good drive, kept as a folder  ->  copy  ->  step 1 on the faulty drive
                                                          |-> the reference's numbers, or
                                                          `-> a typed error, then a good drive:
                                                              resume at step 1 or 2, go on
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import torch
from torch import Tensor

import aio
from aio.faults import Fault, Faults, Submitted
from offload import OffloadEngine
from offload.errors import StoreError

TYPED = (aio.IOFailed, StoreError)
NUM_STEPS = 3
State = dict[str, Tensor]


def open_engine(folder: Path, **settings: Any) -> OffloadEngine:
    """A new model on the store in `folder`; everything moves, some gradients are spilled."""
    model = models.build(models.Decoder, width=32, num_blocks=2)
    defaults = {
        "nvme_path": folder, "name": "faulty", "dtype": "bfloat16", "compute_dtype": "float32",
        "param_persistence_threshold": 0, "chunk_elems": 8192, "lr": 1e-2,
        "host_memory": "380KiB", "device": "cpu", "resume": "auto", "update_threads": 1,
        "placement": "disk",
    }  # fmt: skip
    return OffloadEngine(model, **defaults | settings)


def train(engine: OffloadEngine, step: int) -> float:
    loss = engine(*models.batch(step))
    engine.backward(loss)
    engine.step()
    return loss.item()


def state_of(engine: OffloadEngine) -> State:
    """Masters and moments; waits for the last step."""
    found = {}
    for name, _ in engine.module.named_parameters():
        found[name] = engine.full_fp32_param(name)
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {moment}"] = engine.full_optimizer_state(name, moment)
    return found


def same(first: State, second: State) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value.view(torch.int32), second[name].view(torch.int32))
        for name, value in first.items()
    )


@dataclass(frozen=True)
class Outcome:
    """What came of a fault: `block` is the one it hit, None: there was none of that number."""

    error: str | None  # None: the reference's numbers
    block: Submitted | None


@dataclass(frozen=True)
class Reference:
    """What a good drive gives: after step s there are `states[s]`; `start` holds step 0's end."""

    settings: dict[str, Any]
    start: Path
    losses: list[float]
    states: list[State]
    num_blocks: int  # handed to the drive by step 1 and the reading of its state

    @staticmethod
    def make(folder: Path, **settings: Any) -> Reference:
        start = folder / "start"
        start.mkdir()
        losses, states = [], []
        with open_engine(start, **settings) as engine:
            losses.append(train(engine, 0))
            states.append(state_of(engine))
        good = shutil.copytree(start, folder / "good")
        with open_engine(good, aio_backend="faults", **settings) as engine:
            faults = Faults(queue_of(engine))
            before = len(faults.log())
            losses.append(train(engine, 1))
            states.append(state_of(engine))
            num_blocks = len(faults.log()) - before
            for step in range(2, NUM_STEPS):
                losses.append(train(engine, step))
                states.append(state_of(engine))
        return Reference(settings, start, losses, states, num_blocks)

    def check(self, folder: Path, make: Callable[[int], Fault], nth: int) -> Outcome:
        """Step 1 with a fault at its n-th block; then resume on a good drive and go on."""
        shutil.copytree(self.start, folder)
        log: list[Submitted] = []
        told = None
        at = 0
        engine = open_engine(folder, aio_backend="faults", **self.settings)
        try:
            faults = Faults(queue_of(engine))
            at = len(faults.log()) + nth
            faults.inject(make(at))
            try:
                loss = train(engine, 1)
                state = state_of(engine)
            finally:
                log = faults.log()
                engine.close()
        except TYPED as error:
            told = str(error)
            assert "\n" not in told
        else:
            assert loss == self.losses[1]
            assert same(state, self.states[1])
        self.check_resume(folder, steps=(1, 2) if told else (2,))
        shutil.rmtree(folder)
        return Outcome(told, log[at] if at < len(log) else None)

    def check_resume(self, folder: Path, steps: tuple[int, ...]) -> None:
        """The store goes on after one of `steps`, with the reference's bits."""
        with open_engine(folder, **self.settings | {"resume": True}) as engine:
            assert engine.global_step in steps
            assert same(state_of(engine), self.states[engine.global_step - 1])
            for step in range(engine.global_step, NUM_STEPS):
                assert train(engine, step) == self.losses[step]
            assert same(state_of(engine), self.states[-1])


def queue_of(engine: OffloadEngine) -> aio.Queue:
    return engine._parts.ground.queue


@contextlib.contextmanager
def faulty_from_birth(monkeypatch: Any, *faults: Fault) -> Iterator[list[Faults]]:
    """Queues of the "faults" backend get `faults` before their first block."""
    real = aio.Queue
    born: list[Faults] = []

    def make(*args: Any, **settings: Any) -> aio.Queue:
        queue = real(*args, **settings)
        if queue.backend == "faults":
            born.append(Faults(queue))
            born[-1].inject(*faults)
        return queue

    with monkeypatch.context() as patch:
        patch.setattr(aio, "Queue", make)
        yield born
