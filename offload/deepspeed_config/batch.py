"""train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.errors import ConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """The three numbers, in samples and micro-steps; None: not known."""

    train: int | None = None
    micro: int | None = None
    steps: int | None = None

    @staticmethod
    def of(flat: Mapping[str, Any]) -> Batch:
        """Those that a file gives; raises ConfigError unless they are at least 1."""
        for key in (TRAIN, MICRO, STEPS):
            if key in flat and not 1 <= flat[key] < float("inf"):
                raise ConfigError(f"config, {key}: expected at least 1, got {flat[key]}.")
        return Batch(flat.get(TRAIN), flat.get(MICRO), flat.get(STEPS))

    def settle(self, *, world: int = 1) -> Batch:
        """Derive what is missing, as DeepSpeed does; raises ConfigError where they disagree.

        `world`: number of processes.  Without either batch size both stay unknown.
        """
        train, micro, steps = self.train, self.micro, self.steps
        if train is None:
            steps = steps or 1
            return Batch(None if micro is None else micro * steps * world, micro, steps)
        if micro is None:
            steps = steps or 1
            micro = self._quotient(MICRO, train, (STEPS, steps), world)
        elif steps is None:
            steps = self._quotient(STEPS, train, (MICRO, micro), world)
        product = micro * steps * world
        if product != train:
            raise ConfigError(
                f"config, {TRAIN}: expected {micro} ({MICRO}) x {steps} ({STEPS}) x {world}"
                f" (processes) = {product}, got {train}. {_advice(train, micro, steps, world)}"
            )
        return Batch(train, micro, steps)

    def _quotient(self, key: str, train: int, other: tuple[str, int], world: int) -> int:
        name, value = other
        if train % (value * world):
            low = max(train // (value * world), 1) * value * world
            raise ConfigError(
                f"config, {TRAIN}: expected a multiple of {value} ({name}) x {world} (processes)"
                f" = {value * world}, so that {key} is whole, got {train} / {value * world} ="
                f" {train / (value * world):.6g}. Set {TRAIN} to {low} or {low + value * world},"
                f" or change {name}."
            )
        return train // (value * world)


def _advice(train: int, micro: int, steps: int, world: int) -> str:
    ways = [f"{TRAIN} to {micro * steps * world}"]
    if train % (micro * world) == 0:
        ways.insert(0, f"{STEPS} to {train // (micro * world)}")
    elif train % (steps * world) == 0:
        ways.insert(0, f"{MICRO} to {train // (steps * world)}")
    return f"Set {' or '.join(ways)}, or leave one of the three out."
