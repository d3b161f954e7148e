"""accelerate's loop around an engine is accelerate's loop in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_lm import OFFLOAD, make_data, make_model

accelerate = pytest.importorskip("accelerate", reason="the hf extra is not installed")
from offload import ConfigError, OffloadEngine, StateError  # noqa: E402
from offload.integrations.accelerate import attach  # noqa: E402

WINDOW = 3
CLIP = 0.4


def make_accelerator(**settings: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=WINDOW, **settings)


@dataclass
class Loop:
    """accelerate's own example of a loop, with whatever model and optimizer were prepared."""

    accelerator: Any
    model: Any
    optimizer: Any
    clip: float = CLIP
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Eleven batches: three windows of three, and one of two at the end.
        loader = torch.utils.data.DataLoader(make_data(), batch_size=2)
        schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.loader, self.schedule = self.accelerator.prepare(loader, schedule)

    def epoch(self, skip: int = 0) -> Loop:
        accelerator, loader = self.accelerator, self.loader
        self.model.train()
        for batch in accelerate.skip_first_batches(loader, skip) if skip else loader:
            with accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                    self.norms.append(norm.item())
                    self.rates.append(self.optimizer.param_groups[0]["lr"])
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return self


@contextmanager
def offloaded(
    folder: Path, *, seed: int = 0, **settings: Any
) -> Iterator[tuple[Loop, OffloadEngine]]:
    folder.mkdir()
    accelerator = make_accelerator()
    defaults = {"optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.01, "dtype": "fp32"}
    engine = OffloadEngine(
        make_model(seed), nvme_path=folder, gradient_accumulation_steps=WINDOW,
        **{**OFFLOAD, **defaults, **settings},
    )  # fmt: skip
    with engine:
        yield Loop(accelerator, *attach(accelerator, engine)), engine


def in_memory() -> Loop:
    accelerator = make_accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    return Loop(accelerator, *accelerator.prepare(model, optimizer))


def test_losses_norms_and_rates_are_those_of_the_loop_in_memory(tmp_path: Path) -> None:
    """Two epochs: eight steps, every one clipped."""
    memory = in_memory().epoch().epoch()
    with offloaded(tmp_path / "nvme") as (loop, engine):
        loop.epoch().epoch()
        assert engine.global_step == len(loop.norms) == 8
        assert loop.rates == memory.rates
        assert min(loop.norms) > CLIP
        assert loop.losses == pytest.approx(memory.losses, rel=2e-5)
        assert loop.norms == pytest.approx(memory.norms, rel=2e-5)
        for name, weight in memory.model.named_parameters():
            master = engine.full_fp32_param(name)
            torch.testing.assert_close(master, weight.detach(), rtol=1e-4, atol=1e-6)


def test_the_clipping_is_real_and_ends_with_the_step(tmp_path: Path) -> None:
    """SGD moves by lr times the clipped gradient, whose norm is known."""
    settings = {"optimizer": "sgd", "weight_decay": 0.0, "lr": 1.0}
    with offloaded(tmp_path / "nvme", **settings) as (loop, engine):
        names = dict(engine.module.named_parameters())
        batch = next(iter(loop.loader))
        moved, norms = [], []
        for max_norm in (0.25, None, 0.125):
            before = {name: engine.full_fp32_param(name) for name in names}
            loop.accelerator.gradient_state._set_sync_gradients(True)
            loop.accelerator.backward(loop.model(**batch).loss)
            if max_norm is not None:
                norm = loop.accelerator.clip_grad_norm_(loop.model.parameters(), max_norm)
                assert norm > max_norm
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            steps = [(engine.full_fp32_param(name) - before[name]).flatten() for name in names]
            moved.append(float(torch.cat(steps).norm()))
            norms.append(engine.grad_norm)
        assert moved == pytest.approx([0.25, norms[1], 0.125], rel=1e-4)
        assert norms[1] > 0.25


def test_a_saved_state_holds_everything(tmp_path: Path) -> None:
    """Saved in the middle of an epoch; loaded at other budgets, over another model's weights."""
    with offloaded(tmp_path / "one") as (whole, _):
        whole.epoch()
        whole.accelerator.save_state(str(tmp_path / "state"))
        assert not list((tmp_path / "state").glob("model*"))  # once is enough
        whole.epoch()
        rows = (whole.losses[11:], whole.norms[4:], whole.rates[4:])
    changes = {"seed": 5, "chunk_elems": 2048, "placement": "host"}
    with offloaded(tmp_path / "two", **changes) as (again, engine):
        again.accelerator.load_state(str(tmp_path / "state"))
        assert engine.global_step == 4
        again.epoch()
        assert (again.losses, again.norms, again.rates) == rows


def test_what_was_saved_without_the_engine_is_refused(tmp_path: Path) -> None:
    in_memory().epoch().accelerator.save_state(str(tmp_path / "state"))
    with (
        offloaded(tmp_path / "nvme") as (loop, _),
        pytest.raises(StateError, match="without the engine"),
    ):
        loop.accelerator.load_state(str(tmp_path / "state"))


def test_clipping_that_cannot_be_honoured_is_refused(tmp_path: Path) -> None:
    with offloaded(tmp_path / "nvme") as (loop, _):
        accelerator, model = loop.accelerator, loop.model
        clip, parameters = accelerator.clip_grad_norm_, list(model.parameters())
        with pytest.raises(StateError, match="clip_grad_norm_"):
            accelerator.clip_grad_value_(parameters, 1.0)
        with pytest.raises(ConfigError, match="all 29 trainable parameters"):
            clip(parameters[:3], 1.0)
        with pytest.raises(ConfigError, match="norm_type=2"):
            clip(parameters, 1.0, norm_type=1)
        with pytest.raises(ConfigError, match="above 0"):
            clip(parameters, 0.0)
        accelerator.gradient_state._set_sync_gradients(False)
        with pytest.raises(StateError, match="sync_gradients"):
            clip(parameters, 1.0)


def test_a_second_model_beside_it_stays_accelerates_own(tmp_path: Path) -> None:
    with offloaded(tmp_path / "nvme") as (loop, _):
        other = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        other, optimizer = loop.accelerator.prepare(other, optimizer)
        loop.accelerator.gradient_state._set_sync_gradients(True)
        loop.accelerator.backward(other(torch.ones(2, 3)).square().sum())
        before = other.weight.grad.clone()
        norm = loop.accelerator.clip_grad_norm_(other.parameters(), 1e-3)
        assert norm > 1e-3
        assert not torch.equal(before, other.weight.grad)
        loop.accelerator.clip_grad_value_(other.parameters(), 1e-5)
        assert other.weight.grad.abs().max() <= 1e-5


def test_a_loss_scale_beside_the_engines_is_refused(tmp_path: Path) -> None:
    with offloaded(tmp_path / "nvme") as (loop, engine):
        loop.accelerator.scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(ConfigError, match="dtype='fp16'"):
            attach(loop.accelerator, engine)


def test_types_of_the_accelerators_own_are_refused(tmp_path: Path) -> None:
    """It would wrap a forward that the engine computes in its own types."""
    accelerator = make_accelerator(mixed_precision="bf16")
    with (
        OffloadEngine(make_model(), nvme_path=tmp_path, lr=1e-3, **OFFLOAD) as engine,
        pytest.raises(ConfigError, match=r"mixed_precision='no', got 'bf16'.*dtype='bf16'"),
    ):
        attach(accelerator, engine)


def test_closing_the_engine_gives_the_accelerator_back(tmp_path: Path) -> None:
    accelerator = make_accelerator()
    before = dict(vars(accelerator))
    for number in range(2):
        folder = tmp_path / f"nvme-{number}"
        folder.mkdir()
        with OffloadEngine(make_model(), nvme_path=folder, lr=1e-3, **OFFLOAD) as engine:
            attach(accelerator, engine)
            assert accelerator.backward.__self__ is not accelerator
    assert accelerator.backward.__self__ is accelerator
    assert vars(accelerator).keys() == before.keys()
    assert not accelerator._save_model_state_pre_hook
    assert not accelerator._load_model_state_pre_hook
