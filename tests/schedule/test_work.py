"""The arithmetic of a step, counted by hand."""

from __future__ import annotations

import pytest

from offload.schedule.work import Attention, Product, Work

PRODUCT = Product(inputs=30, outputs=20, count=2)  # 1,200 weights


def work(*products: Product, attention: Attention | None = None, **options) -> Work:
    return Work(products, attention, tokens=10, seq=5, **options)


def test_a_step_is_six_times_weights_times_tokens() -> None:
    found = work(PRODUCT)
    assert found.forward_flops == 2 * 1200 * 10
    assert found.flops == 6 * 1200 * 10


def test_frozen_weights_have_no_gradient() -> None:
    assert work(Product(30, 20, 2, trained=False)).flops == 4 * 1200 * 10


def test_a_token_meets_a_share_of_the_experts() -> None:
    assert work(Product(30, 20, 8, share=0.25)).flops == work(PRODUCT).flops


def test_attention_grows_with_the_sequence_and_is_halved_where_it_is_causal() -> None:
    # Of a token, forward: two products of (1, width) with (seq, width), 2 x 2 x 64 x 5, 3 layers.
    assert work(attention=Attention(3, 64, causal=False)).forward_flops == 10 * 3 * 4 * 64 * 5
    causal = work(attention=Attention(3, 64))
    assert causal.forward_flops == 10 * 3 * 2 * 64 * 5
    assert causal.flops == 3 * causal.forward_flops


def test_checkpointed_blocks_run_forward_once_more() -> None:
    head = Product(30, 20, in_block=False)
    attention = Attention(3, 64)
    plain = work(PRODUCT, head, attention=attention)
    again = work(PRODUCT, head, attention=attention, recomputed=True)
    blocks = work(PRODUCT, attention=attention)
    assert again.forward_flops == plain.forward_flops
    assert again.flops - plain.flops == blocks.forward_flops


def test_activations_are_inputs_and_outputs_of_the_products() -> None:
    assert work(PRODUCT).activation_elems == 10 * 2 * (30 + 20)
    head = Product(30, 20, in_block=False)
    again = work(PRODUCT, head, recomputed=True).activation_elems
    assert again == pytest.approx(10 * (2 * 4 / 3 + 1) * (30 + 20))
