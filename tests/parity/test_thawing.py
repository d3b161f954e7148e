"""What was frozen when it was wrapped is trained from when it is thawed on, as in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from case import (
    BF16,
    FP32,
    Case,
    Trained,
    assert_same,
    collect_engine,
    collect_oracle,
    engine_step,
    oracle_step,
    same_bits,
)
from torch import nn

from offload import OffloadEngine
from offload.engine import thaw
from offload.errors import BudgetError, StateError, StoreError

FROZEN = ("embed", "blocks.0.", "norm")
CASE = Case(kind=zoo.Small, frozen=FROZEN, num_steps=6, dtype=FP32, clipping=0.5)
THAW_AT = 2


@contextlib.contextmanager
def opened(case: Case, path: Path, **settings: Any) -> Iterator[OffloadEngine]:
    """An engine whose one group holds everything, as `AdamW(model.parameters())` does."""
    path.mkdir(exist_ok=True)
    model = case.model()
    groups = [{"params": list(model.parameters()), **case.groups[0].settings()}]
    with OffloadEngine(model, **case.settings(model, path) | {"params": groups} | settings) as made:
        yield made


def backbone(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        if any(part in name for part in FROZEN):
            yield name, parameter


def set_trained(model: nn.Module, trained: bool) -> None:
    for _, parameter in backbone(model):
        parameter.requires_grad_(trained)


def expected(case: Case, thaw_at: int = THAW_AT, freeze_at: int | None = None) -> Trained:
    """In memory; torch's optimizer has a state of a parameter from its first gradient on."""
    oracle = dataclasses.replace(case, frozen=()).oracle()
    set_trained(oracle.model, False)
    for name, _ in backbone(oracle.model):  # what moved is what was kept of it
        state = oracle.states[name]
        if state.lo.dtype is torch.float32:
            state.lo.copy_(state.hi.float())
        elif state.moves is not FP32:
            state.lo.zero_()
    seen = Trained()
    for step in range(case.num_steps):
        if step in (thaw_at, freeze_at):
            set_trained(oracle.model, step == thaw_at)
        oracle_step(oracle, case, step, seen)
    return collect_oracle(oracle, seen)


def run(
    engine: OffloadEngine, case: Case, steps: range, *, seen: Trained | None = None,
    thaw_at: int = THAW_AT, freeze_at: int | None = None,
) -> Trained:  # fmt: skip
    seen = Trained() if seen is None else seen
    for step in steps:
        if step in (thaw_at, freeze_at):
            set_trained(engine.module, step == thaw_at)
        engine_step(engine, case, step, seen)
    return seen


def everything(engine: OffloadEngine, seen: Trained) -> Trained:
    set_trained(engine.module, True)
    return collect_engine(engine, seen)


PLACES = [
    {"placement": {"weights": weights, "state": state}, "host_memory": "64MiB",
     "device_memory": "64MiB"}
    for weights in ("device", "host", "disk") for state in ("device", "host", "disk")
]  # fmt: skip


@pytest.mark.parametrize("threshold", [0, 100])
@pytest.mark.parametrize("places", PLACES, ids=lambda p: "-".join(p["placement"].values()))
def test_it_trains_as_in_memory_on_every_placement(places, threshold, tmp_path):
    with opened(CASE, tmp_path, param_persistence_threshold=threshold, **places) as engine:
        seen = run(engine, CASE, range(CASE.num_steps))
        assert_same(everything(engine, seen), expected(CASE))


@pytest.mark.parametrize("overlap", ["speculate", "hold"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16], ids=str)
def test_it_trains_as_in_memory_whatever_moves(dtype, accumulation, overlap, tmp_path):
    scaling = (("initial_scale_power", 8),) if dtype is torch.float16 else ()
    case = dataclasses.replace(CASE, dtype=dtype, accumulation=accumulation, scaling=scaling)
    with opened(case, tmp_path, overlap=overlap) as engine:
        seen = run(engine, case, range(case.num_steps))
        assert_same(everything(engine, seen), expected(case))


@pytest.mark.parametrize(
    "settings",
    [
        {"durability": "none"},
        {"durability": "none", "placement": "host", "host_memory": "64MiB"},
        {"durability": "step"},
    ],
    ids=str,
)
def test_it_trains_as_in_memory_whatever_lasts(settings, tmp_path):
    with opened(CASE, tmp_path, **settings) as engine:
        seen = run(engine, CASE, range(CASE.num_steps))
        assert_same(everything(engine, seen), expected(CASE))


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_it_trains_as_in_memory_with_smaller_states(state_dtype, tmp_path):
    case = dataclasses.replace(CASE, dtype=BF16, state_dtype=state_dtype)
    chunk = {"chunk_elems": 1 << 18} if state_dtype == "int8" else {}
    with opened(case, tmp_path, host_memory="64MiB", **chunk) as engine:
        seen = run(engine, case, range(case.num_steps))
        assert_same(everything(engine, seen), expected(case))


@pytest.mark.parametrize("frozen_again", [4, None])
def test_it_may_be_frozen_again(frozen_again, tmp_path):
    with opened(CASE, tmp_path) as engine:
        seen = run(engine, CASE, range(CASE.num_steps), freeze_at=frozen_again)
        assert_same(everything(engine, seen), expected(CASE, freeze_at=frozen_again))


def test_a_plain_loop_over_the_model_trains_it_too(tmp_path):
    with opened(CASE, tmp_path) as engine:
        model, seen = engine.module, Trained()
        for step in range(CASE.num_steps):
            if step == THAW_AT:
                set_trained(model, True)
            loss = model(*CASE.batches(step)[0])
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            seen.losses.append(loss.item())
            seen.norms.append(engine.grad_norm)
        assert_same(everything(engine, seen), expected(CASE))


@pytest.mark.parametrize("order", ["horizontal", "layer"])
def test_train_batch_trains_it_too(order, tmp_path):
    case = dataclasses.replace(CASE, accumulation=2)
    with opened(case, tmp_path) as engine:
        seen = Trained()
        for step in range(case.num_steps):
            if step == THAW_AT:
                set_trained(engine.module, True)
            seen.losses += [x.item() for x in engine.train_batch(case.batches(step), order=order)]
            seen.norms.append(engine.grad_norm)
        assert_same(everything(engine, seen), expected(case))


def test_the_default_group_takes_what_is_thawed(tmp_path):
    case = dataclasses.replace(CASE, clipping=0.0)
    with opened(case, tmp_path, params=None, **case.groups[0].settings()) as engine:
        seen = run(engine, case, range(case.num_steps))
        held = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in engine.module.parameters()}
        assert_same(everything(engine, seen), expected(case))


def test_one_in_no_group_is_refused_by_name_until_it_has_one(tmp_path):
    with CASE.engine(tmp_path) as engine:  # its groups hold what is trained
        run(engine, CASE, range(THAW_AT))
        set_trained(engine.module, True)
        with pytest.raises(StateError, match=r"'embed.weight': expected it in a parameter group"):
            engine(*CASE.batches(THAW_AT)[0])
        thawed = [parameter for _, parameter in backbone(engine.module)]
        engine.optimizer.add_param_group({"params": thawed, **CASE.groups[0].settings()})
        seen = run(engine, CASE, range(THAW_AT, CASE.num_steps))
        assert same_bits(
            everything(engine, seen).masters["embed.weight"], expected(CASE).masters["embed.weight"]
        )


def test_between_micro_steps_it_is_refused_and_nothing_is_lost(tmp_path):
    case = dataclasses.replace(CASE, accumulation=2)
    with opened(case, tmp_path) as engine:
        seen = run(engine, case, range(THAW_AT))
        first, second = case.batches(THAW_AT)
        engine.backward(engine(*first))
        set_trained(engine.module, True)
        with pytest.raises(StateError, match=r"'embed.weight'.*between steps.*zero_grad"):
            engine(*second)
        engine.optimizer.zero_grad()
        run(engine, case, range(THAW_AT, case.num_steps), seen=seen, thaw_at=-1)
        assert_same(everything(engine, seen), expected(case))


def test_what_is_not_thawed_has_no_state_and_is_not_written(tmp_path):
    with opened(CASE, tmp_path) as engine:
        space = engine.plan.space
        run(engine, CASE, range(3), thaw_at=-1)
        assert engine.plan.space == space
        with torch.no_grad():
            set_trained(engine.module, True)
            engine(*CASE.batches(3)[0])  # an evaluation asks for nothing
        assert engine.plan.space == space
        assert len(list(tmp_path.glob("offload-*"))) == 1


def test_only_one_store_is_left(tmp_path):
    with opened(CASE, tmp_path) as engine:
        run(engine, CASE, range(3))
        set_trained(engine.module, False)
        assert len(list(tmp_path.glob("offload-*"))) == 1
    assert len(list(tmp_path.glob("offload-*"))) == 1


def test_units_are_thawed_one_after_the_other(tmp_path):
    """Discriminative unfreezing, from the top down: the store grows more than once."""
    case = dataclasses.replace(CASE, num_steps=7)
    parts = {2: "norm", 3: "blocks.0.", 5: "embed"}
    oracle = dataclasses.replace(case, frozen=()).oracle()
    set_trained(oracle.model, False)
    theirs, ours = Trained(), Trained()
    with opened(case, tmp_path) as engine:
        for step in range(case.num_steps):
            for model in (oracle.model, engine.module):
                for name, parameter in backbone(model):
                    if parts.get(step, "-") in name:
                        parameter.requires_grad_(True)
            oracle_step(oracle, case, step, theirs)
            engine_step(engine, case, step, ours)
            assert len(list(tmp_path.glob("offload-*"))) == 1
        assert_same(everything(engine, ours), collect_oracle(oracle, theirs))


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5])
@pytest.mark.parametrize("named", [{}, {"name": "mine"}], ids=["unnamed", "named"])
def test_it_goes_on_where_it_stopped_whether_thawed_or_not(named, stop_after, tmp_path):
    """The script freezes when it begins, and thaws at its step, before or after it is resumed."""
    with opened(CASE, tmp_path, **named) as engine:
        seen = run(engine, CASE, range(stop_after))
    with opened(CASE, tmp_path, resume=True, **named) as engine:
        assert engine.resumed
        assert engine.global_step == stop_after
        set_trained(engine.module, stop_after > THAW_AT)
        run(engine, CASE, range(stop_after, CASE.num_steps), seen=seen)
        assert_same(everything(engine, seen), expected(CASE))


def test_it_is_trained_where_the_resuming_script_freezes_nothing(tmp_path):
    with opened(CASE, tmp_path, name="mine") as engine:
        seen = run(engine, CASE, range(THAW_AT))
    whole = dataclasses.replace(CASE, frozen=())
    with opened(whole, tmp_path, name="mine", resume=True) as engine:
        assert engine.global_step == THAW_AT
        for step in range(THAW_AT, CASE.num_steps):
            engine_step(engine, CASE, step, seen)
        assert_same(collect_engine(engine, seen), expected(CASE))


@pytest.mark.parametrize("moment", ["made", "filled", "committed", "over"])
@pytest.mark.parametrize("named", [{}, {"name": "mine"}], ids=["unnamed", "named"])
def test_a_process_that_dies_meanwhile_goes_on(named, moment, tmp_path, monkeypatch):
    """What lies on the disk at each moment is copied: that is what is left."""
    store, left = tmp_path / "store", tmp_path / "left"

    def copy_at(name: str, call: Any, *, before: bool = False) -> Any:
        def calling(*args: Any, **kwargs: Any) -> Any:
            if before and name == moment:
                shutil.copytree(store, left)
            result = call(*args, **kwargs)
            if not before and name == moment:
                shutil.copytree(store, left)
            return result

        return calling

    with opened(CASE, store, **named) as engine:
        seen = run(engine, CASE, range(THAW_AT))
        monkeypatch.setattr(thaw, "create_store", copy_at("made", thaw.create_store))
        monkeypatch.setattr(thaw, "regroup_into", copy_at("filled", thaw.regroup_into))
        discard, discards = thaw.lineage.discard_others, thaw.lineage
        monkeypatch.setattr(
            discards, "discard_others", copy_at("committed", copy_at("over", discard), before=True)
        )
        run(engine, CASE, range(THAW_AT, THAW_AT + 1))
    monkeypatch.undo()
    assert len(list(left.glob("offload-*"))) == (1 if moment == "over" else 2)
    with opened(CASE, left, resume=True, **named) as engine:
        assert engine.global_step == THAW_AT
        assert len(list(left.glob("offload-*"))) == 1
        run(engine, CASE, range(THAW_AT, CASE.num_steps), seen=seen)
        assert_same(everything(engine, seen), expected(CASE))


@pytest.mark.parametrize("save_after", [1, 3])
@pytest.mark.parametrize("load_after", [0, 1, 4])
def test_checkpoints_load_whether_they_were_saved_before_or_after(save_after, load_after, tmp_path):
    with opened(CASE, tmp_path / "saved") as engine:
        seen = run(engine, CASE, range(save_after))
        engine.save_checkpoint(tmp_path / "checkpoints").wait()
    with opened(CASE, tmp_path / "loaded") as engine:
        run(engine, CASE, range(load_after))
        path, _ = engine.load_checkpoint(tmp_path / "checkpoints")
        assert path is not None
        assert engine.global_step == save_after
        set_trained(engine.module, save_after > THAW_AT)
        run(engine, CASE, range(save_after, CASE.num_steps), seen=seen)
        assert_same(everything(engine, seen), expected(CASE))


def test_a_checkpoint_of_another_model_does_not_grow_the_store(tmp_path):
    other = dataclasses.replace(CASE, frozen=(), options=(("width", 96),))
    with opened(other, tmp_path / "saved") as engine:
        engine.save_checkpoint(tmp_path / "checkpoints").wait()
    with opened(CASE, tmp_path / "loaded") as engine:
        space = engine.plan.space
        with pytest.raises(StoreError, match="another model"):
            engine.load_checkpoint(tmp_path / "checkpoints")
        assert engine.plan.space == space


def test_a_checkpoint_with_other_groups_does_not_grow_the_store(tmp_path):
    with opened(dataclasses.replace(CASE, frozen=()), tmp_path / "saved") as engine:
        engine.save_checkpoint(tmp_path / "checkpoints").wait()
    with opened(CASE, tmp_path / "loaded") as engine:
        space = engine.plan.space
        groups = engine.optimizer.param_groups
        groups.append({**groups[0], "params": []})
        with pytest.raises(StateError, match="expected 1 parameter groups"):
            engine.load_checkpoint(tmp_path / "checkpoints")
        assert engine.plan.space == space


def test_exports_and_state_dicts_hold_what_was_trained(tmp_path):
    from safetensors.torch import load_file

    with opened(CASE, tmp_path / "store") as engine:
        seen = run(engine, CASE, range(CASE.num_steps))
        found = everything(engine, seen).masters
        engine.export(tmp_path / "out", dtype="fp32")
        state = engine.module.state_dict()
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for name, master in found.items():
        assert same_bits(exported[name].flatten(), master), name
        assert same_bits(state[name].flatten(), master), name


@pytest.mark.parametrize("kind", ["reentrant", "nonreentrant"])
def test_a_checkpointed_forward_trains_it_frozen_thawed_and_frozen_again(kind, tmp_path):
    """A recomputed segment saves a frozen weight itself."""
    frozen = ("blocks.0.up", "blocks.1.", "norm.")  # what reentrant segments need stays trained
    case = dataclasses.replace(CASE, frozen=frozen, options=(("checkpointing", kind),))
    oracle = dataclasses.replace(case, frozen=()).oracle()
    theirs, ours = Trained(), Trained()
    with opened(case, tmp_path) as engine:
        for step in range(case.num_steps):
            for model in (oracle.model, engine.module):
                for name, parameter in model.named_parameters():
                    if any(part in name for part in frozen):
                        parameter.requires_grad_(step in (2, 3, 5))
            oracle_step(oracle, case, step, theirs)
            engine_step(engine, case, step, ours)
        assert_same(everything(engine, ours), collect_oracle(oracle, theirs))


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "adagrad", torch.optim.RAdam])
def test_other_optimizers_begin_its_state_then(optimizer: Any, tmp_path):
    """Equal to a run in which it had state from the beginning, and got no gradient."""
    results = []
    for frozen in (FROZEN, ()):
        case = dataclasses.replace(CASE, frozen=frozen, clipping=0.0)
        settings = {"optimizer": optimizer, "lr": 1e-2, "params": None}
        with opened(case, tmp_path / str(len(frozen)), **settings) as engine:
            set_trained(engine.module, False)
            run(engine, case, range(case.num_steps))
            results.append({n: engine.full_fp32_param(n) for n in engine.module.state_dict()})
    assert all(same_bits(results[0][name], results[1][name]) for name in results[0])


def test_a_budget_that_cannot_hold_its_gradients_is_told_and_training_goes_on(tmp_path):
    frozen = ("embed", "blocks", "norm")  # all but the head
    case = dataclasses.replace(CASE, frozen=frozen)
    with (
        pytest.raises(BudgetError, match="device_memory") as told,
        opened(case, tmp_path, device_memory="1KiB"),
    ):
        pass
    least = int(re.search(r"at least ([\d,]+) bytes", str(told.value))[1].replace(",", ""))
    with opened(case, tmp_path, device_memory=least) as engine:
        run(engine, case, range(THAW_AT))
        set_trained(engine.module, True)
        with pytest.raises(BudgetError, match="device_memory"):
            engine(*case.batches(THAW_AT)[0])
        set_trained(engine.module, False)
        run(engine, case, range(THAW_AT, 4), thaw_at=-1)
