"""Configuration files in the style of public recipes train, through each door, as in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recipe_runs import NAMES, NUM_STEPS, SMALL, Result, assert_equal, batches, config_file, model

from offload import OffloadEngine

ROOT = Path(__file__).resolve().parents[2]


def train(engine: OffloadEngine, name: str) -> Result:
    result = Result()
    for step in range(NUM_STEPS):
        for batch in batches(name, step):
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            result.losses.append(loss.item())
        result.norms.append(engine.grad_norm)
    for key, parameter in engine.module.named_parameters():
        result.masters[key] = engine.full_fp32_param(parameter).flatten()
    return result


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_takes_a_file_as_it_is(name, tmp_path):
    with OffloadEngine(model(), config=config_file(name, tmp_path), **SMALL) as engine:
        assert_equal(train(engine, name), name)
        places = engine._parts.ground.blueprint.config.placement
        assert (places.weights, places.state) == {
            "zero3_cpu.json": ("host", "host"),
            "zero3_nvme_optimizer.json": ("auto", "disk"),
        }.get(name, ("disk", "disk"))


SCRIPT = """
import sys
from pathlib import Path
import torch
sys.path[:0] = [{tests!r}, {here!r}]
torch.set_num_threads(1)
from recipe_runs import SMALL, model
from test_recipes import train
from offload import OffloadEngine

if __name__ == "__main__":
    with OffloadEngine(model(), **SMALL) as engine:
        result = train(engine, sys.argv[1])
    torch.save((result.losses, result.norms, result.masters), sys.argv[2])
"""


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
)
def test_the_command_line_takes_a_file_as_it_is(name, tmp_path):
    script, out = tmp_path / "train.py", tmp_path / "result.pt"
    script.write_text(
        SCRIPT.format(tests=str(ROOT / "tests"), here=str(ROOT / "tests/integrations"))
    )
    option = "--config" if "auto" in name else "--deepspeed_config"
    command = ["-m", "offload.cli.train", option, config_file(name, tmp_path), script, name, out]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, cwd=tmp_path, timeout=200,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert_equal(Result(*torch.load(out)), name)


def test_a_model_from_a_folder_takes_a_file_too(tmp_path):
    """Values come from safetensors, settings from the file, and the drive from it as well."""
    name = "zero3_nvme.json"
    (tmp_path / "first").mkdir()
    first = config_file(name, tmp_path / "first")
    with OffloadEngine(model(), config=first, **SMALL) as engine:
        engine.export(tmp_path / "model", dtype="fp32")
    path = config_file(name, tmp_path)
    with OffloadEngine.from_pretrained(
        tmp_path / "model", make=model, config=path, **SMALL
    ) as engine:  # fmt: skip
        assert_equal(train(engine, name), name)
