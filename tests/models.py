"""Small models that tests share: a decoder whose awkward corners are switches, and oddities.

Every model maps (inputs, labels) to a loss, is built on the CPU from the global generator, and
has tensors of different sizes, so that chunk borders fall inside some of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB = 61


class Block(nn.Module):
    """Pre-norm attention and a gated MLP."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, seq, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    """A causal language model.  `checkpointing`: None, "reentrant" or "nonreentrant"."""

    def __init__(
        self,
        *,
        vocab: int = VOCAB,
        width: int = 48,
        num_blocks: int = 3,
        num_heads: int = 2,
        tied: bool = False,
        checkpointing: str | None = None,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def run_block(self, block: Block, x: Tensor) -> Tensor:
        if self.checkpointing is None or not self.training:
            return block(x)
        return checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.norm(x)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return token_loss(self.head(self.hidden(tokens)), labels)


class OutsideWeight(Decoder):
    """Uses weights where their modules' forward does not run: as head, and a block's inside."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.head = None

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.hidden(tokens)
        hidden = F.linear(hidden, self.blocks[0].out.weight) + hidden
        return token_loss(F.linear(hidden, self.embed.weight), labels)


class RepeatedBlock(Decoder):
    """Runs its blocks twice each, first in order, then backwards."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in [*self.blocks, *reversed(self.blocks)]:
            x = self.run_block(block, x)
        return self.norm(x)


class Branching(Decoder):
    """Skips the blocks that the parity of the first token selects: another trace every step."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        first = int(tokens[0, 0]) % 2
        for index, block in enumerate(self.blocks):
            if index % 2 == first or index == 0:
                x = self.run_block(block, x)
        return self.norm(x)


class VaryingUses(Decoder):
    """Runs its last block once or three times, as the first token says."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        times = 3 if int(tokens[0, 0]) % 2 else 1
        for block in [*self.blocks, *[self.blocks[-1]] * (times - 1)]:
            x = self.run_block(block, x)
        return self.norm(x)


class TorchAttention(nn.Module):
    """`nn.MultiheadAttention` reads `in_proj_weight`, `out_proj.weight` and calls no module."""

    def __init__(self, *, width: int = 48, num_blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(num_blocks)
        )
        self.pool = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x, _ = self.pool(x, x, x, need_weights=False)
        return token_loss(self.head(x), labels)


class UnusedParts(Decoder):
    """One block never runs; another runs only where the first token is even."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.never = nn.Linear(70, 70)
        self.sometimes = nn.Linear(self.embed.embedding_dim, self.embed.embedding_dim)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.hidden(tokens)
        if int(tokens[0, 0]) % 2 == 0:
            hidden = hidden + self.sometimes(hidden)
        return token_loss(self.head(hidden), labels)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build(kind: type[nn.Module], *, seed: int = 0, **options) -> nn.Module:
    """The same model, bit for bit, at every call."""
    torch.manual_seed(seed)
    return kind(**options)


def batch(index: int, *, size: int = 2, seq: int = 7, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Batch number `index` of an endless stream: tokens and the tokens after them."""
    generator = torch.Generator().manual_seed(1000 + index)
    text = torch.randint(vocab, (size, seq + 1), generator=generator)
    return text[:, :-1], text[:, 1:]
