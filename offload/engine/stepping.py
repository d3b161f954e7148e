"""What `engine.optimizer` calls: a step of the whole engine, and dropping its gradients."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from offload.engine.connect import catch_up, outdate
from offload.engine.intact import check_intact
from offload.engine.outer_loop import end_step
from offload.engine.run_state import capture_state
from offload.errors import StateError
from offload.runtime.hooks import recover

if TYPE_CHECKING:
    from offload.engine.facade import OffloadEngine

_LOG = logging.getLogger(__name__)


class EngineStepper:
    """What the optimizer calls; holds its engine weakly, or neither would ever be freed."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = weakref.ref(engine)

    def step(self) -> None:
        engine = alive(self._engine)
        engine._check_open()
        try:
            self._step(engine)
        finally:
            end_step(engine)

    def _step(self, engine: OffloadEngine) -> None:
        check_writable(engine)
        parts = engine._parts
        parts.editor.check_closed("step()")
        check_intact(engine.module, parts)
        engine._checkpoints.saver.poll()
        recover(parts.hooks)
        parts.residency.discard_prefetches()
        parts.residency.evict_unused()

        def capture() -> dict[str, Any]:
            engine.global_step += 1
            return capture_state(engine)

        def submitted(units: Collection[int]) -> None:
            engine._micro_steps = 0
            outdate(parts, units)

        with parts.ground.metrics.phase("step"):
            order = parts.residency.order()
            outcome = parts.stepper.step(
                parts.speculator, order=order, capture=capture, submitted=submitted
            )  # fmt: skip
            catch_up(parts.ground)
        engine.grad_norm = outcome.grad_norm
        if outcome.skipped:
            _LOG.warning(
                "step skipped: a gradient is not finite (%d so far)%s.", engine.skipped_steps,
                f"; loss scale {engine.scale.value:g}" if engine.scale.enabled else "",
            )  # fmt: skip
        parts.ground.metrics.close_step(engine.global_step)

    def zero_grad(self, *, set_to_none: bool) -> None:
        engine = alive(self._engine)
        engine._micro_steps = 0
        recover(engine._parts.hooks)  # or the next forward would take what is dropped here
        engine._parts.speculator.discard()
        engine._parts.lent.clear(zeros=not set_to_none)
        engine._parts.scale.forget()
        end_step(engine)


def alive(engine: weakref.ref[OffloadEngine]) -> OffloadEngine:
    found = engine()
    if found is None:
        raise StateError("engine: expected an open engine, got one that is gone. Keep a reference.")
    return found


def check_writable(engine: OffloadEngine) -> None:
    if engine.config.read_only:
        raise StateError(
            "engine: expected one that may train, got one opened with read_only=True."
            " Open the store without it, when the job that owns it has ended."
        )
