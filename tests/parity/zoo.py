"""Architectures and habits of models that are not plain decoders; each maps (inputs, labels) to a
loss, like those of `models.py`, and is built from the global generator.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from models import VOCAB, Block, Decoder, token_loss
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

WIDTH = 24


class Small(Decoder):
    """The decoder of `models.py`, narrower."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"width": WIDTH, "num_blocks": 2, **options})


class Recurrent(nn.Module):
    """LSTM and GRU keep lists of their weights beside the attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(2 * WIDTH, WIDTH, batch_first=True)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, _ = self.lstm(self.embed(tokens))
        x, _ = self.gru(x)
        state, outputs = None, []
        for step in x.unbind(1):  # the same module once a token
            state = self.cell(step, state)
            outputs.append(state[0])
        return token_loss(self.head(torch.stack(outputs, 1)), labels)


class Collections(nn.Module):
    """Parameters in lists and dicts, on the root, scalar and without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.mixers = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))
        self.heads = nn.ParameterDict(
            {"out": nn.Parameter(torch.randn(WIDTH, VOCAB)), "shift": nn.Parameter(torch.zeros(()))}
        )

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table[tokens] * self.scale
        for mixer in self.mixers:
            x = x + torch.tanh(x @ mixer) / len(self.mixers)
        x = torch.cat([x, self.nothing.expand(x.shape[0], 0, WIDTH)], 1)
        return token_loss(x @ self.heads["out"] / WIDTH + self.heads["shift"], labels)


class EncoderDecoder(nn.Module):
    """Two stacks over one embedding, cross attention, labels shifted inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.transformer = nn.Transformer(
            WIDTH, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=2 * WIDTH,
            dropout=0.0, batch_first=True,
        )  # fmt: skip
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        shifted = F.pad(labels[:, :-1], (1, 0))
        mask = nn.Transformer.generate_square_subsequent_mask(labels.shape[1])
        x = self.transformer(self.embed(tokens), self.embed(shifted), tgt_mask=mask)
        return token_loss(self.head(x), labels)


class Experts(nn.Module):
    """A layer's experts fused in 3-D tensors; the data says which of them are used."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(num_experts, WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ self.gate_up[expert]).chunk(2, -1)
            mixed = (F.silu(gate) * up) @ self.down[expert]
            out = out.index_add(0, token, mixed * weights[token, place, None])
        return out.view(shape)


class MixtureBlock(Block):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.experts = Experts(6)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.experts(self.norm_2(x))


class Mixture(Small):
    """Blocks with a mixture of fused experts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks = nn.ModuleList(MixtureBlock(WIDTH, 2) for _ in range(2))


class Vision(nn.Module):
    """Convolutions and batch norms, whose buffers and counter change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6), nn.ReLU())
            for _ in range(2)
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("positions", torch.linspace(0, 1, VOCAB, dtype=torch.float64))
        self.register_buffer("unsaved", torch.ones(2, dtype=torch.bool), persistent=False)
        self.head = nn.ConvTranspose1d(6, 6, 3, padding=1)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        image = F.one_hot(tokens, VOCAB)[:, None].float() + self.positions.float()
        x = F.relu(self.norm(self.stem(image)))
        for stage in self.stages:
            x = x + stage(x)
        return token_loss(
            self.head(x.flatten(2)).unflatten(2, (*tokens.shape[1:], -1)).mean(1), labels
        )


class SharedBlock(Small):
    """One block under two names, and a second that owns a weight of the first."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"num_blocks": 3, **options})
        self.blocks[2] = self.blocks[0]
        self.again = self.blocks[1]
        self.blocks[1].up.weight = self.blocks[0].up.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.again(super().hidden(tokens))


class Parametrized(Small):
    """Weights that are computed from others at each use; spectral norm has buffers of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        parametrizations.weight_norm(self.blocks[0].up)
        parametrizations.spectral_norm(self.blocks[1].up)
        parametrizations.orthogonal(self.blocks[1].out)
        parametrize.register_parametrization(self.blocks[0].out, "weight", Symmetric())
        nn.utils.spectral_norm(self.blocks[0].down)


class OldWeightNorm(Small):
    """Weights made by a hook of the module's own before each forward."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for block in self.blocks:
            nn.utils.weight_norm(block.up)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Adapter(nn.Module):
    """Low-rank matrices beside a frozen linear layer."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.lora_b(self.lora_a(x))


class LowRank(Small):
    """Everything is frozen but adapters, which tests choose by name."""

    kind: type[Block] = Block

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        width = self.embed.embedding_dim
        self.blocks = nn.ModuleList(self.kind(width, 2) for _ in self.blocks)
        for block in self.blocks:
            block.qkv, block.up = Adapter(block.qkv), Adapter(block.up)
        # As adapters' users do, since reentrant checkpoints need an input with a gradient.
        self.embed.register_forward_hook(lambda module, args, out: out.requires_grad_())


class CheckpointInside(Block):
    """Recomputes itself below its own hooks."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class ReentrantInside(CheckpointInside):
    reentrant = True


class LowRankInside(LowRank):
    kind = CheckpointInside


class LowRankReentrantInside(LowRank):
    kind = ReentrantInside


class Bags(nn.Module):
    """Embedding bags, a padding row, norms in groups, bilinear, a learned activation."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, WIDTH, mode="mean")
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=3)
        self.join = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.act = nn.PReLU(WIDTH)
        self.norm = nn.GroupNorm(4, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.join(x, self.bag(tokens)[:, None].expand_as(x).contiguous())
        x = self.norm(self.act(x.transpose(1, 2))).transpose(1, 2)
        return token_loss(self.head(x), labels)


@dataclasses.dataclass
class Answer:
    """No pytree: torch's own tools do not look into it."""

    hidden: Tensor
    extra: dict[str, Any]


class Structured(Small):
    """Blocks that take keywords only and return nested structures."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks = nn.ModuleList(StructuredBlock(WIDTH, 2) for _ in range(2))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        answer = Answer(self.embed(tokens), {})
        for block in self.blocks:
            answer = block(answer=answer)
        side = answer.extra["pair"][1]["side"]
        return token_loss(self.head(self.norm(answer.hidden + side)), labels)


class StructuredBlock(Block):
    def forward(self, *, answer: Answer) -> Answer:
        x = super().forward(answer.hidden)
        return Answer(x, {"pair": (None, OrderedDict(side=self.down.weight.mean() * x))})


class Hooked(Small):
    """Hooks of the user's own on modules and parameters, registered before wrapping."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[float] = []
        first, second = self.blocks
        first.register_forward_pre_hook(lambda m, args: (args[0] * m.up.weight.mean().exp(),))
        first.register_forward_hook(lambda m, args, out: out + m.down.bias)
        second.register_full_backward_hook(self._double)
        second.up.weight.register_hook(lambda grad: grad * 0.5)
        second.down.weight.register_post_accumulate_grad_hook(self._note)

    def _double(self, module: nn.Module, grads: Any, outputs: Any) -> Any:
        return tuple(None if grad is None else 2 * grad for grad in grads)

    def _note(self, param: Tensor) -> None:
        assert param.grad is not None
        self.seen.append(param.grad.sum().item())


class InputGradient(Small):
    """A penalty on the gradient of an input: backward through backward."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens).detach().requires_grad_()
        hidden = x
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            for block in self.blocks:
                hidden = block(hidden)
            loss = token_loss(self.head(self.norm(hidden)), labels)
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + grad.square().sum() + token_loss(self.head(self.embed(tokens)), labels)


class TwoForwards(Small):
    """Its own forward twice in one loss."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        first = token_loss(self.head(self.hidden(tokens)), labels)
        return first + 0.5 * token_loss(self.head(self.hidden(labels)), tokens)


class Custom(torch.autograd.Function):
    """A product whose backward reads the weight that it saved, and one that it kept by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].flatten(0, -2).t() @ x.flatten(0, -2)


class CustomFunction(Small):
    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.hidden(tokens)
        x = Custom.apply(x, self.blocks[1].out.weight)
        return token_loss(Custom.apply(x, self.head.weight), labels)
