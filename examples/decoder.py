"""A Llama-style decoder in plain torch: RMSNorm, rotary positions, causal attention, SwiGLU.

Nothing here knows of offloading.  Token ids go in, the mean cross-entropy of the next token comes
out; whatever type the weights have, the arithmetic follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; 8/3 of the width, rounded up to 64, is the width inside the SwiGLU."""

    vocab: int = 256
    layers: int = 14
    width: int = 768
    heads: int = 12
    tied: bool = False
    checkpointing: bool = False

    @property
    def hidden(self) -> int:
        return -(-self.width * 8 // 3 // 64) * 64


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of channels: x is (batch, heads, seq, head), angles (seq, head / 2)."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Attention and SwiGLU, each behind a norm and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.gate_up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq, head)
        y = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, width))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.apply(self._initialise)
        if shape.tied:
            self.head.weight = self.embedding.weight
        half = shape.width // shape.heads // 2
        frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def _initialise(self, module: nn.Module) -> None:
        """Normal weights; what is added to the stream is scaled down by the number of additions."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):
            for linear in (module.out, module.down):
                nn.init.normal_(linear.weight, std=0.02 / (2 * self.shape.layers) ** 0.5)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats of `targets` (batch, seq) after `tokens` (batch, seq)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        angles = torch.outer(positions, self.frequencies.float())
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.shape.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, angles, use_reentrant=False)
            else:
                x = block(x, angles)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
