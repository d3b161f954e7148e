"""The README's example runs as it is printed, and does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from offload import OffloadEngine
from offload.optim import rules

README = Path(rules.__file__).with_name("README.md")
LR, MOMENTUM = 0.01, 0.75  # exact in binary, so that no momentum near zero has two signs


def signum_rule():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, object] = {"__name__": "example"}
    exec(code, names)
    return names["SignumRule"]()


def test_the_example_trains_as_the_paper_says(tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    momenta = {name: torch.zeros_like(value) for name, value in weights.items()}
    settings = {"lr": LR, "momentum": MOMENTUM, "host_memory": "4MiB", "compute_dtype": "fp32"}
    with OffloadEngine(
        model, nvme_path=tmp_path, optimizer=signum_rule(), device="cpu",
        param_persistence_threshold=0, **settings,
    ) as engine:  # fmt: skip
        for _ in range(4):
            engine.backward(engine(torch.randn(8, 32)).square().mean())
            for name, weight in weights.items():
                grad = engine.kept_grad(name).float().view(weight.shape)
                momenta[name] = MOMENTUM * momenta[name] + (1 - MOMENTUM) * grad
                weight -= LR * momenta[name].sign()
            engine.step()
        for name, weight in weights.items():
            ours = engine.full_fp32_param(name)
            torch.testing.assert_close(ours, weight, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(engine.full_optimizer_state(name, "exp_avg"), momenta[name])
        assert "signum" in engine.describe()
