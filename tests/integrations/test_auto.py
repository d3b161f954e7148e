"""`offload-train --auto`: a plain script is taken over, or left alone as if we were not there.

A script is a function of a module of torch names; it runs once as it is and once watched.
"""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Group, Oracle
from torch import Tensor, nn

from offload import OffloadEngine
from offload.errors import BudgetError, StateError
from offload.integrations.auto import AutoOffload
from offload.integrations.auto_file import without_schedule

WIDTH = 330  # matrices above the size of what stays on the device
STEPS = 6
MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.8, 0.95)),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
    "plain-sgd": lambda p: torch.optim.SGD(p, lr=1e-1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
}


class Net(nn.Module):
    def __init__(self, **embedding: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, **embedding)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def seeded(kind: Callable[..., nn.Module] = Net, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    return kind(**options)


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(step))
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Watched:
    """Runs functions as `offload-train --auto` runs scripts; `said`: its lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []

    def run(self, script: Callable[[], Any]) -> Any:
        with AutoOffload(self.said.append):
            return script()

    @property
    def took_over(self) -> bool:
        return any(" are taken over:" in line for line in self.said)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    folder = tmp_path / "drive"
    folder.mkdir()
    monkeypatch.setenv("OFFLOAD_NVME", str(folder))
    monkeypatch.setenv("OFFLOAD_HOST_MEMORY", "24MiB")
    monkeypatch.setenv("OFFLOAD_PLACEMENT", "disk")
    monkeypatch.setenv("OFFLOAD_RESUME", "fresh")
    return Watched(folder)


def same_bits(first: Tensor, second: Tensor) -> bool:
    return first.dtype is second.dtype and torch.equal(
        first.detach().flatten().view(torch.uint8), second.detach().flatten().view(torch.uint8)
    )


def train(make: Callable[..., torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    """A loop with everything that a plain script has; returns all that it saw."""
    model = seeded()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        0.02,
        total_steps=20,
        cycle_momentum=not isinstance(optimizer, torch.optim.Adagrad),
    )
    seen: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "evaluated": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(options.get("accumulation", 1)):
            loss = loss_of(model, 10 * step + part)
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.get("max_norm", 0.5))
        optimizer.step()
        scheduler.step()
        seen["losses"].append(loss.item())
        seen["norms"].append(norm.item())
        seen["rates"].append(scheduler.get_last_lr())
        model.eval()
        with torch.no_grad():
            seen["evaluated"].append(loss_of(model, 99).item())
        model.train()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return {**seen, **torch.load(file)}


@pytest.mark.parametrize("options", [{}, {"accumulation": 3}, {"max_norm": 1e3}], ids=str)
@pytest.mark.parametrize("name", MAKE)
def test_a_plain_loop_sees_what_it_sees_in_memory(name, options, watched):
    """Kernels and torch differ in the order of operations alone: a few units in the last place."""
    plain = train(MAKE[name], **options)
    ours = watched.run(lambda: train(MAKE[name], **options))
    assert watched.took_over
    assert len(watched.said) == 1
    assert ours["rates"] == plain["rates"]
    for key in ("losses", "norms", "evaluated"):
        assert ours[key] == pytest.approx(plain[key], rel=1e-4), key
    assert_close(ours["model"], plain["model"])
    assert ours["optimizer"]["param_groups"] == plain["optimizer"]["param_groups"]
    assert ours["optimizer"]["state"].keys() == plain["optimizer"]["state"].keys()
    for index, state in plain["optimizer"]["state"].items():
        state = {key: value for key, value in state.items() if value is not None}
        assert_close(ours["optimizer"]["state"][index], state)


def assert_close(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    for name, tensor in plain.items():
        assert ours[name].dtype is tensor.dtype
        assert torch.allclose(ours[name], tensor, rtol=1e-3, atol=2e-5), name


def test_adamw_is_bit_equal_to_the_same_kernel_in_memory(watched):
    group = Group(lr=1e-2)

    def script() -> dict[str, Tensor]:
        model = seeded()
        optimizer = torch.optim.AdamW(model.parameters(), **group.settings())
        for step in range(STEPS):
            loss_of(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    ours = watched.run(script)
    assert watched.took_over
    oracle = Oracle(seeded(), torch.float32, torch.float32, (group,), 0.5)
    for step in range(STEPS):
        loss_of(oracle.model, step).backward()
        oracle.keep_gradients()
        oracle.step()
    for name, param in oracle.model.named_parameters():
        assert same_bits(ours[name], param.detach()), name


def test_what_was_saved_goes_on_in_plain_torch(watched):
    saved = watched.run(lambda: train(MAKE["adamw"]))
    model = seeded()
    model.load_state_dict(saved["model"])
    optimizer = MAKE["adamw"](model.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    plain = train(MAKE["adamw"])
    twin = seeded()
    twin.load_state_dict(plain["model"])
    other = MAKE["adamw"](twin.parameters())
    other.load_state_dict(plain["optimizer"])
    for each, steps in ((model, optimizer), (twin, other)):
        loss_of(each, 7).backward()
        steps.step()
    assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))


# --- what is left alone


def loop(model: Any, *optimizers: torch.optim.Optimizer) -> dict[str, Tensor]:
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def two_models() -> dict[str, Tensor]:
    torch.manual_seed(3)
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    for _ in range(3):
        second(first(torch.ones(2, WIDTH))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**first.state_dict(), **{f"2.{k}": v for k, v in second.state_dict().items()}}


def no_module() -> dict[str, Tensor]:
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    optimizer = torch.optim.Adagrad([weight])
    for _ in range(3):
        weight.square().mean().backward()
        optimizer.step()
    return {"weight": weight.detach(), "sum": optimizer.state[weight]["sum"]}


def two_optimizers() -> dict[str, Tensor]:
    model = seeded()
    return loop(
        model,
        torch.optim.AdamW(model.blocks.parameters()),
        torch.optim.SGD([*model.embed.parameters(), *model.head.parameters()], lr=0.1),
    )


def two_optimizers_of_all() -> dict[str, Tensor]:
    model = seeded()
    return loop(
        model, torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.head.parameters())
    )


def other_optimizer() -> dict[str, Tensor]:
    model = seeded()
    return loop(model, torch.optim.RAdam(model.parameters()))


class Mine(torch.optim.Adagrad):
    """A subclass may do anything."""


def subclass() -> dict[str, Tensor]:
    model = seeded()
    return loop(model, Mine(model.parameters(), initial_accumulator_value=0.5))


def lbfgs() -> dict[str, Tensor]:
    model = seeded()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return model.state_dict()


def scaled() -> dict[str, Tensor]:
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model.state_dict()


def wrapped() -> dict[str, Tensor]:
    model = seeded()
    return loop(nn.DataParallel(model), torch.optim.AdamW(model.parameters()))


def compiled() -> dict[str, Tensor]:
    model = seeded()
    return loop(torch.compile(model, backend="eager"), torch.optim.AdamW(model.parameters()))


def sparse() -> dict[str, Tensor]:
    model = seeded(sparse=True)
    return loop(model, torch.optim.SGD(model.parameters(), lr=0.1))


def double() -> dict[str, Tensor]:
    model = seeded().double()
    return loop(model, torch.optim.Adam(model.parameters()))


def amsgrad() -> dict[str, Tensor]:
    model = seeded()
    return loop(model, torch.optim.Adam(model.parameters(), amsgrad=True))


def resumed() -> dict[str, Tensor]:
    model = seeded()
    first = torch.optim.Adagrad(model.parameters())
    state = {index: {"step": torch.tensor(2.0), "sum": torch.full_like(p, 0.3)}
             for index, p in enumerate(model.parameters())}  # fmt: skip
    first.load_state_dict({**first.state_dict(), "state": state})
    return loop(model, first)


LEFT = {
    two_models: "not those of one module",
    no_module: "not those of one module",
    two_optimizers: "2 optimizers|not those of one module",
    two_optimizers_of_all: "2 optimizers",
    other_optimizer: "expected one of Adam",
    subclass: "expected one of Adam",
    lbfgs: "expected one of Adam",
    scaled: "GradScaler",
    wrapped: "several devices",
    compiled: "compiled as a whole",
    sparse: "embed has sparse gradients",
    double: "float64",
    amsgrad: "amsgrad",
    resumed: "has state already",
}


@pytest.mark.parametrize("script", LEFT, ids=lambda script: script.__name__)
def test_what_cannot_be_taken_over_runs_as_it_would_without_us(script, watched):
    plain = copy.deepcopy(script())
    ours = watched.run(script)
    assert not watched.took_over, watched.said
    assert watched.said
    for line in watched.said:
        assert "left alone" in line
        assert "\n" not in line
    assert re.search(LEFT[script], watched.said[0]), watched.said
    assert plain.keys() == ours.keys()
    assert all(same_bits(plain[name], ours[name]) for name in plain)
    assert not list(watched.folder.iterdir())


def test_a_second_optimizer_of_a_model_that_was_taken_over_is_refused(watched):
    def script() -> None:
        model = seeded()
        loop(model, torch.optim.AdamW(model.parameters()))
        torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(StateError, match="SGD holds parameters of a model that was taken over"):
        watched.run(script)


def test_a_scaler_made_too_late_is_refused(watched):
    def script() -> None:
        model = seeded()
        loop(model, torch.optim.AdamW(model.parameters()))
        torch.amp.GradScaler("cpu")

    with pytest.raises(StateError, match="GradScaler"):
        watched.run(script)


def test_a_script_that_makes_its_own_engine_keeps_it(watched):
    def script() -> dict[str, Tensor]:
        model = seeded()
        with OffloadEngine(
            model, optimizer=MAKE["adamw"](model.parameters()), device="cpu"
        ) as engine:
            for step in range(3):
                loss_of(engine, step).backward()
                engine.optimizer.step()
            return {name: value.clone() for name, value in model.state_dict().items()}

    plain = script()
    ours = watched.run(script)
    assert watched.said == []
    assert all(same_bits(plain[name], ours[name]) for name in plain)


def test_a_script_without_an_optimizer_is_told_so(watched):
    watched.run(lambda: None)
    assert watched.said == ["nothing was taken over: the script made no optimizer of torch.optim."]


@pytest.mark.parametrize("fails", [False, True])
def test_torch_is_as_it_was_afterwards(fails, watched):
    owners = (torch.optim.Optimizer, torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad,
              torch.optim.SGD, nn.Module, torch.amp.GradScaler, nn.utils)  # fmt: skip
    MAKE["adamw"](seeded().parameters())  # torch hooks `step` when a first one is made
    before = [dict(vars(owner)) for owner in owners]

    def script() -> None:
        model = seeded()
        loop(model, MAKE["adamw"](model.parameters()))
        if fails:
            raise KeyError("mine")

    if fails:
        with pytest.raises(KeyError, match="mine"):
            watched.run(script)
    else:
        watched.run(script)
    assert [dict(vars(owner)) for owner in owners] == before
    assert torch.is_autocast_cache_enabled()


def test_budgets_that_do_not_suffice_are_an_error(watched, monkeypatch):
    monkeypatch.setenv("OFFLOAD_HOST_MEMORY", "64KiB")
    model = seeded()
    with pytest.raises(BudgetError):
        watched.run(lambda: loop(model, MAKE["adamw"](model.parameters())))


def one_model() -> dict[str, Tensor]:
    model = seeded()
    return loop(model, MAKE["adamw"](model.parameters()))


def test_a_store_that_is_there_is_not_touched(watched, monkeypatch):
    plain = one_model()
    watched.run(one_model)
    before = {file: file.stat().st_mtime_ns for file in watched.folder.rglob("*")}
    monkeypatch.delenv("OFFLOAD_RESUME")
    ours = watched.run(one_model)
    assert re.search("left alone .*: store .*expected no store.*--fresh", watched.said[-1])
    assert "resume" not in watched.said[-1]  # which --auto refuses
    assert all(same_bits(plain[name], ours[name]) for name in plain)
    assert {file: file.stat().st_mtime_ns for file in watched.folder.rglob("*")} == before


def test_models_of_one_layout_have_stores_of_their_own(watched):
    def script() -> dict[str, Tensor]:
        first = one_model()
        second = seeded().requires_grad_()
        third = loop(second, MAKE["sgd"](second.parameters()))
        return {**first, **{f"second.{name}": value for name, value in third.items()}}

    plain, ours = script(), watched.run(script)
    assert len([line for line in watched.said if "are taken over:" in line]) == 2
    first, second = sorted(folder.name for folder in watched.folder.iterdir())
    assert second == f"{first}-2"
    assert_close(ours, plain)


FILE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}}


def test_a_file_leaves_rates_and_clipping_to_the_script(watched, monkeypatch, tmp_path, caplog):
    (tmp_path / "ds.json").write_text(json.dumps(FILE))

    def script() -> dict[str, Any]:
        model, norms = seeded(), []
        optimizer = MAKE["plain-sgd"](model.parameters())
        for step in range(4):
            (20 * loss_of(model, step)).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 5.0).item())
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.param_groups[0]["lr"] == 1e-1
        return {"norms": norms, **{n: v.clone() for n, v in model.state_dict().items()}}

    plain = script()
    assert min(plain["norms"]) > 1.0  # DeepSpeed's default would clip
    monkeypatch.setenv("OFFLOAD_CONFIG", str(tmp_path / "ds.json"))
    ours = watched.run(script)
    assert watched.took_over
    assert ours.pop("norms") == pytest.approx(plain.pop("norms"), rel=1e-3)
    assert_close(ours, plain)
    assert "the scheduler is left out" in caplog.text
    assert "gradient_clipping is not given" in caplog.text
    assert without_schedule({**FILE, "gradient_clipping": 0.3}).settings["gradient_clipping"] == 0.3
    assert without_schedule(None) is None


def test_a_part_of_the_gradients_is_clipped_as_torch_does(watched):
    """Whatever is not the norm of all goes through `p.grad`."""

    def script() -> dict[str, Any]:
        model, norms = seeded(), []
        optimizer = MAKE["adamw"](model.parameters())
        for step in range(4):
            loss_of(model, step).backward()
            norms.append(nn.utils.clip_grad_norm_(model.head.parameters(), 1e-2).item())
            nn.utils.clip_grad_value_(model.blocks.parameters(), 1e-4)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, float("inf")).item())
            optimizer.step()
            optimizer.zero_grad()
        return {"norms": norms, **{n: v.clone() for n, v in model.state_dict().items()}}

    plain, ours = script(), watched.run(script)
    assert watched.took_over
    assert ours.pop("norms") == pytest.approx(plain.pop("norms"), rel=1e-4)
    assert_close(ours, plain)


def test_a_model_with_frozen_parts_and_a_first_evaluation(watched):
    def script() -> dict[str, Tensor]:
        model = seeded()
        model.embed.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        with torch.inference_mode():
            loss_of(model, 0)
        with torch.no_grad():
            loss_of(model, 0)
        return loop(model, optimizer)

    plain, ours = script(), watched.run(script)
    assert watched.took_over
    assert_close(ours, plain)


def test_bf16_models_get_exact_masters(watched):
    def script() -> list[float]:
        model = seeded().bfloat16()
        optimizer = MAKE["adamw"](model.parameters())
        losses = []
        for step in range(4):
            loss = loss_of(model, step)
            assert next(model.parameters()).dtype is torch.bfloat16
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert model.state_dict()["head.weight"].dtype is torch.bfloat16
        return losses

    plain, ours = script(), watched.run(script)
    assert watched.took_over
    assert ours[0] == plain[0]
    assert ours == pytest.approx(plain, rel=0.1)


def test_the_best_weights_are_loaded_back(watched):
    def script() -> dict[str, Tensor]:
        model = seeded()
        optimizer = MAKE["adamw"](model.parameters())
        best = copy.deepcopy(loop(model, optimizer))
        loop(model, optimizer)
        model.load_state_dict(best)
        assert all(same_bits(value, best[name]) for name, value in model.state_dict().items())
        return loop(model, optimizer)

    plain, ours = script(), watched.run(script)
    assert watched.took_over
    assert_close(ours, plain)
