"""Every step against `torch.optim.AdamW` on an fp32 master, fed with the gradients that we kept."""

import pytest
import torch
from case import FP32, Case
from torch import Tensor

MAX_ULP = 4


def torch_step(
    before: dict[str, Tensor], grad: Tensor, *, num_steps: int, settings: dict[str, object]
) -> Tensor:
    """What torch makes of this master, these moments and this gradient."""
    param = torch.nn.Parameter(before["master"].clone())
    optimizer = torch.optim.AdamW([param], **settings)
    optimizer.state[param] = {
        "step": torch.tensor(float(num_steps)),
        "exp_avg": before["exp_avg"].clone(),
        "exp_avg_sq": before["exp_avg_sq"].clone(),
    }
    param.grad = grad
    optimizer.step()
    return param.detach()


def state_of(engine, param) -> dict[str, Tensor]:
    return {
        "master": engine.full_fp32_param(param).clone(),
        "exp_avg": engine.full_optimizer_state(param, "exp_avg").clone(),
        "exp_avg_sq": engine.full_optimizer_state(param, "exp_avg_sq").clone(),
    }


def ulps(ours: Tensor, theirs: Tensor, lr: float) -> float:
    """The largest difference, in units in the last place of max(|w|, lr)."""
    scale = theirs.abs().clamp(min=lr)
    spacing = torch.nextafter(scale, torch.full_like(scale, torch.inf)) - scale
    return float(((ours - theirs).abs() / spacing).max())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_step_is_within_four_ulp_of_torch(accumulation, tmp_path):
    case = Case(accumulation=accumulation, clipping=0.5, num_steps=6)
    lr = case.groups[0].lr
    with case.engine(tmp_path) as engine:
        params = dict(engine.module.named_parameters())
        for step in range(case.num_steps):
            before = {name: state_of(engine, param) for name, param in params.items()}
            for index, batch in enumerate(case.batches(step)):
                engine.backward(engine(*batch))
                if index == accumulation - 1:
                    grads = {name: engine.kept_grad(p).to(FP32) for name, p in params.items()}
                engine.step()
            factor = min(1.0, case.clipping / (engine.grad_norm + 1e-6))
            assert factor < 1.0, "the case must clip"
            for name, param in params.items():
                expected = torch_step(
                    before[name],
                    grads[name].view(param.shape) * factor,
                    num_steps=step,
                    settings=case.groups[0].settings(),
                )
                ours = engine.full_fp32_param(param)
                assert not torch.equal(ours, before[name]["master"])
                assert ulps(ours, expected, lr) <= MAX_ULP, (step, name)
