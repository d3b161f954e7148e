"""Calls of DeepSpeed's engine that have no counterpart here, and what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from offload.errors import StateError


class Refused:
    """Each raises StateError with the way out."""

    def no_sync(self) -> NoReturn:
        raise StateError(
            "no_sync: expected gradient_accumulation_steps to count the micro-steps of a step, got"
            " a call; DeepSpeed's ZeRO-3 has none either. Set it in the configuration and call"
            " backward() and step() for each."
        )

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> NoReturn:
        raise StateError(
            "set_gradient_accumulation_boundary: expected step() to tell the boundary, got a call"
            f' with {is_boundary}. Set "managed_gradient_accumulation": false and call step() at'
            " boundaries alone."
        )

    def set_train_batch_size(self, train_batch_size: Any) -> NoReturn:
        raise StateError(
            "set_train_batch_size: expected the size that the engine was made with, got"
            f" {train_batch_size}: buffers are sized for its micro-steps. Save a checkpoint, and"
            " load it into an engine made with the other size."
        )
