"""For every key that a DeepSpeed file may set and that is used here: what it changes.

FIELDS are settings of the engine, whose effects have tests of their own; the others are tested
here, by the function that EFFECTS names.
"""

from __future__ import annotations

import csv
import logging
import math
import tempfile
from pathlib import Path

import models
import pytest
import torch
from every_key import nested
from oracle import Group, Oracle
from recipe_runs import SMALL, model

from offload import ConfigError, OffloadEngine
from offload.config import Wanted, make_config
from offload.deepspeed_config.keys import KEYS
from offload.deepspeed_config.recipe import recipe_of
from offload.engine.configured import configure, store_folder

FP16 = {"fp16": {"enabled": True}}
BF16 = {"bf16": {"enabled": True}}
ZERO = "zero_optimization"
NVME = {"device": "nvme", "nvme_path": "/mnt/drive"}
# path -> value, what else the file holds, field, what the field is with it, and without
FIELDS = {
    "gradient_accumulation_steps": (3, {}, "gradient_accumulation_steps", 3, 1),
    "train_batch_size": (
        12, {"train_micro_batch_size_per_gpu": 4}, "gradient_accumulation_steps", 3, 1,
    ),
    "train_micro_batch_size_per_gpu": (
        4, {"train_batch_size": 12}, "gradient_accumulation_steps", 3, 1,
    ),
    "gradient_clipping": (0.5, {}, "gradient_clipping", 0.5, 1.0),
    "wall_clock_breakdown": (True, {}, "wall_clock_breakdown", True, False),
    "fp16.enabled": (True, {}, "dtype", torch.float16, torch.float32),
    "fp16.loss_scale": (128, FP16, "loss_scale", 128, 0),
    "fp16.initial_scale_power": (12, FP16, "initial_scale_power", 12, 16),
    "fp16.loss_scale_window": (500, FP16, "loss_scale_window", 500, 1000),
    "fp16.hysteresis": (1, FP16, "hysteresis", 1, 2),
    "fp16.consecutive_hysteresis": (True, FP16, "consecutive_hysteresis", True, False),
    "fp16.min_loss_scale": (2, FP16, "min_loss_scale", 2, 1),
    "bf16.enabled": (True, {}, "dtype", torch.bfloat16, torch.float32),
    "bf16.bf16_optimizer_states": (True, BF16, "state_dtype", "bf16", "fp32"),
    "data_types.param_dtype": ("fp16", {}, "dtype", torch.float16, torch.float32),
    f"{ZERO}.stage3_param_persistence_threshold": (
        1e4, {}, "param_persistence_threshold", 10_000, 100_000,
    ),
    f"{ZERO}.sub_group_size": (5000, {}, "chunk_elems", 4096, None),
    f"{ZERO}.offload_param.device": ("cpu", {}, "placement", Wanted("host", "auto"), Wanted()),
    f"{ZERO}.offload_optimizer.device": (
        "cpu", {}, "placement", Wanted("auto", "host"), Wanted(),
    ),
    f"{ZERO}.cpu_offload_param": (True, {}, "placement", Wanted("host", "auto"), Wanted()),
    f"{ZERO}.cpu_offload": (True, {}, "placement", Wanted("auto", "host"), Wanted()),
}  # fmt: skip
EFFECTS = {
    "managed_gradient_accumulation": "test_without_managed_accumulation_every_step_updates",
    "steps_per_print": "test_a_line_is_logged_every_so_many_steps",
    "dump_state": "test_the_configuration_is_logged_on_request",
    "dataloader_drop_last": "test_initialize.test_training_data_comes_in_micro_batches",
    "optimizer.type": "test_an_optimizer_has_deepspeeds_defaults",
    "optimizer.params": "test_adam_decays_and_corrects_as_its_switches_say",
    "scheduler.type": "test_a_schedule_is_stepped_after_each_step",
    "scheduler.params": "test_a_schedule_is_stepped_after_each_step",
    "fp16.auto_cast": "test_inputs_are_cast_to_what_computes",
    "torch_autocast.enabled": "test_autocast_around_forward_is_autocast_in_memory",
    "torch_autocast.dtype": "test_autocast_around_forward_is_autocast_in_memory",
    "aio.block_size": "test_the_queue_has_the_files_blocks_and_depth",
    "aio.queue_depth": "test_the_queue_has_the_files_blocks_and_depth",
    "csv_monitor.enabled": "test_csv_files_hold_a_line_a_step",
    "csv_monitor.output_path": "test_csv_files_hold_a_line_a_step",
    "csv_monitor.job_name": "test_csv_files_hold_a_line_a_step",
    f"{ZERO}.stage": "test_the_log_says_what_a_stage_becomes",
    f"{ZERO}.offload_param.nvme_path": "test_both_drives_are_used",
    f"{ZERO}.offload_optimizer.nvme_path": "test_both_drives_are_used",
    f"{ZERO}.stage3_model_persistence_threshold": "test_small_tensors_stay_up_to_their_sum",
    f"{ZERO}.stage3_prefetch_bucket_size": "test_nothing_is_fetched_ahead_with_a_bucket_of_nothing",
    f"{ZERO}.stage3_max_reuse_distance": "test_units_that_are_used_again_soon_stay",
    f"{ZERO}.stage3_max_live_parameters": "test_units_that_are_used_again_soon_stay",
}


def test_every_key_that_is_used_has_a_test():
    assert FIELDS.keys().isdisjoint(EFFECTS)
    assert FIELDS.keys() | EFFECTS.keys() == {path for path, key in KEYS.items() if key.used}
    here = [name for name in EFFECTS.values() if "." not in name]
    assert not [name for name in here if name not in globals()]


def merged(first: dict, second: dict) -> dict:
    out = dict(first)
    for key, value in second.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out


def config_of(config: dict, environment: dict | None = None, **settings):
    environment = environment or {}
    given = configure(config, None, {"nvme_path": "/mnt", **settings}, environment=environment)
    keep = ("lr", "betas", "eps", "weight_decay")
    rest = {key: value for key, value in given.settings.items() if key not in keep}
    return make_config(rest, environment, under=given.under)


def test_a_tile_is_rounded_to_what_the_states_type_needs():
    for size, plain, int8 in ((5000, 4096, 262144), (1, 2048, 262144), (600_000, 598016, 524288)):
        config = {ZERO: {"sub_group_size": size}}
        assert config_of(config).chunk_elems == plain
        assert config_of(config, state_dtype="int8").chunk_elems == int8
    environment = {"OFFLOAD_STATE_DTYPE": "int8"}
    assert config_of({ZERO: {"sub_group_size": 5000}}, environment).chunk_elems == 262144
    with pytest.raises(ConfigError, match="multiple of 262144"):
        config_of(config, state_dtype="int8", chunk_elems=4096)


def test_a_folder_for_weights_is_the_stores_or_a_temporary_one(monkeypatch):
    monkeypatch.delenv("OFFLOAD_NVME", raising=False)
    on_nvme = {ZERO: {"offload_param": {"device": "nvme", "nvme_path": "/drive"}}}
    assert store_folder({"config": on_nvme}) == Path("/drive")
    assert store_folder({"config": on_nvme, "nvme_path": "/other"}) == Path("/other")
    assert store_folder({"config": {}, "nvme_path": None}) == Path(tempfile.gettempdir())
    with pytest.raises(ConfigError, match="nvme_path"):
        store_folder({"config": {ZERO: {"offload_param": {"device": "nvme"}}}})


def test_without_a_device_weights_stay_gathered_and_state_where_it_fits(tmp_path):
    parts = {"offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}}
    assert config_of({ZERO: parts}).placement == Wanted("device", "auto")
    assert "since updates run on the processor" in str(recipe_of({ZERO: parts}).notes)
    assert config_of({ZERO: {"stage": 3}}).placement == Wanted("auto", "auto")
    settings = {"param_persistence_threshold": 0, "device_memory": "64MiB"}
    with engine_of(tmp_path, {ZERO: parts}, **settings) as engine:
        for index in range(3):
            step(engine, index)
        assert not sum(engine.metrics.evictions.values())
        blueprint = engine._parts.ground.blueprint
        assert len(blueprint.placement.kept) == len(blueprint.found.units)


@pytest.mark.parametrize("path", FIELDS)
def test_a_key_sets_the_engines_field(path):
    value, others, field, with_it, without_it = FIELDS[path]
    assert getattr(config_of(merged(others, nested(path, value))), field) == with_it
    missing = {} if path in ("train_batch_size", "train_micro_batch_size_per_gpu") else others
    assert getattr(config_of(missing), field) == without_it


class TestPrecedence:
    FILE = {"gradient_clipping": 0.5, **BF16, "steps_per_print": 7}  # noqa: RUF012

    def test_an_argument_wins_over_the_file(self):
        assert config_of(self.FILE, gradient_clipping=0.25).gradient_clipping == 0.25
        assert config_of(self.FILE, dtype="fp32").dtype is torch.float32
        assert config_of({**FP16, "fp16": {"enabled": True, "loss_scale": 2}}, dtype="bf16")

    def test_the_command_line_wins_over_the_file_and_loses_to_an_argument(self):
        file = {ZERO: {"offload_param": NVME, "offload_optimizer": {"device": "cpu"}}}
        typed = {"OFFLOAD_PLACEMENT": "auto", "OFFLOAD_NVME": "/mnt/typed"}
        assert config_of(file).placement == Wanted("disk", "host")
        assert config_of(file, typed).placement == Wanted()
        assert config_of(file, typed, placement="disk").placement == Wanted("disk", "disk")
        given = configure(file, None, {}, environment=typed)
        assert str(make_config({}, typed, under=given.under).nvme_path[0]) == "/mnt/typed"

    def test_an_argument_that_contradicts_the_batch_numbers_is_refused(self):
        file = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
        assert config_of(file, gradient_accumulation_steps=4).gradient_accumulation_steps == 4
        with pytest.raises(ConfigError, match=r"expected 2 .* x 2 .* x 1 .* = 4, got 8"):
            config_of(file, gradient_accumulation_steps=2)

    def test_an_optimizer_given_as_an_argument_replaces_the_section(self):
        file = {"optimizer": {"type": "Adam", "params": {"lr": 0.5, "weight_decay": 0.5}}}
        given = configure(file, "sgd", {"lr": 0.1}, environment={})
        assert (given.optimizer, given.settings) == ("sgd", {"lr": 0.1})
        assert "optimizer given as an argument replaces" in str(given.notes)
        given = configure(file, None, {"lr": 0.1}, environment={})
        assert given.settings == {
            "lr": 0.1, "weight_decay": 0.5, "betas": (0.9, 0.999), "eps": 1e-8,
        }  # fmt: skip

    def test_the_default_of_clipping_is_told_unless_an_argument_sets_it(self):
        assert "clipped to 1.0, DeepSpeed's" in str(configure({}, None, {}, environment={}).notes)
        settings = {"gradient_clipping": 0.0}
        assert "clipped" not in str(configure({}, None, settings, environment={}).notes)
        assert config_of({"gradient_clipping": 0}).gradient_clipping == 0.0


def engine_of(tmp_path, config: dict, **settings) -> OffloadEngine:
    base = {"gradient_clipping": 0.0, **({} if "fp16" in config else BF16)}
    return OffloadEngine(
        settings.pop("net", None) or model(), nvme_path=tmp_path, config=merged(base, config),
        **{**SMALL, **settings},
    )  # fmt: skip


def step(engine: OffloadEngine, index: int = 0) -> float:
    loss = engine(*models.batch(index))
    engine.backward(loss)
    engine.step()
    return loss.item()


def test_without_managed_accumulation_every_step_updates(tmp_path):
    config = {"gradient_accumulation_steps": 4, "managed_gradient_accumulation": False}
    with engine_of(tmp_path, config) as engine:
        oracle = Oracle(model(), torch.bfloat16, torch.float32, (Group(lr=1e-3),))
        for micro_steps in (1, 3, 2):  # DeepSpeed divides by 4 all the same
            for index in range(micro_steps):
                engine.backward(engine(*models.batch(index)))
                (oracle.model(*models.batch(index)) / 4).backward()
                oracle.keep_gradients()
            engine.step()
            oracle.step()
        assert engine.global_step == 3
        assert engine.grad_norm == oracle.grad_norm
        for name, state in oracle.states.items():
            assert torch.equal(engine.full_fp32_param(name).flatten(), state.master), name


def test_a_line_is_logged_every_so_many_steps(tmp_path, caplog):
    caplog.set_level(logging.INFO, "offload")
    config = {"steps_per_print": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.25}}}
    with engine_of(tmp_path, config) as engine:
        for index in range(5):
            step(engine, index)
    lines = [line for line in caplog.messages if "gradient norm" in line]
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 4"]
    assert "skipped 0, lr [0.25], momentum [(0.9, 0.999)]" in lines[0]


def test_the_configuration_is_logged_on_request(tmp_path, caplog):
    with engine_of(tmp_path, {"dump_state": True}):
        pass
    assert (
        '{"bf16": {"enabled": true}, "dump_state": true, "gradient_clipping": 0.0}' in caplog.text
    )


@pytest.mark.parametrize("config", [{}, {"steps_per_print": 3, "wall_clock_breakdown": True}])
def test_keys_without_effect_are_named_once(config, tmp_path, caplog):
    ignored = {"prescale_gradients": False, ZERO: {"overlap_comm": True}, "wandb": {"group": "a"}}
    with engine_of(tmp_path, {**config, **ignored}) as engine:
        for index in range(3):
            step(engine, index)
    for key in ("prescale_gradients", f"{ZERO}.overlap_comm", "wandb"):
        assert caplog.text.count(key) == 1


def groups_of(config: dict) -> dict:
    given = configure({"optimizer": config}, None, {}, environment={})
    name = given.optimizer
    return {"name": name if isinstance(name, str) else name.__name__, **given.settings}


def test_an_optimizer_has_deepspeeds_defaults():
    adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert groups_of({"type": "Adam"}) == {"name": "adamw", **adam}
    assert groups_of({"type": "AdamW", "params": {"adam_w_mode": False}})["name"] == "adamw"
    assert groups_of({"type": "adam", "params": {"adam_w_mode": False}})["name"] == "adam"
    assert groups_of({"type": "Adam", "params": {"torch_adam": True}})["name"] == "adamw"
    for kind in ("Adam", "AdamW"):  # torch's class has a decay of its own
        assert groups_of({"type": kind, "params": {"torch_adam": True}})["weight_decay"] == 0.01
    given = {"torch_adam": True, "weight_decay": 0.0}
    assert groups_of({"type": "AdamW", "params": given})["weight_decay"] == 0.0
    assert groups_of({"type": "Lion", "params": {"lr": 1e-4}}) == {
        "name": "lion", "lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 0.0,
    }  # fmt: skip
    assert groups_of({"type": "Adagrad"}) == {
        "name": "adagrad", "lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0,
    }  # fmt: skip
    assert groups_of({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}) == {
        "name": "SGD", "lr": 0.1, "momentum": 0.9,
    }  # fmt: skip
    assert groups_of({"type": "radam"})["name"] == "RAdam"
    legacy = {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.25}}}
    assert config_of(legacy).gradient_clipping == 0.25


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        ({"type": "AdamX"}, "expected Adam, AdamW, .* got 'AdamX'. Did you mean 'adam"),
        ({"type": "SGD", "params": {"momentun": 1}}, "SGD has no setting 'momentun'. Did you mean"),
        ({"type": "Optimizer"}, "got 'Optimizer'"),
    ],
)
def test_a_mistake_in_the_optimizer_names_the_way_out(optimizer, told):
    with pytest.raises(ConfigError, match=told):
        groups_of(optimizer)


class UncorrectedAdam:
    """AdamW without bias correction, written out: the oracle of that switch."""

    def __init__(self, lr: float, decay: float) -> None:
        self.lr, self.decay = lr, decay
        self.moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, name: str, master: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros_like(master)
        first, second = self.moments.get(name, (zeros, zeros))
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad * grad
        self.moments[name] = (first, second)
        return master * (1 - self.lr * self.decay) - self.lr * first / (second.sqrt() + 1e-8)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_decays_and_corrects_as_its_switches_say(decoupled, tmp_path):
    params = {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": decoupled}
    optimizer = {"type": "Adam", "params": params}
    with engine_of(tmp_path, {"optimizer": optimizer}) as engine:
        oracle = Oracle(
            model(), torch.bfloat16, torch.float32, (Group(lr=1e-3, weight_decay=0.1),),
            decoupled=decoupled,
        )  # fmt: skip
        for index in range(3):
            step(engine, index)
            oracle.model(*models.batch(index)).backward()
            oracle.keep_gradients()
            oracle.step()
        for name, state in oracle.states.items():
            assert torch.equal(engine.full_fp32_param(name).flatten(), state.master), name


def test_adam_without_bias_correction_is_the_formula_without_it(tmp_path):
    params = {"lr": 1e-3, "weight_decay": 0.1, "bias_correction": False}
    config = {"bf16": {"enabled": False}, "optimizer": {"type": "AdamW", "params": params}}
    with engine_of(tmp_path, config) as engine:
        net, adam = model(), UncorrectedAdam(1e-3, 0.1)
        masters = {name: p.detach().double() for name, p in net.named_parameters()}
        for index in range(3):
            for name, p in net.named_parameters():
                p.data = masters[name].float()
            net.zero_grad()
            net(*models.batch(index)).backward()
            for name, p in net.named_parameters():
                masters[name] = adam.update(name, masters[name], p.grad.double())
            step(engine, index)
        for name, expected in masters.items():
            found = engine.full_fp32_param(name).double()
            start = dict(model().named_parameters())[name].detach().double()
            moved = (expected - start).norm()
            assert (found - expected).norm() < 1e-3 * moved, name


def test_a_schedule_is_stepped_after_each_step(tmp_path):
    schedule = {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    with engine_of(tmp_path, {"scheduler": schedule, "optimizer": optimizer}) as engine:
        rates = []
        for index in range(4):
            rates.append(engine.optimizer.param_groups[0]["lr"])
            step(engine, index)
        engine.backward(engine(*models.batch(9)) * math.inf)
        engine.step()  # skipped
        rates.append(engine.optimizer.param_groups[0]["lr"])
        assert rates == [0.01, 0.01, 0.005, 0.005, 0.0025]
        engine.optimizer.step()  # nothing to do, so no step
        assert engine.optimizer.param_groups[0]["lr"] == 0.0025


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> torch.Tensor:
        self.seen.append(y.dtype)
        return (self.layer(x) - y).square().mean()


def test_inputs_are_cast_to_what_computes(tmp_path):
    torch.manual_seed(0)
    net = Regression()
    fp16 = {"enabled": True, "auto_cast": True}
    with engine_of(tmp_path, {"fp16": fp16}, net=net, compute_dtype="fp16") as engine:
        x, y = torch.randn(2, 64), torch.randn(2, 64)
        for _ in range(3):
            engine.backward(engine(x, y=y))
            engine.step()
    assert net.seen == [torch.float16] * 3
    net.seen.clear()
    net(x.half(), y=y)
    assert net.seen == [torch.float32]  # the hook has gone with the engine


@pytest.mark.parametrize("dtype", ["bfloat16", "fp16"])
def test_autocast_around_forward_is_autocast_in_memory(dtype, tmp_path):
    config = {
        "bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": dtype},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }  # fmt: skip
    casts = {"bfloat16": torch.bfloat16, "fp16": torch.float16}[dtype]
    group = Group(lr=1e-3, weight_decay=0.0)
    oracle = Oracle(model(), torch.float32, torch.float32, (group,))
    with engine_of(tmp_path, config, param_persistence_threshold=0) as engine:
        for index in range(3):
            found = step(engine, index)
            with torch.autocast("cpu", dtype=casts, cache_enabled=False):
                loss = oracle.model(*models.batch(index))
            loss.backward()
            oracle.keep_gradients()
            oracle.step()
            assert found == loss.item()
        assert not torch.is_autocast_enabled("cpu")
        for name, state in oracle.states.items():
            assert torch.equal(engine.full_fp32_param(name).flatten(), state.master), name
    plain = Oracle(model(), torch.float32, torch.float32, (group,))
    assert plain.model(*models.batch(0)).item() != step_under(casts)


def step_under(dtype: torch.dtype) -> float:
    with torch.autocast("cpu", dtype=dtype):
        return model()(*models.batch(0)).item()


def test_the_queue_has_the_files_blocks_and_depth(tmp_path):
    from offload.engine.drives import plan_drives

    def planned(**aio) -> tuple[int, int, int]:
        drives = plan_drives(config_of({"aio": aio}))
        return drives.block_bytes, drives.read_depth, drives.write_depth

    assert planned() == (1 << 20, 8, 8)
    assert planned(block_size=262144, queue_depth=32) == (262144, 32, 32)
    assert planned(block_size=1e5, queue_depth=1000) == (98304, 256, 256)
    notes = str(recipe_of({"aio": {"block_size": 1e5}}).notes)
    assert "aio.block_size 100000: 98304 is taken" in notes
    with engine_of(tmp_path, {"aio": {"block_size": 8192, "queue_depth": 1}}) as engine:
        for index in range(3):
            step(engine, index)
        assert engine._parts.ground.blueprint.drives.read_depth == 1


def test_csv_files_hold_a_line_a_step(tmp_path):
    monitor = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "run"}
    config = {
        "csv_monitor": monitor, "train_micro_batch_size_per_gpu": 2,
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
    }  # fmt: skip
    (tmp_path / "store").mkdir()
    norms = []
    with engine_of(tmp_path / "store", config) as engine:
        for index in range(3):
            step(engine, index)
            norms.append(engine.grad_norm)

    def read(name: str) -> list[list[str]]:
        with (tmp_path / "csv" / "run" / f"Train_Samples_{name}.csv").open() as file:
            return list(csv.reader(file))

    assert read("lr") == [["step", "lr"], ["2", "0.01"], ["4", "0.005"], ["6", "0.0025"]]
    assert [float(row[1]) for row in read("grad_norm")[1:]] == norms
    assert [row[1] for row in read("loss_scale")[1:]] == ["16.0"] * 3


def test_the_log_says_what_a_stage_becomes():
    for stage in (0, 1, 2):
        assert f"stage {stage} becomes what stage 3 is" in str(
            recipe_of({ZERO: {"stage": stage}}).notes
        )
    assert "becomes" not in str(recipe_of({ZERO: {"stage": 3}}).notes)


def test_both_drives_are_used(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    parts = {
        name: {"device": "nvme", "nvme_path": str(folder)}
        for name, folder in zip(("offload_param", "offload_optimizer"), folders, strict=True)
    }
    with OffloadEngine(model(), config={**BF16, ZERO: parts}, **SMALL) as engine:
        for index in range(3):
            step(engine, index)
        assert engine.config.nvme_path == tuple(folders)
        for folder in folders:
            assert any(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_drive_that_is_not_named_is_asked_for(monkeypatch):
    config = {ZERO: {"offload_param": {"device": "nvme"}}}
    with pytest.raises(ConfigError, match="nvme_path: expected a folder"):
        OffloadEngine(model(), config=config)


def test_without_a_drive_the_store_is_removed_at_the_end(tmp_path, monkeypatch, caplog):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = {**BF16, ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    with OffloadEngine(model(), config=config, **SMALL) as engine:
        (folder,) = tmp_path.iterdir()
        assert str(folder) in caplog.text
        assert engine.config.durability == "none"
        for index in range(3):
            step(engine, index)
    assert not list(tmp_path.iterdir())


FETCHES = {"placement": "disk", "param_persistence_threshold": 0, "host_memory": "64MiB"}


def fetches_of_a_step(tmp_path, zero: dict, **settings) -> tuple[int, int, dict]:
    """Fetches of the third step, those of them that were prefetched, and the masters."""
    with engine_of(tmp_path, {ZERO: zero}, **{**FETCHES, **settings}, resume=False) as engine:
        for index in range(2):
            step(engine, index)
        before, hits = sum(engine.metrics.fetches.values()), engine.metrics.hits
        step(engine, 2)
        masters = {n: engine.full_fp32_param(p) for n, p in engine.module.named_parameters()}
        fetched = sum(engine.metrics.fetches.values()) - before
        return fetched, engine.metrics.hits - hits, masters


def assert_same_masters(*found: dict) -> None:
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in found[0])


def test_small_tensors_stay_up_to_their_sum(tmp_path):
    def small(**zero) -> tuple[int, dict]:
        zero = {"stage3_param_persistence_threshold": 3000, **zero}
        settings = {**SMALL, "resume": False}
        with engine_of(tmp_path, {ZERO: zero}, **settings) as engine:
            for index in range(3):
                step(engine, index)
            unit = engine._parts.ground.blueprint.found.persistent
            slots = unit.slots if unit else ()
            kept = sum(math.prod(slot.tensor.shape) for slot in slots)
            masters = {n: engine.full_fp32_param(p) for n, p in engine.module.named_parameters()}
            return kept, masters

    (every, masters), (some, same), (none, too) = (
        small(),
        small(stage3_model_persistence_threshold=1000),
        small(stage3_model_persistence_threshold=0),
    )
    assert every > 2000
    assert 900 < some <= 1000  # biases and norms have 48 or 144 elements
    assert none == 0
    assert_same_masters(masters, same, too)


def test_nothing_is_fetched_ahead_with_a_bucket_of_nothing(tmp_path):
    fetched, hits, masters = fetches_of_a_step(tmp_path, {})
    assert hits > fetched / 2
    _, none, same = fetches_of_a_step(tmp_path, {"stage3_prefetch_bucket_size": 0})
    assert none == 0
    _, many, too = fetches_of_a_step(tmp_path, {"stage3_prefetch_bucket_size": 1e9})
    assert many > fetched / 2  # a fetch or two may come too late, as above
    assert_same_masters(masters, same, too)


def test_units_that_are_used_again_soon_stay(tmp_path):
    """Backward finds them; with `max_live_parameters` only what fits."""
    fetched, _, masters = fetches_of_a_step(tmp_path, {})
    assert fetched % 2 == 1  # twice each, but for the last of forward, with which backward begins
    reuse = {"stage3_max_reuse_distance": 1e9}
    kept, _, same = fetches_of_a_step(tmp_path, reuse)
    assert kept == (fetched + 1) // 2
    none, _, also = fetches_of_a_step(tmp_path, {"stage3_max_reuse_distance": 0})
    assert none == fetched
    bounded, _, too = fetches_of_a_step(tmp_path, {**reuse, "stage3_max_live_parameters": 1})
    assert kept < bounded < fetched
    assert_same_masters(masters, same, also, too)


def test_where_the_bound_of_live_parameters_is_the_device_holds_no_more(tmp_path):
    zero = {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 1e9}
    with engine_of(tmp_path, {ZERO: zero}, **FETCHES) as engine:
        blueprint = engine._parts.ground.blueprint
        largest = max(unit.num_elems for unit in blueprint.units)
        assert blueprint.weight_capacity == 2 * largest * 4
    free = {**zero, "stage3_max_live_parameters": 5 * largest // 2}
    with engine_of(tmp_path, {ZERO: free}, **FETCHES, resume=False) as engine:
        assert engine._parts.ground.blueprint.weight_capacity == 5 * largest // 2 * 4
