"""Models with random control flow: each seed makes blocks and programs that run them.

program   [block 3, block 0 twice, group of (block 1, block 3), block 2 if the mean is positive]
forward   the first token chooses the program; some steps depend on the values themselves
"""

from __future__ import annotations

import random

import models
import torch
from models import VOCAB, token_loss
from torch import Tensor, nn

WIDTH = 16


class Mlp(nn.Module):
    """A residual block of its own inner width; `frozen`: the first matrix is not trained."""

    def __init__(self, inner: int, *, frozen: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)
        self.up.weight.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Nested(nn.Module):
    """A block that runs another one inside, and uses its weight once more from outside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList([inner, Mlp(8, frozen=False)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner[1](self.inner[0](self.mix(x)))
        return x + nn.functional.linear(x, self.inner[1].up.weight).mean(-1, keepdim=True)


class RandomFlow(nn.Module):
    """`flow`: the seed of its blocks and programs."""

    def __init__(self, flow: int) -> None:
        super().__init__()
        rng = random.Random(flow)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        blocks: list[nn.Module] = [
            Mlp(rng.choice((9, 24, 40)), frozen=rng.random() < 0.2)
            for _ in range(rng.randint(3, 6))
        ]
        if rng.random() < 0.5:
            blocks.append(Nested(rng.choice(blocks)))  # a block under two names
        if rng.random() < 0.5:
            blocks.append(blocks[0])
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.programs = [_program(rng, len(blocks)) for _ in range(3)]

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block, times, by_value in self.programs[int(tokens[0, 0]) % len(self.programs)]:
            if by_value and x.mean().item() < 0:  # a branch by what was computed
                continue
            for _ in range(times):
                x = self.blocks[block](x)
        return token_loss(self.head(x), labels)


def _program(rng: random.Random, num_blocks: int) -> list[tuple[int, int, bool]]:
    """Some of the blocks in a random order, with repeats: (block, times, by value)."""
    order = [rng.randrange(num_blocks) for _ in range(rng.randint(2, 2 * num_blocks))]
    return [(block, rng.choice((1, 1, 1, 2, 3)), rng.random() < 0.15) for block in order]


def batch(program: int, index: int) -> tuple[Tensor, Tensor]:
    """Batch number `index` of those that run `program`."""
    tokens, labels = models.batch(index, size=2, seq=5)
    tokens[0, 0] = program + 3 * (index % 10)
    return tokens, labels
