"""A decoder for a number of parameters, where no model is there yet; pure, its units included.

    width = 128 x layers, about            7 B: 33 layers of 4224
    block = 4 width^2 (attention) + 3 width x hidden (SwiGLU, hidden = 8/3 width, up to 64)
    embedding and head of 32,000 tokens; one tensor below a billion parameters

Names, order and shapes are those of the module of this kind (cli/generic_decoder.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from offload.errors import ConfigError
from offload.partition.states import StateTable
from offload.partition.unit import TensorSpec, Unit, lay_out, round_up
from offload.schedule.work import Attention, Product

VOCAB = 32_000
ASPECT = 128  # width over layers
WIDTH_MULTIPLE = 64  # also of a head
LEAST_PARAMS = 5_000_000
MOST_PARAMS = 10**14
UNTIED_FROM = 10**9


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of the decoder."""

    layers: int
    width: int
    tied: bool
    vocab: int = VOCAB

    @classmethod
    def of(cls, num_params: int) -> DecoderShape:
        """A usual shape of nearly `num_params`; raises ConfigError."""
        if not LEAST_PARAMS <= num_params <= MOST_PARAMS:
            raise ConfigError(
                f"number of parameters: expected {LEAST_PARAMS:,} to {MOST_PARAMS:,} for the"
                f" generic decoder, got {num_params:,}. Name a model instead."
            )
        tied = num_params < UNTIED_FROM
        usual = (num_params / (12 * ASPECT**2)) ** (1 / 3)
        shapes = [
            cls(layers, width, tied)
            for layers in range(max(1, int(usual / 3)), int(3 * usual) + 3)
            for width in _widths(num_params, layers, tied)
        ]
        return min(shapes, key=lambda shape: shape._cost(num_params))

    @classmethod
    def of_width(cls, width: int) -> DecoderShape:
        """The usual shape of a width; a wider one is larger in everything."""
        layers = max(1, round(width / ASPECT))
        tied = cls(layers, width, tied=True).num_params < UNTIED_FROM
        return cls(layers, width, tied)

    def _cost(self, num_params: int) -> float:
        """One for each per cent beside the number, and for each quarter beside the usual aspect."""
        error = abs(self.num_params / num_params - 1.0)
        return error / 0.01 + abs(math.log(self.width / (ASPECT * self.layers))) / 0.25

    @property
    def hidden(self) -> int:
        return round_up(8 * self.width // 3, WIDTH_MULTIPLE)

    @property
    def heads(self) -> int:
        return self.width // WIDTH_MULTIPLE

    @property
    def num_params(self) -> int:
        block = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        ends = (1 if self.tied else 2) * self.vocab * self.width
        return self.layers * block + ends + self.width

    def __str__(self) -> str:
        head = "tied" if self.tied else "own"
        return (
            f"generic decoder of {self.layers} layers, width {self.width:,}, SwiGLU of"
            f" {self.hidden:,}, {self.heads} heads, vocabulary {self.vocab:,}, {head} head"
        )

    # --- what it is made of

    def tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(unit, name, shape) of each parameter, in named_parameters() order."""
        width, hidden = self.width, self.hidden
        block = {
            "attention_norm": (width,), "qkv": (3 * width, width), "out": (width, width),
            "mlp_norm": (width,), "gate_up": (2 * hidden, width), "down": (width, hidden),
        }  # fmt: skip
        yield "embedding", "embedding.weight", (self.vocab, width)
        for index in range(self.layers):
            for name, shape in block.items():
                yield f"blocks.{index}", f"blocks.{index}.{name}.weight", shape
        yield "norm", "norm.weight", (width,)
        if not self.tied:
            yield "head", "head.weight", (self.vocab, width)

    def units(self, states: StateTable, persistence_threshold: int) -> tuple[list[Unit], Unit]:
        """The units as an engine finds them, and the persistent one."""
        groups: dict[str, list[TensorSpec]] = {}
        small: list[TensorSpec] = []
        for unit, name, shape in self.tensors():
            plain = states.packs and (len(shape) < 2 or unit == "embedding")
            tied = self.tied and unit == "embedding"
            spec = TensorSpec(name, shape, plain=plain, tied=tied)
            kept = small if spec.num_elems < persistence_threshold else groups.setdefault(unit, [])
            kept.append(spec)
        units = [
            lay_out(name, index, tensors, states=states)
            for index, (name, tensors) in enumerate(groups.items())
        ]
        return units, lay_out("persistent", len(units), small, states=states)

    def products(self) -> list[Product]:
        """What is multiplied with each token; the embedding looks rows up."""
        width, hidden, layers = self.width, self.hidden, self.layers
        return [
            Product(width, 3 * width, layers), Product(width, width, layers),
            Product(width, 2 * hidden, layers), Product(hidden, width, layers),
            Product(width, self.vocab, in_block=False),
        ]  # fmt: skip

    def attention(self) -> Attention:
        return Attention(self.layers, self.width)


def _widths(num_params: int, layers: int, tied: bool) -> list[int]:
    """The multiples around the width that `layers` would need."""
    a, b = 12 * layers, (1 if tied else 2) * VOCAB
    exact = (math.sqrt(b * b + 4 * a * num_params) - b) / (2 * a)
    lower = max(int(exact) // WIDTH_MULTIPLE, 1) * WIDTH_MULTIPLE
    return [lower, lower + WIDTH_MULTIPLE]
