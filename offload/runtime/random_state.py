"""Torch's own random numbers: of the processor, and of the GPU that computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def generators() -> list[torch.Generator]:
    """Those that a model draws from when it names none."""
    found = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def capture() -> list[torch.Tensor]:
    """Their states."""
    return [each.get_state() for each in generators()]


def restore(states: Sequence[torch.Tensor]) -> None:
    """Go on from captured states."""
    for each, state in zip(generators(), states, strict=False):  # a GPU may have come since
        each.set_state(state)


def seeded(seed: int) -> list[torch.Tensor]:
    """Their states as a seed makes them."""
    return [torch.Generator(each.device).manual_seed(seed).get_state() for each in generators()]
