"""Checkpoints share files, and constants lie on both sides: a crash at any write confuses neither.

A run steps, is saved (its files are linked), steps on over new files, has its frozen bytes edited,
and steps on.  Every prefix of what it wrote is opened again and trained to the end.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from crash_tape import BLOCK, Image, Rename, Tape, lay_down

from offload.errors import StoreError
from offload.partition.unit import Role
from offload.store import Store, UnitExtents, UnitFlag, commits, durable
from offload.store.files import DataFiles
from offload.store.sharing import Sharing

CONSTANT = (BLOCK, BLOCK + 1024)  # bytes of param that no step writes
UNITS = [
    UnitExtents("mixed", {Role.PARAM: CONSTANT[1], Role.EXP_AVG: 100}, {Role.PARAM: CONSTANT}),
    UnitExtents("plain", {Role.PARAM: 3000, Role.EXP_AVG: 100}),
]
NAMES = [unit.name for unit in UNITS]
SAVED_AT, EDITED_AT, NUM_STEPS = 1, 4, 7


@dataclass
class Run:
    """In step g every unit gets the value g; "plain" sits out every third step."""

    tape: Tape
    path: Path
    commits: list[int] = field(default_factory=list)  # operations when the commit had returned
    links: dict[Path, bytes] = field(default_factory=dict)

    def train(self, durability: str) -> None:
        store = Store.create([self.path], "x", UNITS, layout={}, durability=durability)
        self.tape.start(self.path / "offload-x")
        for side in (0, 1):
            write_constants(store, side, 200)
        for generation in range(NUM_STEPS):
            step(store, generation)
            self.commits.append(len(self.tape.ops))
            if generation == SAVED_AT:
                self.save(store)
        store.close(flush=False)

    def save(self, store: Store) -> None:
        assert store.committed is not None
        store.sharing.reserve(store.committed.sides.items())
        for unit, side in store.committed.sides.items():
            source = store.files.path(unit, side)
            link = self.path / source.name
            os.link(source, link)
            self.links[link] = link.read_bytes()


def step(store: Store, generation: int) -> None:
    names = [name for name in NAMES if name == "mixed" or generation % 3 != 2]
    store.begin(names)
    sides = {name: store.spare(name) for name in names}
    flags = {}
    for name, side in sides.items():
        with descriptor(store, name, side) as fd:
            for role, place in store.files.layout(name).roles.items():
                first, _ = store.files.layout(name).constants.get(role, (place.num_bytes, 0))
                durable.write_at(fd, bytes([generation]) * first, place.offset)
    if generation == EDITED_AT:
        write_constants(store, sides["mixed"], 201)
        flags["mixed"] = UnitFlag.SPARE_STALE
    store.commit(sides=sides, generation=generation, flags=flags)


@contextlib.contextmanager
def descriptor(store: Store, name: str, side: int):
    with open(store.files.path(name, side), "r+b", buffering=0) as file:
        yield file.fileno()


def write_constants(store: Store, side: int, value: int) -> None:
    offset = store.files.layout("mixed").roles[Role.PARAM].offset
    with descriptor(store, "mixed", side) as fd:
        durable.write_at(fd, bytes([value]) * (CONSTANT[1] - CONSTANT[0]), offset + CONSTANT[0])


def check(store: Store) -> int:
    """Every unit has the values of the committed generation; return it."""
    record = store.committed
    assert record is not None
    for name in NAMES:
        value = record.generation
        if name == "plain" and value % 3 == 2:
            value -= 1
        data = store.files.path(name, record.sides[name]).read_bytes()
        for role, place in store.files.layout(name).roles.items():
            first, last = store.files.layout(name).constants.get(role, (place.num_bytes, 0))
            found = data[place.offset : place.offset + first]
            assert set(found) == {value}, f"{name} of generation {value}: {set(found)}"
            frozen = data[place.offset + first : place.offset + last]
            expected = 201 if record.generation >= EDITED_AT else 200
            assert set(frozen) <= {expected}, f"constants of {name}: {set(frozen)}"
    return record.generation


def reopen_and_train(run: Run, image: Image, num_ops: int, folder: Path) -> None:
    lay_down(image, folder)
    done = sum(at <= num_ops for at in run.commits)
    try:
        store = Store.open([folder.parent], "x")
    except StoreError:
        assert done == 0
        return
    with contextlib.closing(store):
        generation = check(store)
        assert generation in (done - 1, done)
        for following in range(generation + 1, generation + 4):
            step(store, following)
            check(store)


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Run]:
    monkeypatch.setattr(commits, "RESERVED_BYTES", 2 * BLOCK)

    def make(durability: str) -> Run:
        tape = Tape()
        with monkeypatch.context() as patch:
            tape.record(patch)
            (tmp_path / "run").mkdir()
            run = Run(tape, tmp_path / "run")
            run.train(durability)
        monkeypatch.setattr(durable, "flush", lambda fd: None)
        monkeypatch.setattr(durable, "flush_file", lambda file: None)
        monkeypatch.setattr(durable, "flush_folder", lambda folder: None)
        return run

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "again").mkdir()
    return tmp_path / "again" / "offload-x"


def sweep_kills(run: Run, folder: Path) -> None:
    for num_ops in range(len(run.tape.ops) + 1):
        reopen_and_train(run, run.tape.after_kill(num_ops), num_ops, folder)


def sweep_power_losses(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.store.recover.boot_id", lambda: "another boot")
    choose = random.Random(3)
    for num_ops in range(len(run.tape.ops) + 1):
        for keep in (0.0, 0.6, 1.0):
            image = run.tape.after_power_loss(num_ops, choose, keep)
            reopen_and_train(run, image, num_ops, folder)


def test_a_shared_file_is_never_written_and_its_followers_survive_a_kill_at_any_write(
    make_run: Callable[[str], Run], folder: Path
) -> None:
    run = make_run("process")
    assert {link: link.read_bytes() for link in run.links} == run.links
    assert sum(isinstance(op, Rename) for op in run.tape.ops) == len(run.links)
    sweep_kills(run, folder)


def test_followers_of_shared_files_survive_a_power_loss_at_any_write(
    make_run: Callable[[str], Run], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_power_losses(make_run("step"), folder, monkeypatch)


def test_a_spare_side_that_is_lost_is_made_again_with_its_constants(
    make_run: Callable[[str], Run], folder: Path
) -> None:
    run = make_run("process")
    image = run.tape.after_kill(len(run.tape.ops))
    lay_down(image, folder)
    with Store.open([folder.parent], "x") as store:
        lost = store.files.path("mixed", store.spare("mixed"))
    lost.unlink()
    with Store.open([folder.parent], "x") as store:
        for generation in range(NUM_STEPS, NUM_STEPS + 3):
            step(store, generation)
            check(store)


# Planted faults that the sweeps above must see.


def test_the_sweep_sees_a_shared_file_that_is_written(
    make_run: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sharing, "is_shared", lambda self, unit, side: False)
    run = make_run("process")
    assert {link: link.read_bytes() for link in run.links} != run.links


def test_the_sweep_sees_constants_that_do_not_follow_an_edit(
    make_run: Callable[[str], Run], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataFiles, "copy_constants", lambda *args, **options: None)
    run = make_run("process")
    with pytest.raises(AssertionError, match="constants of mixed"):
        sweep_kills(run, folder)


def test_the_sweep_sees_a_new_file_without_its_constants(
    make_run: Callable[[str], Run], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataFiles, "_copy_constants", lambda *args: None)
    run = make_run("process")
    with pytest.raises(AssertionError, match="constants of mixed"):
        sweep_kills(run, folder)


def test_the_sweep_sees_constants_of_spare_sides_that_are_trusted_after_a_restart(
    make_run: Callable[[str], Run], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.store.recover.has_restarted", lambda record: False)
    run = make_run("step")
    with pytest.raises(AssertionError, match="constants of mixed"):
        sweep_power_losses(run, folder, monkeypatch)


def test_the_sweep_sees_names_that_no_flush_of_the_folder_covers(
    make_run: Callable[[str], Run], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(set):
        def add(self, item: object) -> None:
            pass

    real = DataFiles.__init__

    def forget(self: DataFiles, *args: object, **options: object) -> None:
        real(self, *args, **options)
        self._renamed = Forgetful()

    monkeypatch.setattr(DataFiles, "__init__", forget)
    run = make_run("step")
    with pytest.raises((AssertionError, StoreError)):
        sweep_power_losses(run, folder, monkeypatch)
