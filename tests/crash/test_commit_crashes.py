"""The store after a crash at every write: generation g or g-1, whole, and training goes on.

A small training run writes real bytes through a layer that records them (crash_tape.py); each
prefix of the recording becomes a folder that is opened again.  The same sweep must find each of
the planted faults at the end.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from crash_tape import BLOCK, Flush, Image, Tape, Write, lay_down

from offload.errors import StoreError
from offload.partition.unit import Role
from offload.store import Store, UnitExtents, checksum, commits, durable, format
from offload.store.generations import Generations

UNITS = [UnitExtents(name, {Role.PARAM: 6000, Role.EXP_AVG: 100}) for name in ("a", "b", "c")]
NUM_STEPS = 6
PAYLOAD_BYTES = 9000  # the record spans several blocks


@dataclass
class Run:
    """Trains: in step g the units g and g+1 (mod 3) get the value g; the third is left out."""

    tape: Tape
    path: Path
    options: dict[str, object]
    sealed: bool = False
    data_first: bool = True
    swap_sides: bool = True
    history: list[dict[str, int]] = field(default_factory=list)  # values per generation
    commits: list[int] = field(default_factory=list)  # operations when the commit had returned

    def train(self, num_steps: int = NUM_STEPS) -> None:
        store = Store.create([self.path], "x", UNITS, layout={}, fresh=True, **self.options)
        self.tape.start(self.path / "offload-x")
        for generation in range(num_steps):
            self.step(store, generation)
        store.close(flush=False)

    def step(self, store: Store, generation: int) -> None:
        values = dict(self.history[-1]) if self.history else {unit.name: 0 for unit in UNITS}
        updated = [unit.name for i, unit in enumerate(UNITS) if (i - generation) % 3 < 2]
        if not self.history:
            updated = [unit.name for unit in UNITS]
        values |= dict.fromkeys(updated, generation)
        store.begin()
        sides = {unit: self.side_of(store, unit) for unit in updated}
        sums = {}
        if self.data_first:
            sums = self.write(store, sides, generation)
        self.history.append(values)
        store.commit(sides=sides, checksums=sums, payload=payload_of(generation))
        self.commits.append(len(self.tape.ops))
        if not self.data_first:
            self.write(store, sides, generation)

    def side_of(self, store: Store, unit: str) -> int:
        if not self.swap_sides and store.committed is not None:
            return store.committed.sides[unit]
        return store.spare(unit)

    def write(self, store: Store, sides: dict[str, int], value: int) -> dict[str, int]:
        for unit, side in sides.items():
            with open(store.files.path(unit, side), "r+b", buffering=0) as file:
                for role in store.files.layout(unit).roles:
                    extent = store.extent(unit, role, side)
                    durable.write_at(
                        file.fileno(), bytes([value]) * extent.num_bytes, extent.offset
                    )
        if not self.sealed:
            return {}
        return {
            unit: checksum.seal(store.files, unit, side, checksum.sums_of(store.files, unit, side))
            for unit, side in sides.items()
        }

    def allowed(self, num_ops: int) -> set[int]:
        """Generations that may come back after `num_ops` operations."""
        done = sum(at <= num_ops for at in self.commits)
        return {done - 1, done}


def payload_of(generation: int) -> bytes:
    return bytes([generation]) * PAYLOAD_BYTES


def state_of(store: Store) -> tuple[int, dict[str, int], bytes]:
    """Generation, the one value of each unit (a mix fails), payload."""
    record = store.committed
    assert record is not None
    values = {}
    for unit in UNITS:
        side = record.sides[unit.name]
        seen: set[int] = set()
        with open(store.files.path(unit.name, side), "rb") as file:
            for role, num_bytes in unit.role_bytes.items():  # padding is nobody's
                file.seek(store.extent(unit.name, role, side).offset)
                seen |= set(file.read(num_bytes))
        assert len(seen) == 1, f"unit {unit.name} is a mix of {seen}"
        values[unit.name] = seen.pop()
    return record.generation, values, record.payload


def reopen(image: Image, folder: Path, *, writable: bool = False) -> Store:
    lay_down(image, folder)
    return Store.open([folder.parent], "x", read_only=not writable)


def check(run: Run, image: Image, num_ops: int, folder: Path) -> None:
    """Open what a crash left: it must be one of the allowed generations, whole."""
    allowed = run.allowed(num_ops)
    try:
        with reopen(image, folder) as store:
            generation, values, payload = state_of(store)
    except StoreError:
        if -1 in allowed:  # before the first commit
            return
        raise
    assert generation in allowed, f"after {num_ops} operations: {generation}, not in {allowed}"
    assert values == run.history[generation]
    assert payload == payload_of(generation)


def sweep_kills(run: Run, folder: Path) -> None:
    for num_ops in range(len(run.tape.ops) + 1):
        check(run, run.tape.after_kill(num_ops), num_ops, folder)
        following = run.tape.ops[num_ops] if num_ops < len(run.tape.ops) else None
        if isinstance(following, Write):
            for cut in range(BLOCK, len(following.data), BLOCK):
                check(run, run.tape.after_kill(num_ops, cut=cut), num_ops, folder)


def sweep_power_losses(run: Run, folder: Path, num_samples: int = 3) -> None:
    choose = random.Random(7)
    for num_ops in range(len(run.tape.ops) + 1):
        for keep in (0.0, 1.0, *[0.5, 0.9, 0.99][:num_samples]):
            check(run, run.tape.after_power_loss(num_ops, choose, keep), num_ops, folder)


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    monkeypatch.setattr(
        commits, "RESERVED_BYTES", 2 * BLOCK
    )  # records outgrow it, images stay small
    tape = Tape()
    tape.record(monkeypatch)
    (tmp_path / "run").mkdir()

    def make(**options: object) -> Run:
        switches = ("sealed", "data_first", "swap_sides")
        own = {name: options.pop(name) for name in switches if name in options}
        return Run(tape, tmp_path / "run", options, **own)

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "again").mkdir()
    return tmp_path / "again" / "offload-x"


@pytest.mark.parametrize("durability", ["process", "step"])
def test_a_process_that_dies_at_any_write_resumes_the_last_generation_or_the_one_before(
    make_run: Callable[..., Run], folder: Path, durability: str
) -> None:
    run = make_run(durability=durability)
    run.train()
    assert len(run.commits) == NUM_STEPS
    assert sum(isinstance(op, Write) for op in run.tape.ops) > 8 * NUM_STEPS
    sweep_kills(run, folder)


def test_power_that_fails_at_any_write_or_flush_loses_at_most_one_step(
    make_run: Callable[..., Run], folder: Path
) -> None:
    run = make_run(durability="step")
    run.train()
    assert sum(isinstance(op, Flush) for op in run.tape.ops) >= 3 * NUM_STEPS
    sweep_power_losses(run, folder)


def test_power_loss_after_close_loses_nothing_whatever_the_durability(
    make_run: Callable[..., Run], folder: Path
) -> None:
    run = make_run(durability="process")
    run.train()
    with Store.open([run.path], "x"):
        pass
    image = run.tape.after_power_loss(len(run.tape.ops), random.Random(1), 0.0)
    with reopen(image, folder) as store:
        assert state_of(store) == (NUM_STEPS - 1, run.history[-1], payload_of(NUM_STEPS - 1))
        assert store.committed is not None
        assert store.committed.flushed


def test_power_loss_without_flushes_is_verified_or_refused_and_never_a_mix(
    make_run: Callable[..., Run], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(durability="process", sealed=True)
    run.train(4)
    monkeypatch.setattr("offload.store.recover.boot_id", lambda: "another boot")
    choose = random.Random(3)
    refused = opened = 0
    for num_ops in range(0, len(run.tape.ops) + 1):
        for keep in (0.0, 0.5, 0.97, 1.0):
            image = run.tape.after_power_loss(num_ops, choose, keep)
            try:
                with reopen(image, folder) as store:
                    generation, values, payload = state_of(store)
            except StoreError:
                refused += 1
                continue
            opened += 1
            assert values == run.history[generation]
            assert payload == payload_of(generation)
            assert keep < 1 or generation in run.allowed(num_ops)
    assert refused > 20
    assert opened > 20


@pytest.mark.parametrize("durability", ["process", "step"])
def test_training_goes_on_from_every_crash_as_if_nothing_had_happened(
    make_run: Callable[..., Run], folder: Path, durability: str
) -> None:
    run = make_run(durability=durability)
    run.train(4)
    for num_ops in range(run.commits[1], len(run.tape.ops) + 1):
        image = run.tape.after_kill(num_ops)
        with contextlib.closing(reopen(image, folder, writable=True)) as store:
            assert store.committed is not None
            start = store.committed.generation
            again = Run(Tape(), run.path, {}, history=list(run.history[: start + 1]))
            for generation in range(start + 1, 4):
                again.step(store, generation)
            assert state_of(store) == (3, run.history[3], payload_of(3))


def test_rot_in_the_newest_record_at_any_moment_is_an_older_whole_generation_or_an_error(
    make_run: Callable[..., Run], folder: Path
) -> None:
    run = make_run(durability="process")
    run.train(4)
    outcomes = sweep_rot(run, folder)
    assert outcomes == {"older", "refused"}


def sweep_rot(run: Run, folder: Path) -> set[str]:
    outcomes = set()
    for num_ops in range(run.commits[0], len(run.tape.ops) + 1):
        image = run.tape.after_kill(num_ops)
        with reopen(image, folder) as store:
            assert store.committed is not None
            newest, name = store.committed.generation, f"COMMIT.{store.committed.sequence % 2}"
        damaged = {
            path: data[:60] + bytes([data[60] ^ 4]) + data[61:] if path.endswith(name) else data
            for path, data in image.items()
        }
        try:
            with reopen(damaged, folder) as store:
                generation, values, _ = state_of(store)
        except StoreError:
            outcomes.add("refused")
            continue
        outcomes.add("older")
        assert generation < newest
        assert values == run.history[generation]
    return outcomes


def test_one_side_in_place_comes_back_only_when_it_is_whole(
    make_run: Callable[..., Run], folder: Path
) -> None:
    run = make_run(durability="none", num_sides=1)
    run.train(4)
    opened = refused = 0
    for num_ops in range(len(run.tape.ops) + 1):
        try:
            with reopen(run.tape.after_kill(num_ops), folder) as store:
                generation, values, _ = state_of(store)
        except StoreError:
            refused += 1
            continue
        opened += 1
        assert values == run.history[generation]
    assert opened
    assert refused


# Planted faults.  Each is a mistake that somebody could make; the sweeps above must see it.


@contextlib.contextmanager
def no_checksums(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Blind:
        crc32 = staticmethod(lambda data: 0)

    with monkeypatch.context() as patch:
        patch.setattr(format, "zlib", Blind)
        yield


def test_the_sweep_sees_a_record_written_before_its_data(
    make_run: Callable[..., Run], folder: Path
) -> None:
    run = make_run(durability="process", data_first=False)
    run.train()
    with pytest.raises((AssertionError, StoreError)):
        sweep_kills(run, folder)


def test_the_sweep_sees_writes_to_the_only_committed_side(
    make_run: Callable[..., Run], folder: Path
) -> None:
    run = make_run(durability="process", swap_sides=False)
    run.train()
    with pytest.raises((AssertionError, StoreError)):
        sweep_kills(run, folder)


def test_the_sweep_sees_records_without_a_checksum(
    make_run: Callable[..., Run], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_checksums(monkeypatch):
        run = make_run(durability="step")
        run.train()
        with pytest.raises((AssertionError, StoreError, ValueError)):
            sweep_power_losses(run, folder)


def test_the_sweep_sees_a_record_that_is_written_before_the_data_is_flushed(
    make_run: Callable[..., Run], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Generations, "_unflushed", lambda self, record: [])
    run = make_run(durability="step")
    run.train()
    with pytest.raises((AssertionError, StoreError)):
        sweep_power_losses(run, folder)


def test_the_sweep_sees_a_step_that_begins_before_the_commit_is_on_the_drive(
    make_run: Callable[..., Run], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = commits.CommitLog.write
    monkeypatch.setattr(
        commits.CommitLog, "write", lambda self, record, *, flush: real(self, record, flush=False)
    )
    run = make_run(durability="step")
    run.train()
    with pytest.raises((AssertionError, StoreError)):
        sweep_power_losses(run, folder)


def test_the_sweep_sees_a_record_that_outlives_its_sides(
    make_run: Callable[..., Run], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits.CommitLog, "retire", lambda self, sequence: None)
    run = make_run(durability="process")
    run.train(4)
    with pytest.raises((AssertionError, StoreError)):
        sweep_rot(run, folder)


def test_the_sweep_sees_a_header_that_is_written_before_its_body(
    make_run: Callable[..., Run], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Harmless while checksums catch it: a kill must never need them (FORMAT.md)."""

    def write(self: commits.CommitLog, record: format.Record, *, flush: bool) -> None:
        fd = self._fds[record.sequence % 2]
        header, body = format.encode_record(record, self._manifest)
        durable.write_at(fd, header, 0)
        durable.write_at(fd, body, BLOCK)

    with no_checksums(monkeypatch):
        monkeypatch.setattr(commits.CommitLog, "write", write)
        run = make_run(durability="process")
        run.train()
        with pytest.raises((AssertionError, StoreError)):
            sweep_kills(run, folder)


def test_a_kill_is_survived_even_without_checksums(
    make_run: Callable[..., Run], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_checksums(monkeypatch):
        run = make_run(durability="process")
        run.train()
        sweep_kills(run, folder)
