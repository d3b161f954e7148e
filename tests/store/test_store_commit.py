"""Generations: the newest valid record counts, and every valid record names whole sides."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from store_bench import NAMES, Bench, content, fill, flip, step

from offload.errors import StateError, StoreCorrupt, StoreError
from offload.store import Store, UnitFlag, durable

RECORDS = ("COMMIT.0", "COMMIT.1")


def newest(bench: Bench) -> Path:
    """The commit file with the record that counts, and so the one that damage must hit."""
    with bench.open(read_only=True) as store:
        assert store.committed is not None
        return bench.folder / RECORDS[store.committed.sequence % 2]


def crash(store: Store) -> None:
    """Let go of the store as a killed process does: no flush, no last record."""
    store.close(flush=False)


def test_a_commit_comes_back_with_everything_that_was_said(bench: Bench) -> None:
    payload = os.urandom(3_000_000)  # larger than what a commit file reserves
    with bench.create() as store:
        store.commit(
            sides={"embed": 0, "model.layers.0@float32": 1, "frozen": 0},
            generation=41,
            payload=payload,
            flags={"embed": UnitFlag.MOMENTS_ZERO},
            checksums={"frozen": 0xFEDCBA9876543210},
        )
        crash(store)
    with bench.open() as store:
        record = store.committed
        assert record is not None
        assert record.generation == 41
        assert record.payload == payload
        assert record.sides == {"embed": 0, "model.layers.0@float32": 1, "frozen": 0}
        assert record.flags["embed"] is UnitFlag.MOMENTS_ZERO
        assert record.flags["frozen"] is UnitFlag.CHECKSUMS
        assert record.checksums["frozen"] == 0xFEDCBA9876543210
        assert record.durability == "process"
        assert not record.flushed
        assert store.spare("model.layers.0@float32") == 0


@pytest.mark.parametrize("num_generations", [1, 2, 3, 8])
def test_the_last_generation_is_resumed_after_a_kill(bench: Bench, num_generations: int) -> None:
    crash(bench.trained(num_generations))
    with bench.open() as store:
        assert store.committed is not None
        assert store.committed.generation == num_generations - 1
        assert store.committed.payload == f"state {num_generations - 1}".encode()
        assert {value for unit in NAMES for value in content(store, unit)} == {num_generations - 1}


def test_sides_and_commit_files_alternate(bench: Bench) -> None:
    store = bench.create()
    seen = []
    for generation in range(4):
        step(store, generation)
        assert store.committed is not None
        seen.append((store.committed.sides["embed"], store.committed.sequence % 2))
        assert content(store, "embed", store.spare("embed")) == {max(0, generation - 1)}
    assert seen == [(0, 1), (1, 0), (0, 1), (1, 0)]
    store.close()


def test_a_step_that_is_never_committed_is_forgotten(bench: Bench) -> None:
    store = bench.trained(3)
    store.begin()
    for unit in NAMES:
        fill(store, unit, store.spare(unit), 99)
    crash(store)
    with bench.open() as store:
        assert content(store, "embed") == {2}
        assert store.committed is not None
        assert store.committed.payload == b"state 2"


def test_a_unit_that_is_not_named_keeps_side_flags_and_checksums(bench: Bench) -> None:
    store = bench.create()
    flags = dict.fromkeys(NAMES, UnitFlag.MOMENTS_ZERO)
    store.commit(sides=dict.fromkeys(NAMES, 0), flags=flags, checksums={"frozen": 7})
    store.begin()
    record = store.commit(sides={"embed": 1})
    assert record.generation == 1
    assert record.sides == {"embed": 1, "model.layers.0@float32": 0, "frozen": 0}
    assert record.flags["embed"] == UnitFlag(0)
    assert record.flags["frozen"] == UnitFlag.MOMENTS_ZERO | UnitFlag.CHECKSUMS
    assert record.checksums["frozen"] == 7
    store.close()


def test_the_same_generation_may_be_recorded_again_with_a_new_payload(bench: Bench) -> None:
    store = bench.trained(2)
    store.commit(sides={}, generation=1, payload=b"the scheduler stepped")
    crash(store)
    with bench.open() as store:
        assert store.committed is not None
        assert store.committed.payload == b"the scheduler stepped"
        assert store.committed.generation == 1


@pytest.mark.parametrize("at", [0, 9, 14, 50, 60, 64, 90, 2000, 4095, 4096, 4200])
def test_a_damaged_newest_record_falls_back_to_the_one_before(bench: Bench, at: int) -> None:
    crash(bench.trained(3))
    path = newest(bench)
    flip(path, at)
    if at == 9:  # the version: not damage, but something that this program must not touch
        with pytest.raises(StoreError, match="expected format version 1, got 257"):
            bench.open()
        return
    with bench.open() as store:
        assert store.committed is not None
        assert store.committed.generation == 1
        assert content(store, "embed") == {1}
        step(store, 2)
        crash(store)
    with bench.open() as store:
        assert content(store, "embed") == {2}


def test_a_record_torn_at_any_sector_falls_back(bench: Bench) -> None:
    store = bench.create()
    for generation in range(3):
        step(store, generation, payload=bytes([generation]) * 10_000)
    crash(store)
    path = newest(bench)
    whole = path.read_bytes()
    for sector in range(0, 4096 + 10_000, 512):
        path.write_bytes(whole[:sector] + bytes(512) + whole[sector + 512 :])
        expected = 2 if whole[sector : sector + 512] == bytes(512) else 1
        with bench.open(read_only=True) as store:
            assert store.committed is not None
            assert store.committed.generation == expected


def test_a_truncated_record_falls_back(bench: Bench) -> None:
    crash(bench.trained(2))
    os.truncate(newest(bench), 4200)
    with bench.open() as store:
        assert store.committed is not None
        assert store.committed.generation == 0


def test_damage_once_a_step_has_begun_is_an_error_and_never_a_mix(bench: Bench) -> None:
    """Generation g-1's sides are being overwritten, so its record must not come back."""
    store = bench.trained(3)
    store.begin()
    fill(store, "embed", store.spare("embed"), 99)
    crash(store)
    flip(newest(bench), 70)
    with pytest.raises(StoreCorrupt) as error:
        bench.open()
    assert "COMMIT.1: the header is damaged" in str(error.value)
    assert "--fresh" in str(error.value)


def test_two_damaged_records_are_both_named_and_nothing_is_overwritten(bench: Bench) -> None:
    crash(bench.trained(2))
    for name in RECORDS:
        flip(bench.folder / name, 4100)
    before = {path.name: path.read_bytes() for path in bench.folder.iterdir()}
    with pytest.raises(StoreCorrupt) as error:
        bench.open()
    for name in RECORDS:
        assert name in str(error.value)
    with pytest.raises(StoreError, match="damaged"):
        bench.create()
    after = {path.name: path.read_bytes() for path in bench.folder.iterdir()}
    del before["LOCK"], after["LOCK"]
    assert before == after


def test_a_store_killed_before_its_first_commit_says_so(bench: Bench) -> None:
    crash(bench.create())
    with pytest.raises(StoreError, match="before its first commit"):
        bench.open()


def test_a_record_of_another_store_is_refused(tmp_path: Path, bench: Bench) -> None:
    other = Bench([tmp_path / "other"])
    other.paths[0].mkdir()
    crash(other.trained(1))
    crash(bench.trained(1))
    (bench.folder / "COMMIT.1").write_bytes((other.folder / "COMMIT.1").read_bytes())
    with pytest.raises(StoreCorrupt, match="belongs to store"):
        bench.open()


def test_a_commit_without_begin_is_refused(bench: Bench) -> None:
    store = bench.trained(2)
    with pytest.raises(StateError, match=r"expected begin\(\)"):
        store.commit(sides={"embed": store.spare("embed")})
    with pytest.raises(StateError, match=r"expected begin\(\)"):
        store.commit(sides={})
    store.close()


@pytest.mark.parametrize("sides", [{"embed": 0}, {}, dict.fromkeys(NAMES, 2)])
def test_a_commit_that_does_not_say_where_each_unit_is_is_refused(
    bench: Bench, sides: dict[str, int]
) -> None:
    with bench.create() as store:
        with pytest.raises(StateError, match="expected a side below 2"):
            store.commit(sides=sides)
        with pytest.raises(StateError, match="'nope'"):
            store.commit(sides={**dict.fromkeys(NAMES, 0), "nope": 0})
        assert store.committed is None


def test_one_side_in_place_survives_an_ordinary_end_and_not_a_kill(bench: Bench) -> None:
    store = bench.trained(3, num_sides=1, durability="none")
    store.close()
    store = bench.open(durability="none")
    assert content(store, "embed") == {2}
    store.begin()
    fill(store, "embed", 0, 99)
    store.close()  # in the middle of a step: what lies there is no generation
    with pytest.raises(StoreError, match='durability="none" and was killed'):
        bench.open()


def test_a_poisoned_store_refuses_commits_and_keeps_the_last_generation(bench: Bench) -> None:
    store = bench.trained(2)
    store.begin()
    store.poison(OSError(errno.EIO, "write of unit 'embed' failed"))
    for call in (store.begin, lambda: store.commit(sides={}), lambda: store.scratch("x", 1)):
        with pytest.raises(StoreError, match=r"unit 'embed' failed.*until it is opened again"):
            call()
    store.close()
    with bench.open() as store:
        assert store.committed is not None
        assert store.committed.flushed  # the failure concerned the other sides
        assert content(store, "embed") == {1}
        step(store, 2)


@pytest.mark.parametrize("call", ["reserve", "write_at", "flush", "flush_file"])
def test_a_commit_that_fails_poisons_the_store_and_loses_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = bench.trained(2, durability="step")
    store.begin()
    for unit in NAMES:
        fill(store, unit, store.spare(unit), 2)
    sides = {unit: store.spare(unit) for unit in NAMES}

    def fails(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(durable, call, fails)
        with pytest.raises(StoreError, match=r"cannot be committed: No space.*Free space there"):
            store.commit(sides=sides)
    with pytest.raises(StoreError, match="opened again"):
        store.commit(sides=sides)
    store.close()
    with bench.open() as store:
        assert store.committed is not None
        generation = store.committed.generation
        assert generation == 1 or (generation == 2 and call == "flush")
        assert content(store, "embed") == {generation}


def test_step_flushes_the_data_then_the_record(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for call in ("flush", "flush_file", "write_at"):
        real = getattr(durable, call)
        monkeypatch.setattr(
            durable, call, lambda *args, _real=real, _call=call: (order.append(_call), _real(*args))
        )
    with bench.create(durability="step") as store:
        order.clear()
        step(store, 0)
        assert order == ["flush_file"] * 3 + ["write_at"] * 3 + ["flush"]
        order.clear()
        store.begin()
        store.commit(sides={"embed": 1})
        assert order == ["write_at", "flush_file"] + ["write_at"] * 3 + ["flush"]
        order.clear()
    assert order == []  # nothing is left for close to flush


def test_process_flushes_nothing_until_close(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    flushes: list[str] = []
    for call in ("flush", "flush_file"):
        real = getattr(durable, call)
        monkeypatch.setattr(
            durable, call, lambda *a, _real=real, _call=call: (flushes.append(_call), _real(*a))
        )
    store = bench.create()
    flushes.clear()
    for generation in range(3):
        step(store, generation)
    assert flushes == []
    store.close()
    assert flushes == ["flush_file"] * 3 + ["flush"]
    with bench.open() as store:
        assert store.committed is not None
        assert store.committed.flushed
        assert store.committed.generation == 2


def restart_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("recover", "generations"):
        monkeypatch.setattr(f"offload.store.{module}.boot_id", lambda: "another boot")


def test_unflushed_data_is_refused_after_a_restart_of_the_machine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(bench.trained(2))
    bench.open().close(flush=False)
    restart_machine(monkeypatch)
    with pytest.raises(StoreError, match=r"not flushed, and the machine has restarted"):
        bench.open()
    with bench.open(unverified=True) as store:
        assert content(store, "embed") == {1}


@pytest.mark.parametrize("durability", ["step", "process"])
def test_flushed_data_is_good_after_a_restart_of_the_machine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    store = bench.trained(2, durability=durability)
    if durability == "step":
        crash(store)
    else:
        store.close()
    restart_machine(monkeypatch)
    with bench.open() as store:
        assert content(store, "embed") == {1}


def test_a_reader_beside_a_writer_learns_that_its_generation_is_going(bench: Bench) -> None:
    store = bench.trained(2)
    reader = bench.open(read_only=True)
    assert reader.generations.is_current()
    step(store, 2)  # writes the other side
    assert reader.generations.is_current()
    assert content(reader, "embed") == {1}
    store.begin()
    assert not reader.generations.is_current()
    reader.close()
    store.close()


def test_a_reader_writes_nothing(bench: Bench) -> None:
    bench.trained(2).close()
    before = {path.name: path.read_bytes() for path in bench.folder.iterdir()}
    with bench.open(read_only=True) as store:
        for call in (store.begin, lambda: store.commit(sides={}), lambda: store.scratch("x", 1)):
            with pytest.raises(StoreError, match="opened read-only"):
                call()
        store.remove()
    assert {path.name: path.read_bytes() for path in bench.folder.iterdir()} == before


def test_close_may_be_called_twice_and_ends_everything(bench: Bench) -> None:
    store = bench.trained(1)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="it is closed"):
        store.begin()
