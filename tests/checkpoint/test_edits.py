"""Edits through `gathered` are generations too: they meet updates, checkpoints and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_run import Run, assert_equal, differences, running, state_of

TRAINED, FROZEN = "blocks.0.qkv.weight", "blocks.1.up.weight"


def edit(run: Run, name: str, factor: float = 1.5) -> None:
    parameter = run.engine.module.get_parameter(name)
    with run.engine.gathered(parameter), torch.no_grad():
        parameter.mul_(factor)


def edited_between(path: Path, name: str, **settings: Any) -> dict[str, Any]:
    """An edit between backward and step, and steps after it."""
    with running(path, gradient_clipping=0.0, **settings) as run:
        run.steps(2)
        run.engine.backward(run.engine(*run.epochs.next()))
        edit(run, name)
        run.engine.step()
        run.scheduler.step()
        run.steps(3)
        return state_of(run)


@pytest.mark.parametrize("name", [TRAINED, FROZEN])
def test_an_edit_between_backward_and_step_counts_whatever_was_updated_already(
    tmp_path: Path, name: str
) -> None:
    held = edited_between(tmp_path / "held", name, overlap="hold")
    with running(tmp_path / "plain", gradient_clipping=0.0) as run:
        run.steps(6)
        assert f"{name}.master" in differences(state_of(run), held)
    assert_equal(edited_between(tmp_path / "ahead", name, overlap="speculate"), held)
    assert_equal(edited_between(tmp_path / "none", name, durability="none"), held)


@pytest.mark.parametrize("name", [TRAINED, FROZEN])
@pytest.mark.parametrize("durability", ["process", "none"])
def test_an_edit_survives_steps_restarts_and_checkpoints(
    tmp_path: Path, name: str, durability: str
) -> None:
    settings = {"durability": durability}
    with running(tmp_path / "whole", **settings) as run:
        run.steps(1)
        edit(run, name)
        run.engine.save_checkpoint(tmp_path / "ck")
        run.steps(4)
        whole = state_of(run)
    with running(tmp_path / "parts", **settings) as run:
        run.steps(1)
        edit(run, name)
    for num_steps in (0, 1, 2, 1):  # each side of each unit is written after a restart
        with running(tmp_path / "parts", seed=5, resume=True, **settings) as run:
            run.steps(num_steps)
    with running(tmp_path / "parts", seed=5, resume=True, **settings) as run:
        assert_equal(state_of(run), whole)
        run.engine.load_checkpoint(tmp_path / "ck")
        run.steps(4)
        assert_equal(state_of(run), whole)
