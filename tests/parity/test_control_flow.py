"""Random control flow with the smallest pools: the numbers of memory, no hang, fetches ahead."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import control_flow
import pytest
import torch
from case import FP32, Case, Trained, assert_same, collect_engine, collect_oracle
from test_corners import smallest

from offload import OffloadEngine
from offload.runtime.residency import Phase

FEW, MANY = range(6), range(100)
AHEAD = 0.9  # of the fetches in a pass whose trace repeats


@dataclass
class FetchCounts:
    """Fetches of the passes whose units came in the order of the pass before, by phase."""

    engine: OffloadEngine
    fetches: Counter[str] = field(default_factory=Counter)
    ahead: Counter[str] = field(default_factory=Counter)
    last: dict[str, list[int]] = field(default_factory=dict)

    @contextmanager
    def counted(self, phase: Phase) -> Iterator[None]:
        metrics = self.engine.metrics
        # A unit cannot be read before its update is through, which is a matter of time alone.
        self.engine._parts.ground.ledger.finish()
        fetches, hits = sum(metrics.fetches.values()), metrics.hits
        yield
        order = list(self.engine._parts.residency._horizon[phase]._seen)  # repeats too
        if self.last.get(phase.name) == order:
            self.fetches[phase.name] += sum(metrics.fetches.values()) - fetches
            self.ahead[phase.name] += metrics.hits - hits
        self.last[phase.name] = order


def evaluate(model, batch) -> float:
    with torch.no_grad():
        return model(*batch).item()


def run(flow: int, tmp_path) -> FetchCounts:
    """Train in phases of one program each, with evaluations between, beside the same in memory."""
    case = Case(
        kind=control_flow.RandomFlow, options=(("flow", flow),), dtype=FP32, clipping=0.5,
        num_steps=3,
    )  # fmt: skip
    rng = random.Random(flow)
    budgets = {name: smallest(name, case, tmp_path) for name in ("host_memory", "device_memory")}
    oracle, ours, theirs = case.oracle(), Trained(), Trained()
    with case.engine(tmp_path, **budgets) as engine:
        counts = FetchCounts(engine)
        for index in range(15):
            if index % 5 == 0:
                program, probe = rng.randrange(3), rng.randrange(3)
            batch = control_flow.batch(program, index)
            with counts.counted(Phase.FORWARD):
                loss = engine(*batch)
            with counts.counted(Phase.BACKWARD):
                engine.backward(loss)
            engine.step()
            ours.losses.append(loss.item())
            ours.norms.append(engine.grad_norm)
            loss = oracle.model(*batch)
            loss.backward()
            oracle.keep_gradients()
            assert oracle.step()
            theirs.losses.append(loss.item())
            theirs.norms.append(oracle.grad_norm)
            if index % 2 == 0:
                batch = control_flow.batch(probe, 50 + index)
                with counts.counted(Phase.EVAL):
                    seen = evaluate(engine, batch)
                assert seen == evaluate(oracle.model, batch)
        assert_same(collect_engine(engine, ours), collect_oracle(oracle, theirs))
    return counts


@pytest.mark.parametrize("flow", FEW)
def test_random_control_flow_equals_memory_and_is_fetched_ahead(flow, tmp_path):
    assert_ahead(run(flow, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("flow", MANY[len(FEW) :])
def test_more_random_control_flow_equals_memory_and_is_fetched_ahead(flow, tmp_path):
    assert_ahead(run(flow, tmp_path))


def assert_ahead(counts: FetchCounts) -> None:
    assert {"FORWARD", "BACKWARD"} <= counts.fetches.keys()
    for phase, fetches in counts.fetches.items():
        assert counts.ahead[phase] >= AHEAD * fetches > 0, (phase, counts)
