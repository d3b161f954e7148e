"""The model and the batches that every engine of bench_step trains.

    tokens -> embedding + positions -> [block] * depth -> norm -> head -> cross entropy

All engines start from the same bf16 weights (seed 0) and see the same batches (seed 1), so their
losses must agree step by step. Only torch and the standard library: the peer's interpreter
imports this file too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """What is trained. `products` says how a bf16 weight is multiplied, the same for all engines:
    "bf16" leaves it to torch, "fp32" casts both factors up first (faster where the CPU has no
    bf16 products)."""

    width: int = 1024
    depth: int = 8
    vocab: int = 8192
    seq: int = 256
    batch: int = 1
    products: str = "bf16"
    checkpointing: bool = False

    @property
    def tokens(self) -> int:
        return self.seq * self.batch

    @property
    def num_params(self) -> int:
        block = 12 * self.width * self.width + 4 * self.width
        return self.depth * block + (2 * self.vocab + self.seq + 2) * self.width


class _UpcastProduct(torch.autograd.Function):
    """x w^T with both factors cast to fp32 in forward and backward, the result cast back."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float().t()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        wide = grad.float()
        rows = wide.flatten(0, -2)
        grad_weight = rows.t() @ x.float().flatten(0, -2)
        return (wide @ weight.float()).to(x.dtype), grad_weight.to(weight.dtype)


class Linear(nn.Linear):
    """A product without bias whose arithmetic is the Shape's `products`."""

    def __init__(self, inputs: int, outputs: int, products: str) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.upcast = products == "fp32"

    def forward(self, x: Tensor) -> Tensor:
        if self.upcast and self.weight.dtype != torch.float32:
            return _UpcastProduct.apply(x, self.weight)
        return F.linear(x, self.weight)


class Block(nn.Module):
    """Causal attention and a four times wider feed-forward layer, both residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, products = shape.width, shape.products
        self.heads = max(1, width // 64)
        self.upcast = products == "fp32"
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = Linear(width, 3 * width, products)
        self.out = Linear(width, width, products)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = Linear(width, 4 * width, products)
        self.down = Linear(4 * width, width, products)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if self.upcast:
            query, key, value = query.float(), key.float(), value.float()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).to(x.dtype)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """Called with tokens and the tokens that follow them, it returns the mean cross entropy.

    `dtype`: blocks are converted as they are made, so that one at a time is there in fp32.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.checkpointing = shape.checkpointing
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.seq, shape.width)
        self.blocks = nn.ModuleList([])
        for _ in range(shape.depth):
            self.blocks.append(Block(shape).to(dtype))
        self.norm = nn.LayerNorm(shape.width)
        self.head = Linear(shape.width, shape.vocab, shape.products)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embedding(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            if self.checkpointing:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        logits = self.head(self.norm(hidden)).flatten(0, 1).float()
        return F.cross_entropy(logits, y.flatten())


def build(shape: Shape) -> GPT:
    """Make the bf16 model, the same weights in every process."""
    torch.manual_seed(0)
    return GPT(shape, torch.bfloat16).to(torch.bfloat16)


def batches(shape: Shape) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, next tokens), each (batch, seq) int64, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(shape.vocab, (shape.batch, shape.seq + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def faster_products(shape: Shape) -> str:
    """Time the feed-forward product and its two gradients both ways; name the faster one."""
    best = {}
    for products in ("bf16", "fp32"):
        layer = Linear(shape.width, 4 * shape.width, products).to(torch.bfloat16)
        x = torch.randn(shape.tokens, shape.width, dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(shape.tokens, 4 * shape.width, dtype=torch.bfloat16)
        times = []
        for _ in range(15):
            start = time.perf_counter()
            layer(x).backward(grad)
            times.append(time.perf_counter() - start)
        best[products] = min(times)
    return min(best, key=best.__getitem__)
