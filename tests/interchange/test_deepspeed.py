"""ZeRO-3 checkpoints come in with every bit: hand-made ones, and one that DeepSpeed writes."""

import contextlib
import os
import socket
import subprocess
from pathlib import Path

import models
import pytest
import torch
import zero_checkpoint
from click.testing import CliRunner
from torch import nn

import offload
from offload import OffloadEngine
from offload.cli.main import command
from offload.errors import ConfigError, StateError, StoreCorrupt, StoreError
from offload.interchange.deepspeed import ZeroCheckpoint
from offload.partition.unit import Role

HERE = Path(__file__).resolve().parent
SETTINGS = {"dtype": "bfloat16", "compute_dtype": "float32", "name": "t"}
STEP = 5
PEER_PYTHON = os.environ.get("OFFLOAD_PEER_PYTHON")  # read before the tests clear the environment


class Counting(models.Decoder):
    """With a frozen block and a buffer."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.blocks[1].requires_grad_(False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, *batch):
        self.calls += 1
        return super().forward(*batch)


def random_moments(model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: tuple(torch.rand(p.shape, generator=generator) * 1e-4 for _ in range(2))
        for name, p in model.named_parameters()
        if p.requires_grad
    }


@pytest.fixture(params=[(1, 1), (2, 3), (3, 2)], ids=["1 rank", "2 ranks", "3 ranks"])
def saved(request, tmp_path):
    """A checkpoint, the model and the moments in it."""
    model = models.build(Counting, seed=3)
    model.calls += 9
    moments = random_moments(model)
    num_ranks, num_groups = request.param
    zero_checkpoint.write(
        tmp_path / "ds/tag", model, moments,
        num_ranks=num_ranks, num_groups=num_groups, step=STEP,
    )  # fmt: skip
    return tmp_path / "ds", model, moments


def check_equal(engine, model, moments) -> None:
    for name, parameter in model.named_parameters():
        expected = parameter.detach()
        if name not in moments:  # frozen tensors are kept in the type that moves
            expected = engine.full_fp32_param(name).bfloat16().float()
            assert torch.allclose(expected, parameter, rtol=1 / 256)
        assert torch.equal(engine.full_fp32_param(name), expected), name
    for name, pair in moments.items():
        for state, expected in zip(("exp_avg", "exp_avg_sq"), pair, strict=True):
            assert torch.equal(engine.full_optimizer_state(name, state), expected), name


def test_a_deepspeed_script_goes_on_from_its_old_checkpoint(saved, tmp_path):
    folder, model, moments = saved
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    engine, *_ = offload.initialize(
        model=models.build(Counting), config=config, nvme_path=tmp_path, compute_dtype="fp32"
    )
    with engine:
        assert engine.load_checkpoint(folder) == (str(folder / "tag"), {})
        check_equal(engine.offload, model, moments)


@pytest.mark.parametrize("threshold", [0, 3000])
def test_masters_moments_and_counts_arrive_with_every_bit(threshold, saved, tmp_path):
    folder, model, moments = saved
    settings = SETTINGS | {"nvme_path": tmp_path, "param_persistence_threshold": threshold}
    with OffloadEngine(models.build(Counting), **settings) as engine:
        engine.load_deepspeed(folder)
        check_equal(engine, model, moments)
        assert engine.global_step == STEP
        assert engine.module.calls == 9
    with OffloadEngine(models.build(Counting), **settings, resume=True) as engine:
        check_equal(engine, model, moments)
        assert engine.global_step == STEP


def test_the_next_step_is_that_of_torch_with_these_moments(saved, tmp_path):
    """An update by hand, in double, with the step count that was loaded."""
    folder, model, moments = saved
    name = "blocks.0.qkv.weight"
    lr, beta1, beta2, eps, decay = 1e-2, 0.8, 0.9, 1e-8, 0.1
    settings = SETTINGS | {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
    with OffloadEngine(
        models.build(Counting), nvme_path=tmp_path, param_persistence_threshold=0, **settings
    ) as engine:
        engine.load_deepspeed(folder)
        engine.backward(engine(*models.batch(0)))
        grad = engine.kept_grad(name).double().view(model.get_parameter(name).shape)
        engine.step()
        updated = engine.full_fp32_param(name)
    mean, square = (moment.double() for moment in moments[name])
    mean, square = mean.lerp(grad, 1 - beta1), square.lerp(grad * grad, 1 - beta2)
    mean_hat, square_hat = mean / (1 - beta1 ** (STEP + 1)), square / (1 - beta2 ** (STEP + 1))
    weight = model.get_parameter(name).detach().double() * (1 - lr * decay)
    expected = weight - lr * mean_hat / (square_hat.sqrt() + eps)
    assert torch.allclose(updated.double(), expected, rtol=1e-6, atol=1e-7)


def test_the_command_makes_a_store_that_any_settings_resume(saved, tmp_path):
    folder, model, moments = saved
    arguments = ["import", tmp_path, "--deepspeed", folder, "--nvme", tmp_path, "--name", "t",
                 "--make", f"{__name__}:Counting", "--persistence-threshold", 0]  # fmt: skip
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    made = models.build(Counting)
    groups = [
        {"params": [p for p in made.parameters() if p.ndim > 1], "lr": 0.5},
        {"params": [p for p in made.parameters() if p.ndim == 1], "lr": 0.25},
    ]
    settings = SETTINGS | {"nvme_path": tmp_path, "param_persistence_threshold": 0, "resume": True}
    torch.manual_seed(12)
    drawn = torch.rand(2)
    torch.manual_seed(12)
    with OffloadEngine(made, params=groups, **settings) as engine:
        check_equal(engine, model, moments)
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.5, 0.25]
        assert torch.equal(torch.rand(2), drawn), "the random state is the caller's"


def test_another_model_is_refused_and_nothing_changes(saved, tmp_path):
    folder = saved[0]
    other = models.build(models.Decoder, num_blocks=4)
    before = other.embed.weight.detach().clone()
    with OffloadEngine(other, nvme_path=tmp_path, **SETTINGS) as engine:
        with pytest.raises(StateError, match=r"'blocks\.3\.norm_1\.weight'.*got none"):
            engine.load_deepspeed(folder)
        assert torch.equal(engine.full_fp32_param("embed.weight"), before)
        engine.backward(engine(*models.batch(0)))
        engine.step()


def test_a_missing_rank_a_missing_tag_and_another_stage_are_named(saved, tmp_path):
    folder = saved[0]
    with pytest.raises(StoreError, match="gone"):
        ZeroCheckpoint.open(folder, "gone")
    with pytest.raises(StoreError, match="stage 3"):
        ZeroCheckpoint.open(tmp_path)
    path = next((folder / "tag").glob("*rank_0_*optim*"))
    torch.save({"optimizer_state_dict": {"single_partition_of_fp32_groups": []}}, path)
    with pytest.raises(ConfigError, match="single_partition_of_fp32_groups"):
        ZeroCheckpoint.open(folder)
    path.unlink()
    with pytest.raises(StoreError, match="rank"):
        ZeroCheckpoint.open(folder)


def test_a_cut_file_is_refused(saved):
    folder = saved[0]
    path = next((folder / "tag").glob("*rank_0_*optim*"))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(StoreCorrupt, match="optim_states"):
        ZeroCheckpoint.open(folder)


def test_flat_groups_that_do_not_fit_the_shapes_are_refused(saved):
    folder = saved[0]
    for path in (folder / "tag").glob("*model_states.pt"):
        state = torch.load(path, weights_only=True)
        state["param_shapes"][0]["embed.weight"] = torch.Size([62, 48])
        torch.save(state, path)
    with pytest.raises(StoreCorrupt, match="flat groups"):
        ZeroCheckpoint.open(folder)


def make_folder(path: str) -> None:
    os.mkdir(path)


class Evil:
    """Makes a folder when an unrestricted reader unpickles it."""

    def __init__(self, function, path: Path) -> None:
        self.function, self.path = function, path

    def __reduce__(self):
        return self.function, (str(self.path),)


@pytest.mark.parametrize(("function", "refused"), [(os.mkdir, True), (make_folder, False)])
def test_nothing_in_a_checkpoint_is_executed(function, refused, saved, tmp_path):
    folder = saved[0]
    path = next((folder / "tag").glob("*rank_0_*model*"))
    state = torch.load(path, weights_only=True)
    state["evil"] = Evil(function, tmp_path / "made")
    torch.save(state, path)
    with pytest.raises(StoreCorrupt, match="code") if refused else contextlib.nullcontext():
        ZeroCheckpoint.open(folder)
    assert not (tmp_path / "made").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "made").exists(), "the trap works"


# --- the peer itself


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train_with_peer(folder: Path, dtype: str, num_ranks: int) -> None:
    if not PEER_PYTHON:
        pytest.skip("OFFLOAD_PEER_PYTHON does not name an interpreter with DeepSpeed")
    shared = {
        "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(PEER_PYTHON).parent), os.environ["PATH"]]),
    }  # fmt: skip
    children = [
        subprocess.Popen(
            [PEER_PYTHON, str(HERE / "peer_train.py"), str(folder), dtype],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    for child in children:
        output, _ = child.communicate()
        assert child.returncode == 0, output[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "num_ranks"), [("bf16", 1), ("fp32", 2)])
def test_what_deepspeed_wrote_is_read_as_deepspeed_holds_it(dtype, num_ranks, tmp_path):
    train_with_peer(tmp_path / "ds", dtype, num_ranks)
    held = torch.load(tmp_path / "ds/held.pt", weights_only=True)
    checkpoint = ZeroCheckpoint.open(tmp_path / "ds")
    assert checkpoint.shapes.keys() - held.keys() == {"head.weight"}
    assert checkpoint.global_steps == 3
    assert checkpoint.buffers["count"] == 3
    for name, states in held.items():
        assert checkpoint.shapes[name] == tuple(states["master"].shape)
        assert torch.equal(whole(checkpoint.master(name)), states["master"].flatten()), name
        assert checkpoint.step_count(name) == (3 if "exp_avg" in states else 0)
        for role in (Role.EXP_AVG, Role.EXP_AVG_SQ):
            shares = checkpoint.moment(name, role)
            assert (shares is None) is (role.value not in states)
            assert shares is None or torch.equal(whole(shares), states[role.value].flatten()), name


def whole(shares) -> torch.Tensor:
    out = torch.empty(shares.num_elems)
    for start in range(0, shares.num_elems, 17):  # pieces that cross the ranks' borders
        shares.read(start, out[start : start + 17])
    return out
