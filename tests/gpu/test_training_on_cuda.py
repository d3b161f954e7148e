"""Offloaded training on a CUDA device: the numbers of the same update in the device's memory.

The same tests run on the processor, so that what is wrong with them shows without a GPU.
"""

import math

import models
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from offload import OffloadEngine, kernels
from offload.errors import ConfigError

ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
NUM_STEPS = 6
LR = 1e-2


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Attention by plain products: its fused kernels add up in any order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


def batch(step: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = models.batch(step)
    return inputs.to(device), labels.to(device)


def train_offloaded(folder, device, **settings) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = OffloadEngine(
        models.build(models.Decoder), nvme_path=folder, lr=LR, device=device, placement="disk",
        dtype=torch.bfloat16, compute_dtype=torch.float32, param_persistence_threshold=0,
        host_memory="16MiB", device_memory="16MiB", chunk_elems=4096, **settings,
    )  # fmt: skip
    with engine:
        losses = []
        for step in range(NUM_STEPS):
            loss = engine(*batch(step, device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        names = [name for name, _ in engine.module.named_parameters()]
        assert all(engine.metrics.fetches[name] >= 2 for name in ("embed", "blocks.0", "head"))
        return losses, {name: engine.full_fp32_param(name) for name in names}


def train_in_memory(device) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The model on the device, its update by our kernel on host tensors."""
    model = models.build(models.Decoder).to(device)
    state = {}
    for name, param in model.named_parameters():
        flat = param.detach().cpu().flatten().float()
        hi, lo = (
            torch.empty_like(flat, dtype=torch.bfloat16),
            torch.empty_like(flat, dtype=torch.int16),
        )
        kernels.split(flat, hi, lo)
        state[name] = (hi, lo, torch.zeros_like(flat), torch.zeros_like(flat))
        param.data.copy_(hi.view(param.shape))
    losses = []
    for step in range(NUM_STEPS):
        loss = model(*batch(step, device))
        loss.backward()
        row = kernels.adam_row(LR, (0.9, 0.999), 1e-8, 0.01, step + 1, decoupled=True)
        for name, param in model.named_parameters():
            grad = param.grad.flatten().bfloat16().cpu()
            kernels.adam_split(*state[name], grad, row=row)
            param.data.copy_(state[name][0].view(param.shape))
            param.grad = None
        losses.append(loss.item())
    masters = {}
    for name, (hi, lo, _, _) in state.items():
        masters[name] = torch.empty(len(hi))
        kernels.join(hi, lo, masters[name])
    return losses, masters


CLIPPING = {"none": 0.0, "some": 1.65, "all": 1e-3}
PLACES = [(weights, state) for weights in ("device", "host", "disk") for state in ("host", "disk")]
# On the processor tests/parity/test_placements.py has the others.
MATRIX = [
    pytest.param("cpu", ("host", "disk"), "some", id="cpu"),
    *(
        pytest.param("cuda", place, rate, id="-".join([*place, rate]), marks=ON_CUDA)
        for place in PLACES
        for rate in CLIPPING
    ),
]


def twenty_steps(
    folder, device, **settings
) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    """Losses, masters, elements kept and redone; the eighth step's loss is not finite."""
    folder.mkdir()
    engine = OffloadEngine(
        models.build(models.Decoder), nvme_path=folder, lr=LR, device=device,
        dtype=torch.bfloat16, compute_dtype=torch.float32, param_persistence_threshold=0,
        host_memory="16MiB", device_memory="16MiB", chunk_elems=4096, **settings,
    )  # fmt: skip
    with engine:
        losses = []
        for step in range(20):
            loss = engine(*batch(step, device)) * (math.inf if step == 7 else 1.0)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert engine.skipped_steps == 1
        names = [name for name, _ in engine.module.named_parameters()]
        history = engine._parts.speculator.history
        masters = {name: engine.full_fp32_param(name) for name in names}
        return losses, masters, history.kept_elems, history.redone_elems


@pytest.mark.parametrize(("device", "place", "rate"), MATRIX)
def test_overlapped_steps_equal_held_ones_wherever_things_are(device, place, rate, tmp_path):
    clipping = {"gradient_clipping": CLIPPING[rate]}
    held = twenty_steps(tmp_path / "held", device, overlap="hold", placement="disk", **clipping)
    where = {"weights": place[0], "state": place[1]}
    ours = twenty_steps(tmp_path / "ours", device, overlap="speculate", placement=where, **clipping)
    assert ours[0] == held[0]
    assert all(torch.equal(ours[1][name], held[1][name]) for name in held[1])
    assert held[2] == 0
    assert rate == "some" or (ours[2] > 0) is (rate == "none")
    assert (ours[3] > 0) is (rate != "none")  # the step with the Inf is dropped, not redone


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
def test_state_on_the_device_is_refused_with_the_reason(device, tmp_path):
    with pytest.raises(ConfigError, match="Updates run on the processor"):
        twenty_steps(tmp_path / "store", device, placement={"state": "device"})


@on_both
@pytest.mark.parametrize("overlap", ["hold", "speculate"])
def test_training_on_the_device_equals_the_run_in_its_memory(overlap, device, tmp_path):
    losses, masters = train_offloaded(tmp_path, device, overlap=overlap)
    true_losses, true_masters = train_in_memory(device)
    assert losses == pytest.approx(true_losses, rel=1e-5)
    for name, master in masters.items():
        assert torch.allclose(master.flatten(), true_masters[name], rtol=1e-4, atol=1e-5), name


@on_both
def test_holding_and_speculating_give_the_same_bits(device, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    held = train_offloaded(tmp_path / "a", device, overlap="hold")
    early = train_offloaded(tmp_path / "b", device, overlap="speculate")
    assert held[0] == early[0]
    for name, master in held[1].items():
        assert torch.equal(master, early[1][name]), name
