"""The arithmetic of a step, from the shapes of a model's products.  Pure.

    forward       2 x weights x tokens + attention: 4 x width x seq x tokens a layer, half of it
                  where attention is causal
    backward      twice that: gradients of inputs and of weights; frozen weights need the first only
    recomputed    forward once more, in the repeated blocks, where they are checkpointed

(Kaplan et al. 2020 for 6 x weights x tokens; Chowdhery et al. 2022 for the term of attention.)
Weights: those that are multiplied with every token.  An embedding that only looks rows up is none;
of experts, the share that a token meets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """`count` weights of (outputs, inputs) that `share` of the tokens meet."""

    inputs: int
    outputs: int
    count: int = 1
    share: float = 1.0
    trained: bool = True
    in_block: bool = True  # of those that checkpointing recomputes

    @property
    def forward_flops(self) -> float:
        """Of one token."""
        return 2.0 * self.inputs * self.outputs * self.count * self.share


@dataclass(frozen=True)
class Attention:
    """Scaled dot products of `layers` layers; `width`: of all heads together."""

    layers: int
    width: int
    causal: bool = True

    def forward_flops(self, seq: int) -> float:
        """Of one token in a sequence of `seq`."""
        return self.layers * 4.0 * self.width * seq * (0.5 if self.causal else 1.0)


@dataclass(frozen=True)
class Work:
    """One step: `tokens` over all micro-steps."""

    products: Sequence[Product]
    attention: Attention | None
    tokens: int
    seq: int
    recomputed: bool = False

    @property
    def product_flops(self) -> float:
        """Of all products, with what is recomputed."""
        return self.tokens * sum(self._passes(each) * each.forward_flops for each in self.products)

    @property
    def attention_flops(self) -> float:
        """Of all dot products of attention, with what is recomputed."""
        return self.tokens * (4.0 if self.recomputed else 3.0) * self._attention

    @property
    def flops(self) -> float:
        return self.product_flops + self.attention_flops

    @property
    def forward_flops(self) -> float:
        """Without what is recomputed."""
        products = sum(product.forward_flops for product in self.products)
        return self.tokens * (products + self._attention)

    @property
    def _attention(self) -> float:
        return self.attention.forward_flops(self.seq) if self.attention else 0.0

    def _passes(self, product: Product) -> float:
        """How often a product's forward is done over, or as much arithmetic."""
        return self._forwards(product) - (0.0 if product.trained else 1.0)

    @property
    def activation_elems(self) -> float:
        """Elements that enter and leave products: what norms, activations and sums work on.

        What is recomputed has a third of it once more, as a product has.
        """
        return self.tokens * sum(
            (each.inputs + each.outputs) * each.count * each.share * self._forwards(each) / 3.0
            for each in self.products
        )

    def _forwards(self, product: Product) -> float:
        """How often forward's work is done, with backward as two."""
        return 4.0 if self.recomputed and product.in_block else 3.0
