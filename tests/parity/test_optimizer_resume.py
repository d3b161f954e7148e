"""A store belongs to one optimizer; its scalar state goes on where the generation ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_training as twin
from torch import optim

from offload.errors import ConfigError, StateError, StoreError

MID = 3
CASES = {
    "nadam": (optim.NAdam, {"lr": 1e-2}, {"momentum_decay": 0.01}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}, {"momentum": 0.5}),
    "adagrad": (optim.Adagrad, {"lr": 1e-2}, {"lr_decay": 0.1}),
}
BASE = {"lr": 1e-2}


def straight(folder: Path, case: str) -> dict[str, torch.Tensor]:
    with twin.engine(folder, *CASES[case]) as engine:
        twin.train(engine, 0, twin.NUM_STEPS)
        return twin.masters(engine)


def assert_equal(ours, theirs):
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("case", CASES)
def test_resume_goes_on_bit_for_bit(case, tmp_path):
    expected = straight(tmp_path / "straight", case)
    with twin.engine(tmp_path / "cut", *CASES[case]) as engine:
        twin.train(engine, 0, MID)
    with twin.engine(tmp_path / "cut", *CASES[case], resume=True, chunk_elems=2048) as engine:
        assert engine.global_step == MID
        twin.train(engine, MID, twin.NUM_STEPS)
        assert_equal(twin.masters(engine), expected)


@pytest.mark.parametrize("case", ["nadam", "momentum"])
def test_a_checkpoint_goes_on_in_another_store(case, tmp_path):
    expected = straight(tmp_path / "straight", case)
    with twin.engine(tmp_path / "one", *CASES[case]) as engine:
        twin.train(engine, 0, MID)
        engine.save_checkpoint(tmp_path / "saved").wait()
    with twin.engine(tmp_path / "two", *CASES[case], chunk_elems=1 << 20) as engine:
        twin.train(engine, 0, 1)
        engine.load_checkpoint(tmp_path / "saved")
        twin.train(engine, MID, twin.NUM_STEPS)
        assert_equal(twin.masters(engine), expected)


CHILD = """
import os, sys
from pathlib import Path
import torch_training as twin
from test_optimizer_resume import CASES
with twin.engine(Path(sys.argv[1]), *CASES[sys.argv[2]]) as engine:
    twin.train(engine, 0, 4)
    os._exit(9)  # perhaps in the middle of the last step's writes
"""


@pytest.mark.parametrize("case", ["nadam", "momentum"])
def test_a_process_that_dies_loses_one_step_at_most(case, tmp_path):
    expected = straight(tmp_path / "straight", case)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    died = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "cut"), case], env=environment, timeout=120,
        check=False,
    )  # fmt: skip
    assert died.returncode == 9
    with twin.engine(tmp_path / "cut", *CASES[case], resume=True) as engine:
        assert engine.global_step in (3, 4)
        twin.train(engine, engine.global_step, twin.NUM_STEPS)
        assert_equal(twin.masters(engine), expected)


@pytest.mark.parametrize(
    ("made", "opened", "words"),
    [
        (("sgd", BASE), ("adam", BASE), 'optimizer: expected "adam", got "sgd"'),
        (("adam", BASE), ("adamw", BASE), 'optimizer: expected "adamw", got "adam"'),
        (("sgd", BASE), ("sgd", {**BASE, "momentum": 0.9}), r'expected \["momentum_buffer"\]'),
        ((optim.RAdam, BASE), ("adamw", BASE), 'expected "adamw", got "torch.optim.radam.RAdam"'),
    ],
    ids=["sgd-adam", "adam-adamw", "sgd-momentum", "radam-adamw"],
)
def test_another_optimizer_over_a_store_is_an_error_that_names_both(made, opened, words, tmp_path):
    with twin.engine(tmp_path / "store", *made, {}) as engine:
        twin.train(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "saved").wait()
        before = twin.masters(engine)
    with (
        pytest.raises(StoreError, match=words),
        twin.engine(tmp_path / "store", *opened, {}, resume=True),
    ):
        pass
    with (
        twin.engine(tmp_path / "other", *opened, {}) as engine,
        pytest.raises(StoreError, match=words),
    ):
        engine.load_checkpoint(tmp_path / "saved")
    with twin.engine(tmp_path / "store", *made, {}, resume=True) as engine:
        assert_equal(twin.masters(engine), before)


def test_a_checkpoint_of_adam_is_not_imported_into_another_optimizer(tmp_path):
    with (
        twin.engine(tmp_path, "sgd", BASE, {}) as engine,
        pytest.raises(ConfigError, match="exp_avg_sq, got sgd with none"),
    ):
        engine.load_deepspeed(tmp_path / "zero")


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adagrad, optim.AdamW, optim.RAdam])
def test_the_state_dict_has_torchs_keys(cls, tmp_path):
    param = torch.nn.Parameter(torch.zeros(2))
    theirs = cls([param]).state_dict()
    with twin.engine(tmp_path, cls, {}, {}) as engine:
        twin.train(engine, 0, 1)
        ours = engine.optimizer.state_dict()
        assert ours.keys() == theirs.keys()
        assert ours["param_groups"][0].keys() == theirs["param_groups"][0].keys()
        ours["param_groups"][0]["lr"] = 0.5
        engine.optimizer.load_state_dict(ours)
        assert engine.optimizer.param_groups[0]["lr"] == 0.5
        with pytest.raises(StateError, match=r"engine\.load_checkpoint"):
            engine.optimizer.load_state_dict({**ours, "state": {0: {"step": 1}}})
