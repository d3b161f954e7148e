"""Opening: the right store, whole, owned by one process; every refusal names the thing."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from store_bench import LAYOUT, Bench, content, flip, step

from offload.errors import StoreCorrupt, StoreError
from offload.store import Store, exists, format
from offload.store.recover import differences

HOLD = """
import os, signal, sys, time
from offload.store import Store
store = Store.open([sys.argv[1]], "demo")
if sys.argv[2] == "fork" and os.fork() == 0:
    sys.stdout.write(f"{os.getpid()}\\n")
    sys.stdout.flush()
    signal.pause()
sys.stdout.write("ready\\n")
sys.stdout.flush()
signal.pause()
"""


def hold(bench: Bench, how: str = "plain") -> subprocess.Popen[str]:
    """Another process that holds the store and waits to be killed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOLD, str(bench.paths[0]), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_store_that_is_not_there_is_named(bench: Bench) -> None:
    with pytest.raises(StoreError, match=r"expected a store at .*offload-demo, got none"):
        bench.open()
    assert not exists(bench.paths, bench.name)
    assert not bench.folder.exists()


def test_another_layout_shows_the_first_differences(bench: Bench) -> None:
    bench.trained(1).close()
    other = copy.deepcopy(LAYOUT)
    other["dtype"] = "float32"
    other["units"][0]["shape"] = (61, 128)
    with pytest.raises(StoreError) as error:
        bench.open(layout=other)
    text = str(error.value)
    assert 'dtype: expected "float32", got "bfloat16"' in text
    assert "units.embed.shape: expected [61, 128], got [61, 64]" in text
    assert "\n" not in text
    bench.open().close()


def test_differences_name_what_is_missing_moved_or_new() -> None:
    ours = {"units": [{"name": "a", "n": 1}, {"name": "b", "n": 2}], "x": [1, 2]}
    theirs = {"units": [{"name": "b", "n": 3}, {"name": "c", "n": 2}], "x": [2, 1], "y": 0}
    assert list(differences(ours, ours)) == []
    found = list(differences(ours, theirs))
    assert found == [
        'units.a: expected {"name": "a", "n": 1, "position": 0}, got nothing',
        "units.b.n: expected 2, got 3",
        "units.b.position: expected 1, got 0",
        'units.c: expected nothing, got {"name": "c", "n": 2, "position": 1}',
        "x: expected [1, 2], got [2, 1]",
        "y: expected nothing, got 0",
    ]


def test_a_long_list_of_differences_is_cut(bench: Bench) -> None:
    bench.trained(1).close()
    with pytest.raises(StoreError, match=r"and 46 more\. Use"):
        bench.open(layout={**LAYOUT, **{f"key{i}": i for i in range(50)}})


@pytest.mark.parametrize("options", [{}, {"fresh": True}])
def test_a_second_engine_in_the_same_process_is_refused(bench: Bench, options: dict) -> None:
    with bench.trained(1) as store:
        for call in (bench.open, lambda: bench.create(**options)):
            with pytest.raises(StoreError, match=rf"in use by this process \({os.getpid()}\)"):
                call()
        step(store, 1)


def test_a_lock_dies_with_its_process(bench: Bench) -> None:
    bench.trained(1).close()
    child = hold(bench)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    for call in (bench.open, lambda: bench.create(fresh=True)):
        with pytest.raises(StoreError, match=f"in use by process {child.pid}"):
            call()
    child.kill()
    child.wait()
    child.stdout.close()
    bench.open().close()


def test_a_worker_that_outlives_the_killed_owner_does_not_keep_the_lock(bench: Bench) -> None:
    bench.trained(1).close()
    child = hold(bench, "fork")
    assert child.stdout is not None
    lines = {child.stdout.readline().strip(), child.stdout.readline().strip()}
    worker = int((lines - {"ready"}).pop())
    child.kill()
    child.wait()
    os.kill(worker, 0)  # alive
    bench.open().close()
    os.kill(worker, signal.SIGKILL)
    child.stdout.close()


def test_a_lock_is_held_on_every_path(two_paths: Bench) -> None:
    with two_paths.trained(1), pytest.raises(StoreError, match="in use by this process"):
        Store.create(two_paths.paths[1:], two_paths.name, [], layout={})


def test_a_manifest_with_a_flipped_bit_is_refused_and_left_alone(bench: Bench) -> None:
    bench.trained(1).close()
    path = bench.folder / "MANIFEST"
    size = path.stat().st_size
    for offset in [*range(0, 40, 3), *range(41, size, 97), size - 1]:
        flip(path, offset)
        damaged = path.read_bytes()
        with pytest.raises(StoreError, match="MANIFEST"):
            bench.open()
        with pytest.raises(StoreError, match="cannot be read"):
            bench.create()
        assert path.read_bytes() == damaged
        flip(path, offset)
    bench.open().close()


def test_a_manifest_of_another_version_says_what_to_do(bench: Bench) -> None:
    bench.trained(1).close()
    path = bench.folder / "MANIFEST"
    path.write_bytes(path.read_bytes().replace(b"offload-store 1 ", b"offload-store 2 ", 1))
    with pytest.raises(StoreError, match=r"expected format version 1, got 2\. Use the release"):
        bench.open()


@pytest.mark.parametrize("key", ["bytes", "offsets", "checksum_offset", "file_bytes"])
def test_a_manifest_that_contradicts_itself_is_refused(bench: Bench, key: str) -> None:
    """Valid checksum, senseless numbers: nothing may be computed from them."""
    bench.trained(1).close()
    path = bench.folder / "MANIFEST"
    value = format.decode_text("store", path.read_bytes(), "here")
    entry = value["files"][0]
    entry[key] = {**entry[key], "param": 123456} if isinstance(entry[key], dict) else 8192
    path.write_bytes(format.encode_text("store", value))
    with pytest.raises(StoreCorrupt, match="unit 'embed' contradict"):
        bench.open()


@pytest.mark.parametrize("names", [["../../etc/passwd", "b"], ["00000-embed.r0.A"], ["a/b", ""]])
def test_a_manifest_that_names_files_elsewhere_is_refused(bench: Bench, names: list[str]) -> None:
    bench.trained(1).close()
    path = bench.folder / "MANIFEST"
    value = format.decode_text("store", path.read_bytes(), "here")
    value["files"][0]["files"] = names
    path.write_bytes(format.encode_text("store", value))
    with pytest.raises(StoreCorrupt, match="odd names"):
        bench.open()


def test_the_manifest_alone_decides_which_file_is_which(bench: Bench) -> None:
    """Another release may name files otherwise."""
    bench.trained(1).close()
    path = bench.folder / "MANIFEST"
    value = format.decode_text("store", path.read_bytes(), "here")
    for side, old in enumerate(list(value["files"][0]["files"])):
        new = f"77777-renamed.r0.{'AB'[side]}"
        (bench.folder / old).rename(bench.folder / new)
        value["files"][0]["files"][side] = new
    path.write_bytes(format.encode_text("store", value))
    with bench.open() as store:
        assert content(store, "embed") == {0}
        assert store.files.path("embed", 0).name == "77777-renamed.r0.A"


@pytest.mark.parametrize("key", ["files", "store_id", "layout", "layout_hash", "num_sides"])
def test_a_manifest_without_a_field_is_refused(bench: Bench, key: str) -> None:
    bench.trained(1).close()
    path = bench.folder / "MANIFEST"
    value = format.decode_text("store", path.read_bytes(), "here")
    del value[key]
    path.write_bytes(format.encode_text("store", value))
    with pytest.raises(StoreCorrupt, match="missing or malformed"):
        bench.open()


def test_a_truncated_data_file_names_its_unit(bench: Bench) -> None:
    store = bench.trained(1)
    path = store.files.path("embed", 0)
    store.close()
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(StoreCorrupt, match=r"unit 'embed', side A: .* truncated.*got 36864"):
        bench.open()


def test_a_missing_data_file_names_its_unit(bench: Bench) -> None:
    store = bench.trained(2)
    path = store.files.path("frozen", 1)
    store.close()
    path.unlink()
    with pytest.raises(StoreCorrupt, match=r"unit 'frozen', side B: the file .* is missing"):
        bench.open()


def test_a_flipped_bit_in_a_data_header_names_the_unit(bench: Bench) -> None:
    store = bench.trained(1)
    path = store.files.path("frozen", 0)
    store.close()
    for offset in (0, 12, 20, 50, 70, 4095):
        flip(path, offset)
        with pytest.raises(StoreCorrupt, match="unit 'frozen', side A"):
            bench.open()
        flip(path, offset)
    bench.open().close()


def test_files_that_were_exchanged_are_found(bench: Bench) -> None:
    store = bench.trained(2)
    sides = [store.files.path("embed", side) for side in (0, 1)]
    store.close()
    sides[0].rename(bench.folder / "aside")
    sides[1].rename(sides[0])
    (bench.folder / "aside").rename(sides[1])
    with pytest.raises(StoreCorrupt, match=r"unit 'embed', side B.*got unit number 0, side A"):
        bench.open()


def test_the_side_that_holds_nothing_is_made_again(bench: Bench) -> None:
    """After a power loss the spare side may be short or gone; nothing is lost with it."""
    store = bench.trained(2)
    spare = store.files.path("embed", 0)
    store.close()
    spare.unlink()
    with bench.open() as store:
        assert spare.stat().st_blocks * 512 >= spare.stat().st_size
        step(store, 2)
    with bench.open() as store:
        assert content(store, "embed") == {2}


def test_a_reader_needs_only_the_committed_side(bench: Bench) -> None:
    store = bench.trained(2)
    spare = store.files.path("embed", 0)
    store.close()
    spare.unlink()
    with bench.open(read_only=True) as store:
        assert content(store, "embed") == {1}
    assert not spare.exists()


def test_a_refused_open_frees_the_lock(bench: Bench) -> None:
    bench.trained(1).close()
    with pytest.raises(StoreError):
        bench.open(layout={})
    bench.open().close()


def test_a_manifest_is_text_that_a_person_can_read(bench: Bench) -> None:
    bench.trained(1).close()
    first, _, rest = (bench.folder / "MANIFEST").read_text().partition("\n")
    assert first.startswith("offload-store 1 crc32 ")
    assert json.loads(rest)["layout"]["units"][1]["name"] == "model.layers.0@float32"


def test_the_paths_of_two_stores_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
        Bench([path]).trained(1).close()
    with pytest.raises(StoreError, match="two stores of this name"):
        Bench(paths).open()
