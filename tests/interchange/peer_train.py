"""Train a tiny model with DeepSpeed and save a checkpoint, with what it holds as plain tensors.

`python peer_train.py FOLDER fp32|bf16`, in the peer's interpreter; RANK and WORLD_SIZE are set.
"""

import os
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn


class Model(nn.Module):
    """Tied, frozen and small tensors, sizes that no number of ranks divides, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 23), nn.GELU(), nn.Linear(23, 10)) for _ in range(2)
        )
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(10, 7).requires_grad_(False)
        self.register_buffer("count", torch.tensor(3.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden).float().logsumexp(-1).mean() + self.frozen(hidden).float().mean()


def main() -> None:
    folder, half = sys.argv[1], sys.argv[2] == "bf16"
    torch.manual_seed(0)
    model = Model().bfloat16() if half else Model()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.ndim == 1], "weight_decay": 0.0},
    ]
    zero = {
        "stage": 3,
        "sub_group_size": 300,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "stage3_param_persistence_threshold": 20,
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": half},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    deepspeed.init_distributed(dist_backend="gloo")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        engine.backward(engine(torch.randint(13, (2, 5), generator=generator)))
        engine.step()
    engine.save_checkpoint(folder, tag="step")
    held = {
        name: {
            "master": safe_get_full_fp32_param(parameter),
            "exp_avg": safe_get_full_optimizer_state(parameter, "exp_avg"),
            "exp_avg_sq": safe_get_full_optimizer_state(parameter, "exp_avg_sq"),
        }
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                held[name] = {"master": parameter.detach().float().clone()}
    if os.environ["RANK"] == "0":
        torch.save(held, f"{folder}/held.pt")


if __name__ == "__main__":
    main()
