"""Making a store: reserved whole or not at all, never over something that exists."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_bench import LAYOUT, NAMES, UNITS, Bench, step

from offload.errors import ConfigError, StoreError
from offload.partition.unit import ELEM_BYTES, Role, TensorSpec, lay_out
from offload.store import Store, UnitExtents, durable, exists
from offload.store.extents import lay_out_file, spread


def in_child(run: Callable[[], object], *, uid: int) -> str:
    """Run in a forked process as another user; return what it raised, or 'no error'."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def body() -> None:
        os.setgroups([])
        os.setuid(uid)
        try:
            run()
            send.send("no error")
        except Exception as error:
            send.send(f"{type(error).__name__}: {error}")

    child = context.Process(target=body)
    child.start()
    child.join()
    return str(receive.recv())


def test_extents_are_aligned_and_disjoint_and_hold_their_roles(bench: Bench) -> None:
    with bench.create() as store:
        for unit in UNITS:
            end = 4096
            for role, num_bytes in unit.role_bytes.items():
                extent = store.extent(unit.name, role, 1)
                assert extent.offset == end
                assert extent.offset % 4096 == extent.num_bytes % 4096 == 0
                assert num_bytes <= extent.num_bytes < num_bytes + 4096
                end += extent.num_bytes
            layout = store.files.layout(unit.name)
            assert layout.checksum_offset == end
            assert layout.file_bytes - end >= 8 * layout.num_blocks


def test_a_unit_of_the_partition_gives_its_extents() -> None:
    tensors = [TensorSpec("a", (3, 70)), TensorSpec("b", (9,), trainable=False)]
    unit = lay_out("block", 0, tensors)
    extents = UnitExtents.of(unit)
    assert extents.name == "block"
    for role, num_bytes in extents.role_bytes.items():
        assert num_bytes == unit.role_elems(role) * ELEM_BYTES[role]


def test_every_block_is_reserved_before_the_first_step(bench: Bench) -> None:
    with bench.create() as store:
        for path in bench.folder.iterdir():
            if path.name[0].isdigit() or path.name.startswith("COMMIT"):
                info = path.stat()
                assert info.st_blocks * 512 >= info.st_size > 4096
        data = sum(path.stat().st_size for path in bench.folder.glob("0*"))
        assert store.disk_bytes == data


def test_the_folder_and_its_files_belong_to_the_user_alone(bench: Bench) -> None:
    with bench.create():
        assert stat.S_IMODE(bench.folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in bench.folder.iterdir()} == {0o600}


def test_one_side_takes_half_the_data(bench: Bench) -> None:
    with bench.create() as store:
        both = store.disk_bytes
    with bench.create(num_sides=1) as store:
        assert store.disk_bytes * 2 == both
        assert store.spare("embed") == 0


@pytest.mark.parametrize(
    "name",
    ["a/b\\c", "..", "ünïcödé 模型", "x" * 3000, "tab\tnew\nline", "-rf", ".hidden"],
)
def test_an_odd_unit_name_survives_and_its_file_name_is_safe(bench: Bench, name: str) -> None:
    units = [UnitExtents(name, {Role.PARAM: 10}), UnitExtents(name + "_", {Role.PARAM: 10})]
    with Store.create(bench.paths, "odd", units, layout={}) as store:
        store.commit(sides={name: 0, name + "_": 1})
    with Store.open(bench.paths, "odd") as store:
        assert store.committed is not None
        assert store.committed.sides == {name: 0, name + "_": 1}
        assert store.extent(name, Role.PARAM, 0).num_bytes == 4096
        for side in (0, 1):
            path = store.files.path(name, side)
            assert path.parent == bench.paths[0] / "offload-odd"
            assert path.name.isascii()
            assert len(path.name) < 100


def test_unit_names_that_differ_only_in_replaced_characters_get_files_of_their_own() -> None:
    names = ["a@b", "a b", "a_b"]
    units = [UnitExtents(name, {Role.PARAM: 1}) for name in names]
    files = {lay_out_file(unit, i, path=0).names[0] for i, unit in enumerate(units)}
    assert len(files) == 3


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 101, "a b"])
def test_a_store_name_that_is_no_plain_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="store name"):
        Store.create([tmp_path], name, UNITS, layout=LAYOUT)
    assert not list(tmp_path.iterdir())


def test_two_units_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name of its own"):
        Store.create([tmp_path], "x", [UNITS[0], UNITS[0]], layout=LAYOUT)


@pytest.mark.parametrize("num_sides", [0, 3])
def test_only_one_or_two_sides_exist(bench: Bench, num_sides: int) -> None:
    with pytest.raises(ConfigError, match="num_sides"):
        bench.create(num_sides=num_sides)


def test_an_unknown_durability_is_refused(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="'step', got 'paranoid'"):
        bench.create(durability="paranoid")


def test_a_missing_path_is_one_clear_line(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "mounted"
    with pytest.raises(StoreError) as error:
        Store.create([tmp_path, missing], "x", UNITS, layout=LAYOUT)
    assert str(missing) in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="expected a directory, got a file"):
        Store.create([tmp_path / "file"], "x", UNITS, layout=LAYOUT)


def test_the_same_path_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="twice"):
        Store.create([tmp_path, tmp_path / "link"], "x", UNITS, layout=LAYOUT)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: needs root")
def test_an_unwritable_path_is_one_clear_line_and_nothing_is_left(tmp_path: Path) -> None:
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    bench = Bench([tmp_path])
    text = in_child(bench.create, uid=65534)
    assert text.startswith("StoreError: store 'demo' cannot be made: Permission denied")
    assert str(bench.folder) in text
    assert "Make it writable" in text
    assert not list(tmp_path.iterdir())


def test_too_little_space_shows_the_sum_before_anything_is_made(tmp_path: Path) -> None:
    units = [UnitExtents(f"layer{i}", {Role.PARAM: 10**15}) for i in range(3)]
    with pytest.raises(StoreError) as error:
        Store.create([tmp_path], "big", units, layout={}, scratch_bytes=10**9)
    text = str(error.value)
    assert "6023437.50 GB" not in text
    assert "of state x 2 sides" in text
    assert "short" in text
    assert 'durability="none"' in text
    assert not list(tmp_path.iterdir())


def test_scratch_counts_in_the_space_that_is_checked(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="short"):
        Store.create([tmp_path], "big", UNITS, layout={}, scratch_bytes=10**18)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount a small file system: needs root")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_is_refused_with_needed_and_free_bytes(small_disk: Path) -> None:
    units = [UnitExtents("layer", {Role.PARAM: 10 << 20})]
    with pytest.raises(StoreError, match=r"expected 24\.\d\d MB free .* got 16\.78 MB: 7\.\d\d MB"):
        Store.create([small_disk], "x", units, layout={})
    assert not list(small_disk.iterdir())
    with Store.create([small_disk], "x", units, layout={}, num_sides=1):
        pass


def test_a_disk_that_fills_while_reserving_leaves_nothing(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.store.build.place", place_without_check)
    units = [UnitExtents(f"layer{i}", {Role.PARAM: 3 << 20}) for i in range(4)]
    with pytest.raises(StoreError, match=r"No space left on device.*Free space there"):
        Store.create([small_disk], "x", units, layout={})
    assert not list(small_disk.iterdir())


def place_without_check(found, units, num_sides, **_):
    return spread(units, [1 << 60] * len(found.folders), num_sides)


def test_space_that_an_old_store_gives_back_counts(small_disk: Path) -> None:
    units = [UnitExtents("layer", {Role.PARAM: 4 << 20})]
    for generation in range(2):
        with Store.create([small_disk], "x", units, layout={}, fresh=True) as store:
            store.commit(sides={"layer": 0}, generation=generation)
    with Store.open([small_disk], "x") as store:
        assert store.committed is not None
        assert store.committed.generation == 1


def test_scratch_on_a_full_disk_is_an_error_and_the_store_goes_on(small_disk: Path) -> None:
    units = [UnitExtents("layer", {Role.PARAM: 4 << 20})]
    with Store.create([small_disk], "x", units, layout={}) as store:
        with pytest.raises(StoreError, match=r"scratch 'spill'.*No space"):
            store.scratch("spill", 64 << 20)
        assert not list((small_disk / "offload-x").glob("scratch*"))
        store.commit(sides={"layer": 0})


@pytest.mark.parametrize("call", ["reserve", "write_at", "flush", "flush_folder", "replace"])
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_failure_at_any_call_while_making_leaves_nothing(
    two_paths: Bench, monkeypatch: pytest.MonkeyPatch, call: str, nth: int
) -> None:
    real = getattr(durable, call)
    calls = 0

    def fails(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    monkeypatch.setattr(durable, call, fails)
    if call == "replace" and nth == 4:
        two_paths.create().close()  # there are three: two parts and the manifest
        assert calls == 3
        return
    with pytest.raises(StoreError, match=r"cannot be made: Input/output error.*Check the drive"):
        two_paths.create()
    assert not [path for parent in two_paths.paths for path in parent.iterdir()]


def test_an_existing_store_is_never_silently_replaced(bench: Bench) -> None:
    bench.trained(3).close()
    assert exists(bench.paths, bench.name)
    with pytest.raises(StoreError) as error:
        bench.create(advice="Take another.")
    assert str(error.value).endswith("got generation 2 of 3 units. Take another.")
    with bench.open() as store:
        assert store.committed is not None
        assert store.committed.generation == 2


def test_fresh_discards_the_old_store(bench: Bench) -> None:
    bench.trained(3).close()
    with bench.create(fresh=True) as store:
        assert store.committed is None
    assert not exists(bench.paths, bench.name)


def test_a_fresh_store_that_does_not_fit_leaves_the_old_one(bench: Bench) -> None:
    bench.trained(1).close()
    with pytest.raises(StoreError, match="short"):
        bench.create(fresh=True, scratch_bytes=10**18)
    bench.open().close()


def test_a_store_that_never_committed_is_reclaimed_and_said(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.create().close()
    assert not exists(bench.paths, bench.name)
    bench.create().close()
    assert "files of an earlier job" in caplog.text


def test_a_half_made_store_is_reclaimed(two_paths: Bench) -> None:
    two_paths.create().close()
    (two_paths.folder / "MANIFEST").unlink()
    with two_paths.create() as store:
        step(store, 0)


def test_the_second_folder_of_a_living_store_is_never_reclaimed(two_paths: Bench) -> None:
    two_paths.trained(1).close()
    lone = Bench(two_paths.paths[1:])
    with pytest.raises(StoreError, match="manifest lies elsewhere"):
        lone.create()
    two_paths.open().close()


def test_a_folder_with_foreign_files_is_left_alone(bench: Bench) -> None:
    bench.folder.mkdir()
    (bench.folder / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"thesis\.tex"):
        bench.create(fresh=True)
    assert [path.name for path in bench.folder.iterdir()] == ["thesis.tex"]


def test_several_paths_share_the_bytes_and_open_in_any_order(two_paths: Bench) -> None:
    units = [UnitExtents(f"layer{i}", {Role.PARAM: 100_000}) for i in range(8)]
    with Store.create(two_paths.paths, "wide", units, layout={}) as store:
        per_path = [len(list((path / "offload-wide").glob("0*"))) for path in two_paths.paths]
        assert per_path == [8, 8]
        where = {unit.name: store.files.path(unit.name, 0).parent for unit in units}
        store.commit(sides={unit.name: 1 for unit in units})
    with Store.open(two_paths.paths[::-1], "wide") as store:
        assert {unit.name: store.files.path(unit.name, 0).parent for unit in units} == where


def test_a_path_with_less_room_gets_fewer_units() -> None:
    units = [UnitExtents(f"layer{i}", {Role.PARAM: 4096}) for i in range(10)]
    placed = spread(units, [10**9, 3 * 2 * 3 * 4096], 2)
    assert [sum(layout.path == i for layout in placed) for i in (0, 1)] == [7, 3]


@pytest.mark.parametrize("rates", [(1.0, 2.0), (2.0, 1.0), (1.0, 2.0, 3.0)])
def test_bytes_split_in_proportion_to_the_rates_whatever_the_sizes(rates) -> None:
    sizes = [3_000_000, *[700_000, 40_000, 900_000] * 12]
    units = [UnitExtents(f"layer{i}", {Role.PARAM: size}) for i, size in enumerate(sizes)]
    placed = spread(units, [10**12] * len(rates), 2, rates)
    assert [layout.unit for layout in placed] == [unit.name for unit in units]
    held = [sum(at.file_bytes for at in placed if at.path == i) for i in range(len(rates))]
    for path, rate in enumerate(rates):
        wanted = sum(held) * rate / sum(rates)
        assert abs(held[path] - wanted) <= 0.1 * wanted


def test_equal_neighbours_lie_on_different_drives() -> None:
    units = [UnitExtents(f"layer{i}", {Role.PARAM: 700_000}) for i in range(9)]
    paths = [layout.path for layout in spread(units, [10**12] * 2, 2, (1.0, 2.0))]
    assert [sorted(paths[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 1]] * 3


def test_a_store_lies_on_its_paths_as_the_rates_say(two_paths: Bench) -> None:
    units = [UnitExtents(f"layer{i}", {Role.PARAM: 100_000}) for i in range(9)]
    with Store.create(two_paths.paths, "wide", units, layout={}, rates=(1e9, 2e9)):
        pass
    per_path = [len(list((path / "offload-wide").glob("0*"))) for path in two_paths.paths]
    assert per_path == [6, 12]  # two sides each


def test_rates_that_do_not_fit_the_paths_are_refused(two_paths: Bench) -> None:
    for rates in ((1.0,), (1.0, 0.0)):
        with pytest.raises(ConfigError, match="one > 0 for each of 2 paths"):
            two_paths.create(rates=rates)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_folder_of_several_is_named(two_paths: Bench, missing: int) -> None:
    two_paths.trained(1).close()
    left = two_paths.paths[1 - missing]
    says = "expected 2 folders, got 1: number 2" if missing else "manifest lies elsewhere"
    made_at = re.escape(f"(it was made at {two_paths.paths[missing].resolve()})")
    for call in [Bench([left]).open] if missing else [Bench([left]).open, Bench([left]).create]:
        with pytest.raises(StoreError, match=f"{says} {made_at}"):
            call()


def test_a_drive_that_is_not_mounted_is_named(two_paths: Bench) -> None:
    two_paths.trained(1).close()
    second = two_paths.paths[1]
    shutil.rmtree(second / two_paths.folder.name)  # what an empty mount point looks like
    with pytest.raises(StoreError, match=re.escape(str(second))):
        two_paths.open()
    second.rmdir()
    with pytest.raises(StoreError, match=re.escape(str(second))):
        two_paths.open()


def test_a_store_may_be_moved(tmp_path: Path, bench: Bench) -> None:
    bench.trained(2).close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    bench.folder.rename(elsewhere / bench.folder.name)
    with Bench([elsewhere]).open() as store:
        assert store.committed is not None
        assert store.committed.payload == b"state 1"


def test_remove_leaves_nothing(two_paths: Bench) -> None:
    store = two_paths.trained(2)
    store.scratch("spill", 5000)
    store.remove()
    store.close()
    assert not [path for parent in two_paths.paths for path in parent.iterdir()]


def test_remove_keeps_a_file_that_it_did_not_make(bench: Bench) -> None:
    store = bench.trained(1)
    (bench.folder / "notes.txt").touch()
    store.remove()
    assert [path.name for path in bench.folder.iterdir()] == ["notes.txt"]


def test_scratch_is_reserved_and_forgotten_by_the_next_open(bench: Bench) -> None:
    store = bench.trained(1)
    before = store.disk_bytes
    file = store.scratch("grad: layer 0", 10_000)
    assert file.size == 10_000
    assert store.disk_bytes == before + 10_000
    with pytest.raises(ValueError, match="open already"):
        store.scratch("grad: layer 0", 10_000)
    store.close()
    assert list(bench.folder.glob("scratch*"))
    with bench.open():
        assert not list(bench.folder.glob("scratch*"))


def test_more_files_than_the_process_may_open_is_one_clear_line(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (64, 64))
    with pytest.raises(StoreError, match="ulimit"):
        bench.create()
    assert not bench.folder.exists()


def test_the_limit_of_open_files_is_raised_as_far_as_needed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda which: (64, 4096))
    monkeypatch.setattr("resource.setrlimit", lambda which, limits: raised.append(limits))
    with bench.create() as store:
        num_files = 2 * len(store.manifest.files)
    assert len(raised) == 1
    assert raised[0][0] >= 64 + 2 * num_files
    assert raised[0][1] == 4096


def test_the_names_used_here_are_those_of_the_store(bench: Bench) -> None:
    with bench.create() as store:
        assert [file.unit for file in store.manifest.files] == NAMES
        with pytest.raises(KeyError, match="no unit 'nope'"):
            store.extent("nope", Role.PARAM, 0)
