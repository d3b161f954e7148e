"""The generic decoder: near the number that was asked for, and the same as its module."""

from __future__ import annotations

import pytest
import torch

from offload.cli.generic_decoder import GenericDecoder
from offload.cli.models import products_of
from offload.errors import ConfigError
from offload.interchange.pretrained import on_meta
from offload.partition.states import StateTable
from offload.runtime.discover import discover
from offload.schedule.generic import MOST_PARAMS, DecoderShape


@pytest.mark.parametrize("count", [10**7, 60 * 10**6, 10**9, 7 * 10**9, 70 * 10**9, 10**12])
def test_a_shape_is_near_the_number(count: int) -> None:
    shape = DecoderShape.of(count)
    assert abs(shape.num_params - count) <= 0.04 * count
    assert shape.width % shape.heads == 0


def test_a_usual_number_gives_a_usual_shape() -> None:
    shape = DecoderShape.of(7 * 10**9)
    assert 26 <= shape.layers <= 40
    assert 3840 <= shape.width <= 4608


@pytest.mark.parametrize("count", [0, 1000, MOST_PARAMS + 1])
def test_a_number_that_is_no_model_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="number of parameters: expected"):
        DecoderShape.of(count)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_units_and_products_are_those_of_the_module(tied: bool, dtype: str) -> None:
    shape = DecoderShape(layers=3, width=128, tied=tied, vocab=1000)
    with on_meta():
        model = GenericDecoder(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_params
    states = StateTable.of(("exp_avg", "exp_avg_sq"), dtype)
    found = discover(model, persistence_threshold=1000, states=states)
    units, small = shape.units(states, 1000)
    assert tuple(units) == found.units
    assert small == found.persistent
    flops = sum(product.forward_flops for product in products_of(model, found.units))
    assert flops == sum(product.forward_flops for product in shape.products())


def test_the_module_trains() -> None:
    torch.manual_seed(0)
    model = GenericDecoder(DecoderShape(layers=2, width=64, tied=True, vocab=50))
    tokens = torch.arange(16).view(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(tokens, tokens.roll(-1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
