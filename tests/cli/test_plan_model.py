"""`offload plan MODEL`: what it tells, what it refuses, and that it takes what it is given."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from offload.cli import plan, plan_model, probe
from offload.cli.largest import Largest, Limits, _search, largest, obstacle
from offload.cli.models import expert_share, make, num_params_of, products_of
from offload.config import make_config
from offload.engine.blueprint import plan as decide
from offload.errors import BudgetError, ConfigError
from offload.optim.choice import choose
from offload.profile import FILE_NAME, Profile, encode, load
from offload.runtime.discover import discover
from offload.schedule.generic import DecoderShape
from offload.schedule.placement import place

MODULE = """
import torch
from torch import nn

def make():
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])

def fails():
    raise ValueError("no data here")

def number():
    return 7

limit = 3
"""
RATE = 50e9
DRIVE = Profile(
    path="/drive", date="2026-11-01T00:00:00", backend="threads", block_bytes=1 << 20,
    read_depth=8, write_depth=8, read_bytes_per_s=2e9, write_bytes_per_s=1e9, mixed_bytes_per_s=2e9,
)  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is measured: every rate is the same; returns the names that were asked for."""
    asked: list[str] = []
    real = probe.Wanted.names

    def names(wanted: probe.Wanted) -> dict[str, Callable[[], float]]:
        def rate(name: str) -> Callable[[], float]:
            return lambda: asked.append(name) or RATE

        return {name: rate(name) for name in real(wanted)}

    monkeypatch.setattr(probe.Wanted, "names", names)
    return asked


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_model.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "a_model", raising=False)
    return tmp_path


def run(*arguments: object) -> None:
    texts = [str(argument) for argument in arguments]
    plan.choose(texts).main(texts, standalone_mode=False)


def record(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    capsys.readouterr()
    run(*arguments, "--json")
    return json.loads(capsys.readouterr().out)


# --- through the command line itself


def command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "offload.cli.main", "plan", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, cwd=cwd,
    )  # fmt: skip


def test_a_number_of_parameters_is_planned_with_measured_speeds(tmp_path: Path) -> None:
    found = command("10M", "--tokens", 64, "--host-memory", "64MiB", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    for told in (
        "generic decoder of", "exp_avg_sq", "16.00", "blocks.0", "bound ", "compute",
        "s a step predicted", "GFLOP/s", "(measured now)", "until 600 TB are written (assumed",
        "least   host", "billion parameters on this machine, limited by", "stays   ",
        "drives' rates are not known",
    ):  # fmt: skip
        assert told in found.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing"], "expected a folder or config.json of Hugging Face, module:function"),
        (["--nvme", ".", "missing.py"], "expected a Python file, got nothing there"),
        ([], "Missing argument 'MODEL'"),
        (["1000"], "expected 5,000,000 to"),
        (["7B", "--host-memory", "4KiB"], "host_memory is too small: expected at least"),
        (["7B", "--device-memory", "4KiB"], "device_memory is too small: expected at least"),
        (["7B", "--dtype", "int4"], "'int4' is not one of"),
        (["7B", "--micro-steps", "4", "--tokens", "3"], "expected at least one for each of 4"),
        (["7B", "--optimizer", "magic"], "optimizer: expected one of"),
        (["7B", "--nvme", "absent"], "expected a folder, got nothing there"),
        (["7B", "--profile", "absent"], "profile absent"),
        (["7B", "more"], "unexpected extra argument"),
        (["."], "expected a config.json"),
        (["nowhere:make"], "No module named 'nowhere'"),
        (["a_model:absent"], "has no attribute 'absent'"),
        (["a_model:limit"], "expected a function, got int"),
        (["a_model:number"], "expected a function that returns a torch.nn.Module, got int"),
        (["a_model:fails"], "without arguments, got ValueError: no data here"),
    ],
)
def test_a_mistake_is_one_line_and_status_two(
    arguments: list[str], told: str, here: Path, capsys: pytest.CaptureFixture[str], quick: object
) -> None:
    from offload.cli import shell

    with pytest.raises(SystemExit) as stop:
        shell.parse(plan.choose(arguments), arguments)
    found = capsys.readouterr().err
    assert stop.value.code == 2
    assert told in found
    assert len(found.splitlines()) == 1


# --- what is taken for what


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7 * 10**9), ("1.5b", 1_500_000_000), ("350M", 350 * 10**6), ("2e9", None),
        ("123456789", 123456789), ("B", None), ("-7B", None), ("7GB", None), ("0.5T", 5 * 10**11),
    ],
)  # fmt: skip
def test_numbers_of_parameters(text: str, count: int | None) -> None:
    assert num_params_of(text) == count


def test_the_argument_decides_what_is_planned(here: Path) -> None:
    (here / "config.json").write_text("{}")
    (here / "script").write_text("")
    for arguments in (["a_model.py"], ["--nvme", ".", "script", "7B"], ["absent.py", "--json"]):
        assert plan.choose(arguments) is plan.script
    for arguments in (
        ["7B"], ["config.json"], ["."], ["a_model:make"], ["--host-memory", "a_model.py", "7B"],
        ["--nvme", "a_model.py"], ["--help"], [],
    ):  # fmt: skip
        assert plan.choose(arguments) is plan_model.command


def test_what_a_function_returns_is_planned_without_its_weights(
    here: Path, capsys: pytest.CaptureFixture[str], quick: object
) -> None:
    made = make("a_model:make")
    assert all(parameter.is_meta for parameter in made.model.parameters())
    found = record(capsys, "a_model:make", "--tokens", 8)
    assert found["num_params"] == 3 * 65 * 64
    assert any("attention is left out" in note for note in found["notes"])
    assert found["step"]["flops"] == 6 * 3 * 64 * 64 * 8


def test_a_hugging_face_config_is_planned(
    here: Path, capsys: pytest.CaptureFixture[str], quick: object
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=100, max_position_embeddings=32, tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(here / "llama")
    real = transformers.LlamaForCausalLM(config)
    for name in ("llama", "llama/config.json"):
        found = record(capsys, name, "--tokens", 64)
        assert found["num_params"] == sum(p.numel() for p in real.parameters())
        assert found["step"]["seq"] == 32
    blocks = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    attention = 2 * 2 * 64 * 32
    assert found["step"]["flops"] == 3 * 64 * (2 * (blocks + 100 * 64) + attention)


def test_without_transformers_a_config_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="needs transformers, which is not installed"):
        make(".")


def test_a_token_meets_some_of_the_experts() -> None:
    assert expert_share({"num_experts_per_tok": 2, "num_local_experts": 8}) == 0.25
    assert expert_share({"num_experts_per_tok": 2}) == 1
    assert expert_share({}) == 1


class Tied(nn.Module):
    """An embedding that looks up, one whose weight is a head too, a convolution, experts."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = nn.Embedding(100, 16)
        self.tied = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.tied.weight
        self.conv = nn.Conv2d(3, 8, 2)
        self.experts = nn.Module()
        self.experts.fused = nn.Parameter(torch.zeros(4, 16, 32))
        self.config = type("Config", (), {"num_experts_per_tok": 1, "num_experts": 4})()


def test_products_are_what_tokens_are_multiplied_with() -> None:
    model = Tied()
    found = discover(model, persistence_threshold=0)
    flops = sum(product.forward_flops for product in products_of(model, found.units))
    assert flops == 2 * (50 * 16 + 8 * 3 * 4 + 16 * 32)


# --- what is told


def test_bytes_are_those_of_the_engine_that_would_be_made(
    here: Path, capsys: pytest.CaptureFixture[str], quick: object
) -> None:
    found = record(capsys, "10M", "--host-memory", "32MiB", "--micro-steps", 2, "--order", "layer")
    settings = {
        "nvme_path": here, "host_memory": "32MiB", "gradient_accumulation_steps": 2,
        "order": "layer",
    }  # fmt: skip
    blueprint = decide(make("10M").model, make_config(settings), choose("adamw", None, {}).rule)
    assert found["host"]["total"] == blueprint.placement.total_bytes
    assert found["device"]["budget"] == blueprint.device_memory
    assert found["step"]["order"] == "layer"
    once = sum(unit.num_elems * 2 for unit in blueprint.found.units)
    assert found["step"]["read_by"]["forward.param"] <= once * 1.01
    assert found["endurance"]["steps"] == pytest.approx(600e12 / found["step"]["written"])


def test_the_least_budgets_work_and_less_does_not(
    here: Path, capsys: pytest.CaptureFixture[str], quick: object
) -> None:
    least = record(capsys, "10M")["least"]
    host, device = least["host_least"], least["device_least"]
    record(capsys, "10M", "--host-memory", host, "--device-memory", device)
    for option, value in (("--host-memory", host), ("--device-memory", device)):
        with pytest.raises(SystemExit):
            run("10M", option, value - 1)
    held = record(capsys, "10M", "--host-memory", least["host_without_spilling"])
    assert held["disk"]["spilled"] == 0
    resident = record(capsys, "10M", "--host-memory", least["host_without_reading"])
    assert resident["step"]["read"] == 0


@pytest.mark.parametrize("state_dtype", ["fp32", "int8"])
def test_the_least_host_budget_is_the_one_that_an_error_names(state_dtype: str) -> None:
    settings = {"nvme_path": ".", "state_dtype": state_dtype}
    blueprint = decide(make("10M").model, make_config(settings), choose("adamw", None, {}).rule)
    found, formats = blueprint.found, blueprint.formats
    least = plan_model._budgets(blueprint).host_least
    with pytest.raises(BudgetError, match=f"host_memory={least} or more"):
        place(found.units, found.persistent, formats, host_memory=least - 1)
    assert place(found.units, found.persistent, formats, host_memory=least).total_bytes <= least


def test_a_profile_gives_the_drive_its_time_and_keeps_what_was_measured(
    here: Path, capsys: pytest.CaptureFixture[str], quick: list[str]
) -> None:
    (here / FILE_NAME).write_text(encode(DRIVE))
    # Both budgets: what is free at the moment would decide what stays, and so the time.
    asked = ("10M", "--nvme", here, "--host-memory", "8MiB", "--device-memory", "256MiB")
    first = record(capsys, *asked)
    assert not [note for note in first["notes"] if "not kept" in note]
    assert quick
    assert first["speeds"]["from"] == "measured now"
    written = first["step"]["written"]
    assert first["step"]["terms"]["disk_write"] == pytest.approx(written / 1e9)
    assert set(load(here).measured) == set(quick)
    quick.clear()
    again = record(capsys, *asked)
    assert not quick
    assert again["speeds"]["from"] == "from the profile"
    assert again["step"]["seconds"] == first["step"]["seconds"]
    assert again["times"] == first["times"]
    record(capsys, *asked, "--measure")
    assert quick


def test_with_a_profile_the_times_of_all_transfers_are_told(
    here: Path, capsys: pytest.CaptureFixture[str], quick: object
) -> None:
    options = ("10M", "--nvme", here, "--host-memory", "32MiB")
    assert record(capsys, *options)["times"] is None
    (here / FILE_NAME).write_text(encode(DRIVE))
    found = record(capsys, *options)
    times, step = found["times"], found["step"]
    moved = {kind: 0 for kind in ("forward", "backward", "state", "write", "spill", "spilled")}
    for each in times["transfers"]:
        moved[each["kind"]] += each["num_bytes"]
        assert each["start_s"] < each["end_s"] <= each["use_s"] + 1e-9
    assert moved["write"] + moved["spill"] == step["written"]
    assert sum(moved.values()) == sum(step["read_by"].values()) + step["written"]
    assert times["step_s"] >= max(step["terms"]["disk_read"], step["terms"]["disk_write"]) - 1e-9
    assert set(times["slots"]) == {"forward", "backward", "update"}
    run(*options)
    told = capsys.readouterr().out
    assert "the next backward at" in told
    assert "slots that keep to them" in told


def test_an_embedding_takes_no_time_of_forward_unless_a_head_shares_it(
    here: Path, capsys: pytest.CaptureFixture[str], quick: object
) -> None:
    (here / "embeds.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 4096), nn.Linear(4096, 64))"
    )
    rate = 1e13
    fast = replace(DRIVE, read_bytes_per_s=rate, write_bytes_per_s=rate, mixed_bytes_per_s=2 * rate)
    (here / FILE_NAME).write_text(encode(fast))
    for model, share in (("embeds:make", 0.0), ("10M", 0.5)):
        found = record(capsys, model, "--nvme", here, "--tokens", 2048)
        written = [each for each in found["times"]["transfers"] if each["kind"] == "write"]
        uses = sorted(each["use_s"] for each in written if each["unit"] != "persistent")
        begin = found["times"]["forward_s"]
        assert uses[0] == pytest.approx(begin, rel=0.01)
        first = (uses[1] - begin) / (found["times"]["step_s"] - begin)
        assert first > share if share else first < 0.05


def test_rates_in_a_profile_are_checked(here: Path) -> None:
    (here / FILE_NAME).write_text(encode(replace(DRIVE, measured={"products": -1.0})))
    with pytest.raises(ConfigError, match="measured: expected rates > 0 by name"):
        load(here)


def test_a_picture_is_drawn_or_refused(
    here: Path, quick: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    run("10M", "--plot", here / "plan.png")
    assert (here / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        run("10M", "--plot", here / "absent" / "plan.png")
    assert "the picture cannot be written" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        run("10M", "--plot", here / "other.png")
    assert "matplotlib is not installed" in capsys.readouterr().err


def test_the_largest_model_is_the_last_one_that_fits() -> None:
    found = _search(lambda shape: "disk" if shape.num_params > 3 * 10**9 else None)
    assert found.limit == "disk"
    assert found.shape is not None
    assert 2.7e9 < found.shape.num_params <= 3e9
    assert _search(lambda shape: "host") == Largest(None, "host")
    everything = _search(lambda shape: None)
    assert everything.shape is not None
    assert everything.limit == "the shapes tried"


@pytest.mark.parametrize(
    "limits", [Limits(1 << 20, 1 << 40, 1 << 40), Limits(1 << 40, 1 << 27, 1 << 40),
               Limits(1 << 28, 1 << 40, 1 << 34)],
)  # fmt: skip
def test_the_largest_model_fits_and_the_next_one_does_not(limits: Limits) -> None:
    blueprint = decide(
        make("10M").model, make_config({"nvme_path": "."}), choose("adamw", None, {}).rule
    )
    found = largest(blueprint, limits)
    assert found.shape is not None
    assert obstacle(blueprint, found.shape, limits) is None
    wider = DecoderShape.of_width(found.shape.width + 64)
    assert obstacle(blueprint, wider, limits) == found.limit


def test_the_probe_measures_rates_above_zero() -> None:
    from offload.schedule.predict import Threads
    from offload.schedule.work import Attention, Product, Work

    products = Product(64, 64), Product(64, 65, 2), Product(64, 65), Product(9000, 9000)
    work = Work(products, Attention(2, 128), 16, 16)
    wanted = probe.Wanted(
        work, 16, torch.float32, torch.device("cpu"), Threads(1, 1, 1, shared=True), 1
    )
    assert {str(shape) for shape in wanted.shapes()} == {
        "16 x 64 x 64, 1 in turn", "16 x 64 x 65, 3 in turn", "16 x 4096 x 4096, 1 in turn",
    }  # fmt: skip
    shares = wanted.shapes().values()
    assert sum(share.flops for share in shares) == pytest.approx(1.0)
    assert sum(share.elems for share in shares) == pytest.approx(1.0)
    measured = {name: measure() for name, measure in wanted.names().items()}
    assert all(rate > 0 for rate in measured.values())
    assert not probe.missing(wanted, measured)
    speeds = wanted.speeds(measured)
    assert 0 < speeds.flops < 1e15
    assert 0 < speeds.attention < 1e15
    assert 0 < speeds.activations < 1e15
    assert speeds.update == speeds.take
