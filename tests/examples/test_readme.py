"""What the README shows works: the quick start runs, every target, command and path exists."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
import torch
from torch import nn

from offload import OffloadEngine
from offload.cli import bench, main, plan

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


class Regression(nn.Module):
    """Two layers that are too large to stay on the device, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = self.layers[0].weight
        return nn.functional.mse_loss(self.layers(x.to(weight.dtype)).float(), y)


def test_the_quick_start_trains(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    text = re.sub(r"model = \.\.\.", "model = Regression()", code[1])
    text = text.replace("/mnt/nvme", str(tmp_path)).replace('"16GiB"', '"64MiB"')
    text = text.replace('"8GiB"', '"64MiB"').replace("3e-4", "3e-3")
    torch.manual_seed(0)
    x = torch.randn(16, 512)
    losses: list[float] = []

    def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(x, 0.1 * x)] * 24  # six steps of four micro-steps

    def record(engine: object) -> None:
        losses.append(names["loss"].item())  # type: ignore[attr-defined]

    names = {"Regression": Regression, "batches": batches(), "record": record}
    text = text.replace("    engine.step() ", "    engine.step(); record(engine) ")
    exec(compile(text, "README.md", "exec"), names)
    assert len(losses) == 24
    assert losses[-1] < 0.9 * losses[0]


def test_every_make_target_and_path_exists() -> None:
    targets = set(re.findall(r"`make ([a-z-]+)`", README)) | {"demo", "test"}
    rules = (ROOT / "Makefile").read_text()
    assert not [name for name in targets if not re.search(rf"^{name}:", rules, re.MULTILINE)]
    paths = re.findall(r"`((?:aio|csrc|offload|tests|benchmarks|examples)/[^` ]*)`", README)
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize(
    ("command", "group"), [("offload", main.command), ("offload-bench", bench.command)]
)
def test_every_command_exists(command: str, group: click.Group) -> None:
    words = set(re.findall(rf"^{command} ([a-z]+)", README, re.MULTILINE))
    assert words
    assert words <= set(group.commands)


def test_every_option_of_a_command_exists() -> None:
    for line in re.findall(r"^offload ([a-z]+ .*?)(?: {2,}#.*)?$", README, re.MULTILINE):
        name, *words = line.split()
        command = plan.choose(words) if name == "plan" else main.command.commands[name]
        known = {text for option in command.params for text in option.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_the_lines_about_checkpoints_work(tmp_path: Path) -> None:
    block = next(b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "track(" in b)
    lines = [line for line in block.splitlines() if "load_deepspeed" not in line]
    text = "\n".join(lines).replace('"/mnt/nvme"', repr(str(tmp_path)))
    text = text.replace(", ...)", ', device="cpu", host_memory="64MiB", durability="step")')
    text = text.replace('"ckpt"', repr(str(tmp_path / "ckpt")))
    text = text.replace('"out"', repr(str(tmp_path / "out")))
    text = text.replace("reader = OffloadEngine(model,", "reader = OffloadEngine(Regression(),")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    names = {
        "OffloadEngine": OffloadEngine, "Regression": Regression, "model": Regression(),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "sampler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
    }  # fmt: skip
    exec(compile(text, "README.md", "exec"), names)
    engine, reader = names["engine"], names["reader"]
    assert names["client_state"] == {"epoch": 3}
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert torch.equal(
        reader.full_fp32_param("layers.0.weight"), engine.full_fp32_param("layers.0.weight")
    )
    reader.close()
    engine.close()
