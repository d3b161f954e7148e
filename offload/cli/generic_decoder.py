"""The generic decoder as a module: what `offload plan 7B` plans, and can be trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload.schedule.generic import DecoderShape


class Block(nn.Module):
    """Causal attention and SwiGLU, each behind a norm and added to the stream."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, width), the same out
        batch, seq, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        residual: Tensor = self.down(F.silu(gate) * up)
        return x + residual


class GenericDecoder(nn.Module):
    """Tokens and the tokens that follow them, each (batch, seq), to the mean cross entropy."""

    def __init__(self, shape: DecoderShape, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        logits = self.head(self.norm(hidden)).flatten(0, 1).float()
        return F.cross_entropy(logits, following.flatten())
