"""Training that is killed at any moment ends with the weights of the run that nobody killed.

The moments are counts of Python calls, drawn from all over a run: no clock decides.  What the
drive and other threads do at that moment is up to them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
NUM_STEPS = 7
Answer = dict[str, Any]


class Lives:
    """Asks the forking process for lives (lives.py)."""

    def __init__(self, process: subprocess.Popen[str], root: Path) -> None:
        self._process = process
        self.root = root
        self.scratch = root / "scratch"
        self.scratch.mkdir()

    def live(
        self, store: Path, *, resume: bool, at: int | None = None, number: int = signal.SIGKILL,
        durability: str = "process",
    ) -> Answer:  # fmt: skip
        request = {
            "store": str(store), "scratch": str(self.scratch), "resume": resume, "at": at,
            "signal": number, "num_steps": NUM_STEPS, "durability": durability,
        }  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: Answer = json.loads(self._process.stdout.readline())
        return answer

    @contextlib.contextmanager
    def store(self) -> Iterator[Path]:
        folder = self.root / "run" / "store"
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder.parent)

    def whole(self, durability: str = "process") -> Answer:
        with self.store() as store:
            return self.live(store, resume=False, durability=durability)


@contextlib.contextmanager
def forking(root: Path) -> Iterator[Lives]:
    paths = [str(HERE.parent / "checkpoint"), str(HERE.parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    log = (root / "log").open("w")
    process = subprocess.Popen(
        [sys.executable, str(HERE / "lives.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=log, text=True, env=environment,
    )  # fmt: skip
    try:
        yield Lives(process, root)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait()
        process.stdout.close()
        log.close()


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    """In memory where that is possible: a kill loses no page cache, so a drive adds only time."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="offload-test-", dir=parent) as root,
        forking(Path(root)) as found,
    ):
        yield found


@pytest.fixture
def lives_on_disk(tmp_path: Path) -> Iterator[Lives]:
    with forking(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def whole(lives: Lives) -> Answer:
    answer = lives.whole()
    assert answer["status"] == 0, (lives.root / "log").read_text()
    return answer


def calls_of(answer: Answer) -> int:
    """Python calls of a life: the moments at which it can be killed."""
    calls: int = answer["report"]["calls"]
    return calls


def resumed_to_the_end(lives: Lives, store: Path, **options: Any) -> Answer:
    """What a user does after a crash: --resume, or --fresh where nothing was committed yet."""
    last = lives.live(store, resume=True, **options)
    if last["status"] == 1 and not last["report"]:
        last = lives.live(store, resume=False, **options)
    assert last["status"] == 0, (lives.root / "log").read_text()
    return last


def kill_and_resume(lives: Lives, whole: Answer, at: int, **options: Any) -> str:
    """Kill at call number `at`, resume to the end, compare; return what was interrupted."""
    with lives.store() as store:
        killed = lives.live(store, resume=False, at=at, **options)
        assert killed["status"] == -signal.SIGKILL
        last = resumed_to_the_end(lives, store)
        assert last["report"]["state"] == whole["report"]["state"], f"killed at call {at}"
        lost = killed["returned_steps"] - last["report"]["started_at"]
        assert lost <= 1, f"killed at call {at}: {lost} steps lost"
        phase: str = killed["phase"]
        return phase


def test_a_run_killed_at_random_moments_ends_as_if_nothing_had_happened(
    lives: Lives, whole: Answer
) -> None:
    choose = random.Random(11)
    phases = Counter(
        kill_and_resume(lives, whole, choose.randrange(1, calls_of(whole))) for _ in range(3)
    )
    assert phases.total() == 3


@pytest.mark.slow
def test_fifty_kills_in_every_phase_lose_one_step_at_most(
    lives_on_disk: Lives, whole: Answer
) -> None:
    choose = random.Random(5)
    wanted = {"forward", "backward", "update", "commit", "checkpoint", "export"}
    phases: Counter[str] = Counter()
    # Which phase a call falls into depends on how threads run: go on until each was hit.
    while phases.total() < 50 or (not wanted <= set(phases) and phases.total() < 150):
        phases[kill_and_resume(lives_on_disk, whole, choose.randrange(1, calls_of(whole)))] += 1
    sys.stdout.write("".join(f"{phase:<12}{count:>4}\n" for phase, count in phases.most_common()))
    assert wanted <= set(phases)


def test_a_run_killed_again_and_again_still_ends_with_the_same_weights(
    lives: Lives, whole: Answer
) -> None:
    choose = random.Random(2)
    with lives.store() as store:
        killed = lives.live(store, resume=False, at=calls_of(whole) // 2)
        assert killed["returned_steps"] > 0
        for _ in range(3):
            lives.live(store, resume=True, at=choose.randrange(1, calls_of(whole) // 2))
        last = resumed_to_the_end(lives, store)
        assert last["report"]["state"] == whole["report"]["state"]


@pytest.mark.parametrize("num_signals", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_sigterm_exits_143_and_loses_nothing(lives: Lives, whole: Answer, num_signals: int) -> None:
    choose = random.Random(num_signals)
    for _ in range(num_signals):
        at = choose.randrange(calls_of(whole) // 4, calls_of(whole))
        with lives.store() as store:
            ended = lives.live(store, resume=False, at=at, number=signal.SIGTERM)
            assert ended["status"] == 143, f"SIGTERM at call {at}, in {ended['phase']}"
            last = resumed_to_the_end(lives, store)
            assert last["report"]["started_at"] >= ended["returned_steps"], f"call {at}"
            assert last["report"]["state"] == whole["report"]["state"], f"call {at}"


def test_one_side_written_in_place_is_lost_by_a_kill_in_an_update_and_that_is_said(
    lives: Lives, whole: Answer
) -> None:
    alone = lives.whole("none")
    assert alone["report"]["state"] == whole["report"]["state"]
    choose = random.Random(3)
    with lives.store() as store:
        killed = lives.live(
            store, resume=False, at=choose.randrange(1, calls_of(alone)), durability="none"
        )
        assert killed["status"] == -signal.SIGKILL
        again = lives.live(store, resume=True, durability="none")
        if again["status"]:  # in an update, or before the first commit
            text = (lives.root / "log").read_text()
            assert "holds no valid generation" in text
            assert "--fresh" in text
            again = lives.live(store, resume=False, durability="none")
        assert again["report"]["state"] == whole["report"]["state"]
