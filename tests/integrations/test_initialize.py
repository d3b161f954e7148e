"""A DeepSpeed script runs with `import offload as deepspeed`: signature, calls, checkpoints."""

import argparse
import logging
import math

import models
import pytest
import torch
from recipe_runs import (
    NAMES,
    NUM_STEPS,
    SMALL,
    TWINS,
    Result,
    assert_equal,
    batches,
    config_file,
    model,
)  # fmt: skip

import offload as deepspeed
from offload import ConfigError, StateError

BF16 = {"bf16": {"enabled": True}, "gradient_clipping": 0.0}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


def start(tmp_path, config=None, **settings):
    config = {**BF16, **ADAM} if config is None else config
    settings = {"model": model(), "nvme_path": tmp_path, **SMALL, **settings}
    return deepspeed.initialize(config=config, **settings)


def train(engine, name: str, first: int = 0, stop: int = NUM_STEPS) -> Result:
    result = Result()
    for step in range(first, stop):
        for tokens, labels in batches(name, step):
            loss = engine(tokens, labels)
            engine.backward(loss)
            engine.step()
            result.losses.append(loss.item())
        result.norms.append(engine.get_global_grad_norm())
    return collect(engine, result)


def collect(engine, result: Result) -> Result:
    for key, parameter in engine.module.named_parameters():
        result.masters[key] = engine.offload.full_fp32_param(parameter).flatten()
    return result


@pytest.mark.parametrize("name", NAMES)
def test_a_script_trains_as_in_memory(name, tmp_path):
    """As DeepSpeed's tutorials write it: arguments, initialize, the three verbs."""
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1)
    path = config_file(name, tmp_path)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    deepspeed.init_distributed()
    net = model()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args, model=net, model_parameters=net.parameters(), **SMALL
    )
    with engine:
        assert (engine.optimizer, engine.lr_scheduler, loader) == (optimizer, scheduler, None)
        assert_equal(train(engine, name), name)
        twin = TWINS[name]
        assert engine.global_steps == NUM_STEPS
        assert engine.micro_steps == NUM_STEPS * twin.accumulation
        assert engine.gradient_accumulation_steps() == twin.accumulation
        assert engine.train_micro_batch_size_per_gpu() == 2
        assert engine.train_batch_size() == 2 * twin.accumulation
        assert engine.global_samples == NUM_STEPS * 2 * twin.accumulation
        assert engine.get_lr() == scheduler.get_last_lr()
        assert engine.module is net
        assert engine.fp16_enabled() is (twin.dtype is torch.float16)
        assert engine.bfloat16_enabled() is (twin.dtype is torch.bfloat16)
        assert engine.gradient_clipping() == twin.clipping
        assert engine.zero_optimization_stage() == 3
        assert (engine.local_rank, engine.world_size, str(engine.device)) == (0, 1, "cpu")


class Affine(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return self.layer(x).square().mean()


def test_inputs_in_the_files_type_reach_a_model_that_computes_in_another(tmp_path):
    torch.manual_seed(0)
    net, x = Affine(), torch.randn(4, 32)
    engine, *_ = start(tmp_path, model=net)  # which computes in fp32
    with engine:
        for inputs in (x.bfloat16(), x, x.bfloat16()):
            engine.backward(engine(inputs))
            engine.step()
    assert net.seen == [torch.float32] * 3
    assert engine.global_steps == 3
    with pytest.raises(RuntimeError, match="dtype"):
        net(x.bfloat16())  # nothing is left on the model


def test_the_boundary_is_where_the_next_step_updates(tmp_path):
    config = {**BF16, **ADAM, "gradient_accumulation_steps": 3}
    engine, *_ = start(tmp_path, config)
    with engine:
        seen = []
        for micro in range(6):
            engine.backward(engine(*models.batch(micro)))
            boundary, before = engine.is_gradient_accumulation_boundary(), engine.global_steps
            engine.step()
            seen.append((boundary, engine.global_steps - before))
        assert seen == [(False, 0), (False, 0), (True, 1)] * 2


def test_zero_grad_in_every_micro_step_keeps_the_window(tmp_path):
    """Before forward or after step(), as scripts write it: the numbers are those without it."""
    config = {**BF16, **ADAM, "gradient_accumulation_steps": 2}
    found = []
    for where in ("nowhere", "before", "after"):
        engine, *_ = start(tmp_path, config, resume=False)
        with engine:
            for micro in range(6):
                if where == "before":
                    engine.zero_grad()
                engine.backward(engine(*models.batch(micro)))
                engine.step()
                if where == "after":
                    engine.zero_grad()
            assert engine.global_steps == 3
            found.append(collect(engine, Result()).masters)
    for other in found[1:]:
        assert not [key for key in other if not torch.equal(other[key], found[0][key])]


def test_zero_grad_forgets_outside_a_window(tmp_path):
    engine, *_ = start(tmp_path)
    with engine:
        engine.backward(engine(*models.batch(0)))
        engine.zero_grad()
        assert engine.offload.kept_grad(engine.module.head.weight) is None


def test_smaller_calls_are_there_or_say_what_to_do(tmp_path):
    config = {
        **BF16, **ADAM, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    engine, *_ = start(tmp_path, config)
    weights = {key: torch.full_like(value, 0.5) for key, value in model().state_dict().items()}
    assert engine.get_batch_info() == (4, 2, 2)
    applied = []
    for micro in range(6):
        factor = math.inf if micro == 2 else 1.0
        engine.backward(engine(*models.batch(micro)) * factor)
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, False, False, True]
    engine.load_module_state_dict(weights)
    assert engine.offload.full_fp32_param(engine.module.head.weight).eq(0.5).all()
    with pytest.raises(StateError, match="custom_load_fn"):
        engine.load_module_state_dict(weights, custom_load_fn=print)
    with pytest.raises(StateError, match="gradient_accumulation_steps"):
        engine.no_sync()
    with pytest.raises(StateError, match="managed_gradient_accumulation"):
        engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(StateError, match="made with, got 8"):
        engine.set_train_batch_size(8)
    engine.destroy()
    with pytest.raises(StateError, match="closed"):
        engine(*models.batch(0))


def test_losses_go_to_the_csv_files(tmp_path):
    monitor = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "run"}
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    (tmp_path / "store").mkdir()
    engine, *_ = start(tmp_path / "store", {**BF16, **ADAM, **sizes, "csv_monitor": monitor})
    with engine:
        losses = train(engine, NAMES[0], stop=3).losses
    lines = (tmp_path / "csv" / "run" / "Train_Samples_train_loss.csv").read_text().split()
    means = [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2], strict=True)]
    assert lines == ["step,train_loss", *(f"{4 * n + 4},{mean!r}" for n, mean in enumerate(means))]


def test_an_optimizer_and_a_scheduler_of_the_script_replace_the_files(tmp_path):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    config = {**BF16, **ADAM, "scheduler": {"type": "WarmupLR", "params": {}}}
    made = []

    def halving(of):
        made.append(of)
        return torch.optim.lr_scheduler.StepLR(of, 1, 0.5)

    engine, given, _, scheduler = start(
        tmp_path, config, model=net, optimizer=optimizer, lr_scheduler=halving
    )
    with engine:
        assert made == [given]
        rates = []
        for step in range(3):
            rates += engine.get_lr()
            engine.backward(engine(*models.batch(step)))
            engine.step()
        assert rates == [0.5, 0.25, 0.125]
        assert scheduler is engine.lr_scheduler


def test_a_scheduler_does_not_step_where_the_step_is_skipped(tmp_path):
    config = {**BF16, **ADAM, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    engine, *_ = start(tmp_path, config)
    with engine:
        rates = []
        for step in range(5):
            factor = math.inf if step in (1, 2) else 1.0
            engine.backward(engine(*models.batch(step)) * factor)
            engine.step()
            rates += engine.get_lr()
        assert engine.skipped_steps == 2
        assert rates[0] == rates[1] == rates[2] < rates[3] < rates[4]


@pytest.mark.parametrize("how", ["checkpoint", "resume"])
def test_a_run_goes_on_with_its_schedule(how, tmp_path):
    name = "zero3_nvme.json"
    folders = [tmp_path / "a", tmp_path / ("a" if how == "resume" else "b")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    engine, *_ = deepspeed.initialize(
        model=model(), config=config_file(name, folders[0]), **SMALL
    )  # fmt: skip
    with engine:
        before = train(engine, name, stop=2)
        assert engine.save_checkpoint(tmp_path / "ckpt", client_state={"epoch": 7}) is True
        assert (tmp_path / "ckpt" / "latest").read_text().strip() == "global_step2"
    engine, _, _, scheduler = deepspeed.initialize(
        model=model(), config=config_file(name, folders[1]), **SMALL,
        resume=how == "resume",
    )  # fmt: skip
    with engine:
        if how == "checkpoint":
            path, client_state = engine.load_checkpoint(tmp_path / "ckpt")
            assert path == str(tmp_path / "ckpt" / "global_step2")
            assert client_state == {"epoch": 7}
        assert engine.global_steps == scheduler.last_epoch == 2
        after = train(engine, name, first=2)
    after.losses[:0], after.norms[:0] = before.losses, before.norms
    assert_equal(after, name)


def test_checkpoints_take_deepspeeds_arguments(tmp_path):
    config = {**BF16, **ADAM, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}
    engine, _, _, scheduler = start(tmp_path, config)
    with engine:
        assert engine.load_checkpoint(tmp_path / "none") == (None, {})
        train(engine, NAMES[1], stop=1)
        engine.save_checkpoint(tmp_path / "ckpt", tag=1)
        train(engine, NAMES[1], first=1, stop=3)
        engine.save_checkpoint(tmp_path / "ckpt", tag="later", save_latest=False)
        assert (tmp_path / "ckpt" / "latest").read_text().strip() == "1"
        rate = engine.get_lr()
        path, _ = engine.load_checkpoint(tmp_path / "ckpt", load_lr_scheduler_states=False)
        assert path is not None
        assert engine.global_steps == 1
        assert (scheduler.last_epoch, engine.get_lr()) == (3, rate)
        engine.load_checkpoint(tmp_path / "ckpt", tag="later")
        assert (engine.global_steps, scheduler.last_epoch) == (3, 3)
        with pytest.raises(StateError, match="expected a load of weights and optimizer together"):
            engine.load_checkpoint(tmp_path / "ckpt", load_module_only=True)


@pytest.mark.parametrize("filename", ["pytorch_model.bin", "model.safetensors"])
def test_16_bit_weights_are_one_file_that_replaces_the_last(filename, tmp_path):
    engine, *_ = start(tmp_path)
    with engine:
        for stop in (1, 3):
            train(engine, NAMES[1], stop=stop)
            assert engine.save_16bit_model(tmp_path / "out", filename)
            expected = {k: v.clone() for k, v in engine.module_state_dict().items()}
    path = tmp_path / "out" / filename
    assert [each.name for each in path.parent.iterdir()] == [filename]
    if filename.endswith(".bin"):
        found = torch.load(path)
    else:
        from safetensors.torch import load_file

        found = load_file(path)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype is torch.bfloat16
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_weights_may_be_left_out_of_the_file(tied, tmp_path):
    net = models.build(models.Decoder, tied=tied)
    net.embed.weight.requires_grad_(False)
    engine, *_ = start(tmp_path, model=net)
    with engine:
        engine.save_fp16_model(tmp_path / "out", exclude_frozen_parameters=True)
    found = torch.load(tmp_path / "out" / "pytorch_model.bin")
    names = {name for name, p in net.named_parameters() if p.requires_grad}
    assert found.keys() == names


def test_gathered_parameters_are_read_and_edited(tmp_path):
    net = model()
    before = net.head.weight.detach().clone()
    with deepspeed.zero.GatheredParameters(net.head.weight):  # no engine yet
        assert torch.equal(net.head.weight, before)
    engine, *_ = start(tmp_path, model=net, param_persistence_threshold=0)
    with engine:
        up = net.blocks[0].up.weight
        engine(*models.batch(0))
        with pytest.raises(StateError), torch.no_grad():
            up.sum()
        groups = [[net.head.weight], (up,)]
        with deepspeed.zero.GatheredParameters(groups, modifier_rank=0), torch.no_grad():
            assert torch.equal(net.head.weight, before.bfloat16().float())
            up.fill_(0.25)
        assert engine.offload.full_fp32_param(up).eq(0.25).all()
        off = deepspeed.zero.GatheredParameters(up, enabled=False)
        with pytest.raises(StateError), torch.no_grad(), off:
            up.sum()


def is_mapped(tensor: torch.Tensor) -> bool:
    """True where its memory is a file's."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            area, _, _, _, inode, *_ = line.split()
            first, last = (int(end, 16) for end in area.split("-"))
            if first <= tensor.data_ptr() < last:
                return inode != "0"
    raise AssertionError("its memory is not mapped")


def test_a_model_made_under_init_is_on_disk_and_trains_the_same(tmp_path):
    name = "zero3_nvme.json"
    path = config_file(name, tmp_path)
    options = {"width": 160, "num_blocks": 1}
    with deepspeed.zero.Init(config_dict_or_path=path):
        net = models.build(models.Decoder, **options)
    plain = models.build(models.Decoder, **options)
    for (key, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), key
    assert is_mapped(net.blocks[0].up.weight)
    assert not is_mapped(plain.blocks[0].up.weight)
    small = {**SMALL, "device_memory": "32MiB"}
    engine, *_ = deepspeed.initialize(model=net, config=path, **small)
    with engine:
        ours = [train(engine, name).losses]
    engine, *_ = deepspeed.initialize(
        model=plain, config=path, resume=False, **small
    )  # fmt: skip
    with engine:
        assert ours == [train(engine, name).losses]


def test_init_without_a_drive_says_so(caplog):
    with deepspeed.zero.Init(config={"zero_optimization": {"stage": 3}}):
        model()
    assert "made in memory" in caplog.text


def test_training_data_comes_in_micro_batches(tmp_path):
    data = torch.utils.data.TensorDataset(torch.arange(11))
    config = {**BF16, **ADAM, "train_micro_batch_size_per_gpu": 4}
    for drop, sizes in ((False, [4, 4, 3]), (True, [4, 4])):
        engine, _, loader, _ = start(
            tmp_path, {**config, "dataloader_drop_last": drop}, training_data=data, resume=False
        )
        with engine:
            seen = [len(each) for (each,) in loader]
            assert seen == sizes
            assert engine.training_dataloader is loader


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"config": None}, "expected a configuration, got none"),
        ({"config_params": {}}, "expected one configuration, got config and config_params"),
        ({"model": None}, "expected a model, got none"),
        ({"mpu": object()}, "expected mpu=None"),
        ({"config": {**BF16}}, "expected an optimizer in the configuration or as an argument"),
        ({"optimizer": 3}, "or a callable that makes one, got 3"),
        ({"training_data": [1]}, "expected a batch size beside training_data"),
    ],
)
def test_a_mistake_is_told_before_anything_is_made(given, told, tmp_path):
    settings = {"model": model(), "config": {**BF16, **ADAM}, "nvme_path": tmp_path, **given}
    with pytest.raises(ConfigError, match=told):
        deepspeed.initialize(**settings)
    assert not list(tmp_path.iterdir())


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="expected 1 process, got 2"):
        deepspeed.init_distributed()
    with pytest.raises(ConfigError, match="expected 1 process, got 2"):
        deepspeed.initialize(model=model(), config={})


def test_initialize_shows_the_log_where_nobody_else_does(monkeypatch, tmp_path):
    logger = logging.getLogger("offload")
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logger, "handlers", [])
    level = logger.level
    engine, *_ = start(tmp_path)
    with engine:
        assert len(logger.handlers) == 1
    logger.setLevel(level)


def test_what_the_model_has_is_reached_through_the_engine(tmp_path):
    engine, *_ = start(tmp_path)
    with engine:
        assert engine.run_block == engine.module.run_block
        with pytest.raises(AttributeError):
            engine.no_such_thing  # noqa: B018
