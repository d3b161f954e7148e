"""State in bf16 and eight bits: an engine equals memory bit for bit, however it runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from case import (
    Case,
    assert_learned,
    assert_offloaded,
    assert_same,
    collect_engine,
    engine_step,
    train_in_memory,
    train_offloaded,
)
from case import Trained as Training
from oracle import Group

from offload import OffloadEngine, kernels
from offload.errors import ConfigError, StoreError

C = 262144  # elements: the least chunk of eight-bit state
WIDE = Case(
    options=(("width", 352), ("num_blocks", 2)),
    batch_options=(("size", 1), ("seq", 5)),
    groups=(Group("norm", lr=3e-3, weight_decay=0.0), Group(lr=1e-2)),
    clipping=0.5,
)
CASES = {dtype: dataclasses.replace(WIDE, state_dtype=dtype) for dtype in ("bf16", "int8")}
SETTINGS = {"chunk_elems": C, "host_memory": "48MiB", "device_memory": "48MiB"}
VARIANTS = ("portable", "avx2", "avx512", "neon")


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.mark.parametrize(
    "changed",
    [
        {"overlap": "speculate"},
        {"overlap": "hold", "chunk_elems": 2 * C},
        {"chunk_elems": 4 * C, "host_memory": "96MiB"},
        {"durability": "none"},
        {"param_persistence_threshold": 40_000},  # vectors, embedding and head stay in memory
        {"host_memory": "30MiB"},  # gradients are spilled
    ],
    ids=lambda changed: "-".join(map(str, changed.values())),
)
def test_training_equals_memory(case: Case, changed: dict[str, Any], tmp_path: Path) -> None:
    with case.engine(tmp_path, **SETTINGS | changed) as engine:
        trained = train_offloaded(engine, case)
        assert_offloaded(engine)
    assert_learned(case, trained)
    assert_same(trained, train_in_memory(case))


@pytest.mark.parametrize("host_memory", ["64MiB", "96MiB"])
def test_state_that_stays_in_memory_equals_memory(
    case: Case, host_memory: str, tmp_path: Path
) -> None:
    settings = SETTINGS | {"host_memory": host_memory, "placement": "auto"}
    with case.engine(tmp_path, overlap="speculate", **settings) as engine:
        assert engine._parts.ground.blueprint.placement.resident
        assert_same(train_offloaded(engine, case), train_in_memory(case))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_the_same_bits(case: Case, variant: str, tmp_path: Path) -> None:
    if variant not in kernels.supported():
        pytest.skip(f"this machine cannot run {variant}")
    in_memory = train_in_memory(case)
    kernels.select(variant)
    try:
        with case.engine(tmp_path, **SETTINGS) as engine:
            assert_same(train_offloaded(engine, case), in_memory)
    finally:
        kernels.select(None)


def test_accumulated_gradients_and_bf16_state_in_small_chunks(tmp_path: Path) -> None:
    case = Case(state_dtype="bf16", accumulation=2, clipping=0.5)
    with case.engine(tmp_path) as engine:
        trained = train_offloaded(engine, case)
    assert_learned(case, trained)
    assert_same(trained, train_in_memory(case))


def test_a_checkpoint_goes_on_in_other_chunks_and_units(case: Case, tmp_path: Path) -> None:
    trained = Training()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    with case.engine(tmp_path / "a", **SETTINGS) as engine:
        for step in range(2):
            engine_step(engine, case, step, trained)
        engine.save_checkpoint(tmp_path / "ckpt").wait()
    changed = {"chunk_elems": 2 * C, "param_persistence_threshold": 40_000}
    with case.engine(tmp_path / "b", **SETTINGS | changed) as engine:
        assert engine.load_checkpoint(tmp_path / "ckpt")[0] is not None
        for step in range(2, case.num_steps):
            engine_step(engine, case, step, trained)
        collect_engine(engine, trained)
    assert_same(trained, train_in_memory(case))


def test_a_store_resumes_in_other_chunks(case: Case, tmp_path: Path) -> None:
    trained = Training()
    with case.engine(tmp_path, **SETTINGS) as engine:
        for step in range(2):
            engine_step(engine, case, step, trained)
    with case.engine(tmp_path, **SETTINGS | {"chunk_elems": 4 * C, "resume": True}) as engine:
        assert engine.resumed
        for step in range(2, case.num_steps):
            engine_step(engine, case, step, trained)
        collect_engine(engine, trained)
    assert_same(trained, train_in_memory(case))


def test_edited_weights_leave_state_as_it_is(case: Case, tmp_path: Path) -> None:
    with case.engine(tmp_path, **SETTINGS) as engine:
        engine_step(engine, case, 0, Training())
        before = collect_engine(engine, Training())
        with engine.gathered("blocks.0.up.weight"):
            dict(engine.module.named_parameters())["blocks.0.up.weight"].data.mul_(2)
        after = collect_engine(engine, Training())
    assert not before.masters["blocks.0.up.weight"].equal(after.masters["blocks.0.up.weight"])
    for role in ("exp_avgs", "exp_avg_sqs"):
        for name, moment in getattr(before, role).items():
            assert moment.equal(getattr(after, role)[name])


def test_another_format_over_a_store_is_refused(tmp_path: Path) -> None:
    with CASES["bf16"].engine(tmp_path, **SETTINGS):
        pass
    for dtype, told in (("fp32", "float32"), ("int8", "int8")):
        model = WIDE.model()
        settings = dataclasses.replace(WIDE, state_dtype=dtype).settings(model, tmp_path)
        with pytest.raises(StoreError, match=f'state_dtype: expected "{told}", got "bfloat16"'):
            OffloadEngine(model, **settings | SETTINGS | {"resume": True})


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    model = WIDE.model()
    for changed, told in (
        ({"state_dtype": "int8", "chunk_elems": C + 4096}, "multiple of 262144 with state_dtype"),
        ({"state_dtype": "fp8"}, "state_dtype: expected one of fp32, bf16, int8, got 'fp8'"),
        ({"state_dtype": "bf16", "optimizer": torch.optim.RAdam}, "expected 'fp32' with"),
    ):
        with pytest.raises(ConfigError, match=told):
            OffloadEngine(model, nvme_path=tmp_path, **changed)
