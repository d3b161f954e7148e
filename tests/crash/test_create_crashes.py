"""A process that dies while it makes, replaces or removes a store leaves nothing in the way."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.errors import StoreError
from offload.partition.unit import Role
from offload.store import Store, UnitExtents, commits, durable, exists
from offload.store.inspect import describe, reclaim

UNITS = [UnitExtents(name, {Role.PARAM: 6000}) for name in ("a", "b")]
CALLS = ("write_at", "reserve", "flush", "flush_folder", "replace")


def make(paths: list[Path], **options: object) -> Store:
    return Store.create(paths, "x", UNITS, layout={"n": 1}, **options)


def dies_at(nth: int, run: Callable[[], object]) -> bool:
    """Run in a forked process that exits without any cleanup at its n-th call; True: it did."""
    child = os.fork()
    if child == 0:
        calls = 0

        def counted(real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object) -> object:
                nonlocal calls
                calls += 1
                if calls == nth:
                    os._exit(9)
                return real(*args)

            return call

        for name in CALLS:
            setattr(durable, name, counted(getattr(durable, name)))
        os.unlink = counted(os.unlink)
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9)
    return code == 9


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(durable, "flush", lambda fd: None)  # a kill loses nothing by it
    monkeypatch.setattr(durable, "flush_folder", lambda folder: None)
    monkeypatch.setattr(commits, "RESERVED_BYTES", 8192)
    both = [tmp_path / "first", tmp_path / "second"]
    for path in both:
        path.mkdir()
    return both


def test_a_kill_at_any_moment_of_making_leaves_what_the_next_start_reclaims(
    paths: list[Path],
) -> None:
    nth = 0
    died = True
    while died:
        nth += 1
        died = dies_at(nth, lambda: make(paths))
        assert not exists(paths, "x")  # nothing was committed, so nothing can be lost
        assert describe(paths, "x").holder is None
        with make(paths) as store:
            store.commit(sides={"a": 0, "b": 0})
        with Store.open(paths, "x", layout={"n": 1}) as store:
            store.remove()
        assert not [path for parent in paths for path in parent.iterdir()]
    assert nth > 20


def test_a_kill_at_any_moment_of_making_leaves_what_inspect_reclaims(paths: list[Path]) -> None:
    for nth in range(1, 100):
        if not dies_at(nth, lambda: make(paths)):
            break
        reclaim(paths, "x")
        assert not [path for parent in paths for path in parent.iterdir()]
    else:
        pytest.fail("the process never finished")


def test_a_kill_while_a_store_is_replaced_leaves_the_old_one_or_room_for_a_new_one(
    paths: list[Path],
) -> None:
    outcomes = set()
    for nth in range(1, 200):
        with make(paths, fresh=True) as store:
            store.commit(sides={"a": 0, "b": 1}, payload=b"old")
        died = dies_at(nth, lambda: make(paths, fresh=True))
        if exists(paths, "x"):
            outcomes.add("old")
            with pytest.raises(StoreError, match="generation 0"):
                make(paths)
            with Store.open(paths, "x") as store:
                assert store.committed is not None
                assert store.committed.payload == b"old"
        else:
            outcomes.add("none")
            make(paths).close()
        if not died:
            break
    assert outcomes == {"old", "none"}


def test_a_kill_while_a_store_is_removed_leaves_it_or_nothing_to_lose(paths: list[Path]) -> None:
    outcomes = set()
    for nth in range(1, 200):
        with make(paths, fresh=True) as store:
            store.commit(sides={"a": 0, "b": 1})

        def remove() -> None:
            Store.open(paths, "x").remove()

        died = dies_at(nth, remove)
        outcomes.add(exists(paths, "x"))
        if exists(paths, "x"):
            Store.open(paths, "x").close()
        else:
            make(paths).close()
        if not died:
            break
    assert outcomes == {True, False}
