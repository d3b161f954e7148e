"""Checksums find rot and lost writes; reports find what dead jobs left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from store_bench import NAMES, Bench, content, fill, flip

from offload.errors import StoreCorrupt, StoreError
from offload.partition.unit import Role
from offload.store import Store, UnitFlag, checksum
from offload.store.inspect import describe, find_stores, reclaim, verify

UNIT = "model.layers.0@float32"


def seal(store: Store, unit: str, side: int) -> int:
    return checksum.seal(store.files, unit, side, checksum.sums_of(store.files, unit, side))


def sealed_step(store: Store, generation: int) -> None:
    store.begin()
    sides = {unit: store.spare(unit) for unit in NAMES}
    for unit, side in sides.items():
        fill(store, unit, side, generation)
    sums = {unit: seal(store, unit, side) for unit, side in sides.items()}
    store.commit(sides=sides, checksums=sums, generation=generation)


def problems(bench: Bench) -> list[str]:
    return [problem for _, found in verify(bench.paths, bench.name) for problem in found]


@pytest.fixture
def sealed(bench: Bench) -> Bench:
    store = bench.create()
    for generation in range(3):
        sealed_step(store, generation)
    store.close()
    return bench


def test_a_sound_store_verifies_unit_by_unit(sealed: Bench) -> None:
    assert list(verify(sealed.paths, sealed.name)) == [(unit, []) for unit in NAMES]


def test_a_unit_without_checksums_is_said_to_be_unverified(bench: Bench) -> None:
    bench.trained(1).close()
    assert problems(bench) == [f"unit {unit!r}: has no checksums to verify" for unit in NAMES]


def test_a_flipped_bit_in_every_block_names_unit_role_and_block(sealed: Bench) -> None:
    with sealed.open(read_only=True) as store:
        assert store.committed is not None
        layout = store.files.layout(UNIT)
        path = store.files.path(UNIT, store.committed.sides[UNIT])
    seen = 0
    for role, place in layout.roles.items():
        for block in range(place.num_blocks):
            offset = place.offset + (block << 20)
            for at in (offset, min(offset + (1 << 20), place.offset + place.num_bytes) - 1):
                flip(path, at)
                (problem,) = problems(sealed)
                assert f"unit {UNIT!r}, side A" in problem
                assert f"{role.value}, block {block} (at byte {offset} " in problem
                flip(path, at)
                seen += 1
    assert seen == 2 * layout.num_blocks == 6
    assert problems(sealed) == []


def test_padding_has_no_checksum(sealed: Bench) -> None:
    with sealed.open(read_only=True) as store:
        place = next(iter(store.files.layout(UNIT).roles.values()))
        path = store.files.path(UNIT, 0)
    assert place.num_bytes % 4096
    flip(path, place.offset + place.num_bytes)
    assert problems(sealed) == []


def test_an_old_side_with_its_own_checksums_cannot_pass_for_the_new_one(sealed: Bench) -> None:
    """A drive that lost a whole write: old data and old checksums, all matching."""
    store = sealed.open()
    old = store.files.path(UNIT, 0).read_bytes()
    sealed_step(store, 3)
    sealed_step(store, 4)
    store.files.path(UNIT, 0).write_bytes(old)
    store.close()
    (problem,) = problems(sealed)
    assert "checksums are not those that were committed" in problem


def test_checksums_that_a_writer_computed_are_those_of_the_data(bench: Bench) -> None:
    with bench.create() as store:
        for unit in NAMES:
            fill(store, unit, 0, 5)
        computed = {}
        for role, place in store.files.layout(UNIT).roles.items():
            sums = checksum.BlockSums()
            for start in range(0, place.num_bytes, 5000):
                sums.add(memoryview(bytes([5]) * min(5000, place.num_bytes - start)))
            computed[role] = sums.finish()
        assert checksum.seal(store.files, UNIT, 0, computed) == seal(store, UNIT, 0)
        computed[Role.PARAM] = computed[Role.PARAM][1:]
        with pytest.raises(ValueError, match="param: expected 8 bytes, got 7"):
            checksum.seal(store.files, UNIT, 0, computed)


def test_moments_that_were_never_written_are_not_compared(bench: Bench) -> None:
    with bench.create() as store:
        sides = dict.fromkeys(NAMES, 0)
        digests = {}
        for unit in NAMES:
            fill(store, unit, 0, 9)  # what the moments hold means nothing
            sums = checksum.sums_of(store.files, unit, 0, moments=False)
            digests[unit] = checksum.seal(store.files, unit, 0, sums)
        flags = dict.fromkeys(NAMES, UnitFlag.MOMENTS_ZERO)
        store.begin()
        store.commit(sides=sides, checksums=digests, flags=flags)
    assert problems(bench) == []
    with bench.open(read_only=True) as store:
        flip(store.files.path(UNIT, 0), store.extent(UNIT, Role.EXP_AVG, 0).offset)
        assert problems(bench) == []
        flip(store.files.path(UNIT, 0), store.extent(UNIT, Role.PARAM, 0).offset)
    assert len(problems(bench)) == 1


@pytest.mark.parametrize("damaged", [False, True])
def test_unflushed_data_is_verified_after_a_restart_of_the_machine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    store = bench.create()
    sealed_step(store, 0)
    path = store.files.path(UNIT, 0)
    store.close(flush=False)
    monkeypatch.setattr("offload.store.recover.boot_id", lambda: "another boot")
    if damaged:
        flip(path, 4096)
        with pytest.raises(StoreCorrupt, match=r"not flushed.*'model.layers.0@float32'.*param"):
            bench.open()
    else:
        with bench.open() as store:
            assert content(store, UNIT) == {0}


def test_one_unsealed_unit_makes_the_generation_unverifiable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.create()
    sealed_step(store, 0)
    store.begin()
    store.commit(sides={UNIT: 1})
    assert store.committed is not None
    assert UnitFlag.CHECKSUMS not in store.committed.flags[UNIT]
    store.close(flush=False)
    monkeypatch.setattr("offload.store.recover.boot_id", lambda: "another boot")
    with pytest.raises(StoreError, match="no checksums to tell"):
        bench.open()


def test_a_report_says_what_a_store_holds_and_who_has_it(bench: Bench) -> None:
    store = bench.trained(4)
    store.scratch("spill", 1 << 20)
    report = describe(bench.paths, bench.name)
    assert report.holder == os.getpid()
    assert report.record is not None
    assert report.record.generation == 3
    assert report.problems == ()
    assert report.scratch_bytes == 1 << 20
    assert report.data_bytes >= store.disk_bytes - (1 << 20)
    assert report.reclaimable_bytes == 0
    text = str(report)
    assert f"in use by process {os.getpid()}" in text
    assert 'generation 3 (durability="process", not flushed)' in text
    store.close()
    assert describe(bench.paths, bench.name).holder is None


def test_a_report_of_a_store_that_is_being_written_in_place_calls_it_no_left_over(
    bench: Bench,
) -> None:
    with bench.trained(2, num_sides=1, durability="none") as store:
        store.begin()
        report = describe(bench.paths, bench.name)
        assert report.record is None
        assert report.reclaimable_bytes == 0
        assert "being made, or written in place" in str(report)
        assert "left-over" not in str(report)
    assert "was killed with durability" in str(describe(bench.paths, bench.name))


def test_a_report_lists_damage_instead_of_failing(bench: Bench) -> None:
    store = bench.trained(2)
    path = store.files.path("embed", 1)
    store.close()
    os.truncate(path, 100)
    report = describe(bench.paths, bench.name)
    assert len(report.problems) == 1
    assert "unit 'embed', side B" in report.problems[0]
    flip(bench.folder / "MANIFEST", 60)
    report = describe(bench.paths, bench.name)
    assert "MANIFEST" in report.problems[0]
    assert report.reclaimable_bytes == 0
    assert "PROBLEM" in str(report)


def test_every_store_of_a_directory_is_found(tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        bench = Bench([tmp_path])
        bench.name = name
        bench.trained(1).close()
    (tmp_path / "something-else").mkdir()
    (tmp_path / "offload-odd name").mkdir()
    reports = find_stores([tmp_path])
    assert [report.name for report in reports] == ["alpha", "beta", "odd name"]
    assert "letters" in reports[2].problems[0]


def test_reclaim_frees_scratch_and_keeps_the_generation(bench: Bench) -> None:
    store = bench.trained(2)
    store.scratch("spill", 1 << 20)
    with pytest.raises(StoreError, match="in use"):
        reclaim(bench.paths, bench.name)
    store.close()
    assert describe(bench.paths, bench.name).reclaimable_bytes == 1 << 20
    assert reclaim(bench.paths, bench.name) == 1 << 20
    with bench.open() as store:
        assert content(store, "embed") == {1}


def test_reclaim_removes_a_store_that_never_held_anything(two_paths: Bench) -> None:
    two_paths.create().close()
    report = describe(two_paths.paths, two_paths.name)
    assert "left-over" in str(report)
    assert reclaim(two_paths.paths, two_paths.name) == report.reclaimable_bytes > 0
    assert not [path for parent in two_paths.paths for path in parent.iterdir()]


def test_reclaim_leaves_a_damaged_store_and_half_of_a_living_one(two_paths: Bench) -> None:
    two_paths.trained(1).close()
    before = [path.name for path in two_paths.paths[1].rglob("*")]
    lone = describe(two_paths.paths[1:], two_paths.name)
    assert "manifest lies elsewhere" in lone.problems[0]
    assert reclaim(two_paths.paths[1:], two_paths.name) == 0
    flip(two_paths.folder / "COMMIT.1", 60)
    flip(two_paths.folder / "COMMIT.0", 60)
    assert reclaim(two_paths.paths, two_paths.name) == 0
    assert [path.name for path in two_paths.paths[1].rglob("*")] == before
