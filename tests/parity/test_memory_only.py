"""durability="none": what stays in memory is not written by steps, and nothing shows it."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from case import (
    Case,
    Trained,
    assert_same,
    collect_engine,
    engine_step,
    oracle_step,
    train_in_memory,
    train_offloaded,
)
from safetensors.torch import load_file

from aio.faults import Fault, Faults
from offload import OffloadEngine
from offload.errors import StateError, StoreError
from offload.store import checksum
from offload.store.store import Store

CASE = Case(num_steps=4, clipping=0.5)
NONE = {"durability": "none", "placement": "auto"}
EVERYTHING = {**NONE, "host_memory": "64MiB"}
SOME = {**NONE, "host_memory": "700KiB"}  # weights, and the state of some units
SMALL_TOO = {**EVERYTHING, "param_persistence_threshold": 1000}


AHEAD = {**EVERYTHING, "overlap": "speculate"}


@pytest.fixture(
    params=[EVERYTHING, SOME, SMALL_TOO, AHEAD], ids=["everything", "some", "small too", "ahead"]
)
def settings(request):
    return request.param


def open_engine(folder, settings, *, resume: bool | None = None) -> OffloadEngine:
    model = CASE.model()
    return OffloadEngine(model, **CASE.settings(model, folder) | settings, resume=resume)


def train(engine, first: int, stop: int) -> Trained:
    trained = Trained()
    for step in range(first, stop):
        engine_step(engine, CASE, step, trained)
    return trained


def masters_after(num_steps: int) -> dict[str, torch.Tensor]:
    oracle = CASE.oracle()
    for step in range(num_steps):
        oracle_step(oracle, CASE, step, Trained())
    return {name: state.master for name, state in oracle.states.items()}


def last_state() -> Trained:
    """Of the whole case, without its losses and norms."""
    whole = train_in_memory(CASE)
    return Trained([], [], [], whole.masters, whole.exp_avgs, whole.exp_avg_sqs)


def test_training_equals_memory(settings, tmp_path):
    with CASE.engine(tmp_path, **settings) as engine:
        unwritten = engine.plan.placement.unwritten
        assert unwritten
        assert_same(train_offloaded(engine, CASE), train_in_memory(CASE))


def test_with_everything_in_memory_steps_touch_no_disk_and_close_writes_it_once(tmp_path):
    engine = open_engine(tmp_path, SMALL_TOO)
    metrics = engine.metrics
    before = (metrics.total_read_bytes, metrics.total_write_bytes)
    train(engine, 0, 4)
    engine.close()
    saved = {key: value for key, value in metrics.write_bytes.items() if value}
    assert metrics.total_read_bytes == before[0]
    assert set(saved) == {
        f"save.{role}" for role in ("param", "master_lo", "exp_avg", "exp_avg_sq")
    }
    state = sum(
        unit.role_bytes(role)
        for unit in engine._parts.ground.blueprint.units
        for role in unit.roles
    )
    assert sum(saved.values()) == pytest.approx(state, rel=0.1)  # padded to whole pages


def test_a_closed_engine_is_resumed_bit_for_bit(settings, tmp_path):
    with open_engine(tmp_path, settings) as engine:
        train(engine, 0, 2)
    with open_engine(tmp_path, settings, resume=True) as engine:
        assert engine.global_step == 2
        train(engine, 2, 4)
        ours = collect_engine(engine, Trained())
    assert_same(ours, last_state())


def test_what_is_closed_passes_verification(settings, tmp_path):
    with open_engine(tmp_path, settings) as engine:
        train(engine, 0, 3)
        name = engine._parts.ground.store.manifest.name
    with Store.open([tmp_path], name, read_only=True) as store:
        assert all(checksum.is_sealed(store.committed, unit) for unit in store.committed.sides)
        found = [checksum.damage(store.files, store.committed, u) for u in store.committed.sides]
        assert [list(problems) for problems in found] == [[]] * len(found)


def test_a_checkpoint_holds_the_step_and_training_goes_on(settings, tmp_path):
    with open_engine(tmp_path, settings) as engine:
        train(engine, 0, 2)
        saved = collect_engine(engine, Trained())
        engine.save_checkpoint(tmp_path / "saved").wait()
        after = train(engine, 2, 4)
        moved = collect_engine(engine, Trained())
        engine.load_checkpoint(tmp_path / "saved")
        assert_same(collect_engine(engine, Trained()), saved)
        again = train(engine, 2, 4)
        assert (again.losses, again.norms) == (after.losses, after.norms)
        assert_same(collect_engine(engine, Trained()), moved)


def test_an_export_and_a_state_dict_give_the_step(settings, tmp_path):
    with open_engine(tmp_path, settings) as engine:
        train(engine, 0, 3)
        seen = engine.module.state_dict()
        engine.export(tmp_path / "out", dtype="fp32")
        exported = load_file(tmp_path / "out" / "model.safetensors")
        train(engine, 3, 4)
        assert_same(collect_engine(engine, Trained()), last_state())
    masters = masters_after(3)
    for name, master in masters.items():
        assert torch.equal(exported[name].flatten(), master), name
        assert torch.allclose(seen[name].float().flatten(), master, rtol=1e-2), name


def test_an_edit_is_kept_and_so_is_everything_beside_it(settings, tmp_path):
    name = "blocks.1.up.weight"
    with open_engine(tmp_path, settings) as engine:
        train(engine, 0, 2)
        before = collect_engine(engine, Trained())
        with engine.gathered(name):
            engine.module.get_parameter(name).data.mul_(0.5)
        after = collect_engine(engine, Trained())
        others = {key: value for key, value in before.masters.items() if key != name}
        assert all(torch.equal(after.masters[key], value) for key, value in others.items())
        assert not torch.equal(after.masters[name], before.masters[name])
        train(engine, 2, 3)
        trained = collect_engine(engine, Trained())
    with open_engine(tmp_path, settings, resume=True) as engine:
        assert_same(collect_engine(engine, Trained()), trained)


@pytest.mark.parametrize("saves", [False, True])
def test_a_killed_process_goes_back_to_what_was_written_last(saves, tmp_path):
    killed(tmp_path, EVERYTHING, saves=saves)
    with open_engine(tmp_path, EVERYTHING, resume=True) as engine:
        first = engine.global_step
        assert first == (2 if saves else 0)
        train(engine, first, 4)
        assert_same(collect_engine(engine, Trained()), last_state())


def test_a_killed_process_that_wrote_in_place_must_start_anew(tmp_path):
    killed(tmp_path, SOME, saves=False)
    with pytest.raises(StoreError, match='durability="none" and was killed'):
        open_engine(tmp_path, SOME, resume=True)


def killed(folder, settings, *, saves: bool) -> None:
    """A process that trains on `folder` and dies between two steps."""
    script = "import sys, json, test_memory_only as own; own.die(*json.loads(sys.argv[1]))"
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    subprocess.run(
        [sys.executable, "-c", script, json.dumps([str(folder), settings, saves])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=True, timeout=120,
    )  # fmt: skip


def die(folder: str, settings: dict[str, str], saves: bool) -> None:
    engine = open_engine(Path(folder), settings)
    train(engine, 0, 2)
    if saves:
        engine.save_checkpoint(Path(folder) / "saved").wait()
        train(engine, 2, 3)
    os._exit(0)


def test_a_store_with_two_sides_is_refused(tmp_path):
    with open_engine(tmp_path, {"durability": "process"}) as engine:
        train(engine, 0, 2)
    with pytest.raises(StoreError, match="expected one side for durability"):
        open_engine(tmp_path, EVERYTHING, resume=True)
    with open_engine(tmp_path, {"durability": "process"}, resume=True) as engine:
        train(engine, 2, 4)
        assert_same(collect_engine(engine, Trained()), last_state())


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_lost_step_is_neither_saved_nor_read(settings, tmp_path):
    engine = open_engine(tmp_path, settings)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path / "saved").wait()
    train(engine, 1, 2)
    engine.optimizer.param_groups[0]["lr"] = 1e39  # too large for float32
    train(engine, 2, 3)
    with pytest.raises(StateError, match="the generation before it is lost"):
        engine.save_checkpoint(tmp_path / "saved")
    for action in (
        lambda: engine.save_checkpoint(tmp_path / "saved"),
        lambda: engine.export(tmp_path / "out"),
        lambda: engine.full_fp32_param("head.weight"),
        engine.module.state_dict,
        engine.close,
    ):
        with pytest.raises(StoreError, match="The last save is generation 1:"):
            action()
    assert [path.name for path in (tmp_path / "saved").glob("global*")] == ["global_step1"]
    assert not list(tmp_path.glob("out/*"))


def test_a_save_that_fails_is_told_and_nothing_more_is_written(tmp_path):
    engine = open_engine(tmp_path, {**EVERYTHING, "aio_backend": "faults"})
    train(engine, 0, 3)
    faults = Faults(engine._parts.ground.queue)
    before = len(faults.log())
    faults.inject(Fault.error(before, errno.EIO))
    with pytest.raises(StoreError, match="what memory alone holds cannot be saved"):
        engine.save_checkpoint(tmp_path / "saved")
    blocks = len(faults.log()) - before
    assert blocks > len(CASE.model().blocks)  # the others were waited for
    with pytest.raises(StoreError, match="a transfer failed"):
        engine.save_checkpoint(tmp_path / "saved")
    assert len(faults.log()) - before == blocks
    with pytest.raises(StoreError):
        engine.close()


def test_a_step_whose_scheduler_has_not_stepped_is_kept(settings, tmp_path, caplog):
    def stop_after_a_step(engine) -> None:
        with engine:
            for step in range(3):
                engine_step(engine, CASE, step, Trained())
                if step == 2:
                    raise SystemExit(143)
                scheduler.step()

    engine = open_engine(tmp_path, settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda epoch: 1.0)
    engine.track(scheduler=scheduler)
    with pytest.raises(SystemExit):
        stop_after_a_step(engine)
    assert "step to generation 3 is kept" in caplog.text
    with open_engine(tmp_path, settings, resume=True) as engine:
        assert engine.global_step == 3
        train(engine, 3, 4)
        assert_same(collect_engine(engine, Trained()), last_state())
