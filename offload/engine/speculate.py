"""Update units during backward, before the norm is known; keep, redo or discard at step().

    backward reaches u    begin(u)     its job is submitted: state is read ahead, the kernel waits
    u's gradients kept    release(u)   kernel with factor 1, write to the other side
    step(): settle(): rows and gradients are what was assumed -> the bet stands
                      anything else                   -> the job is dropped; step() updates u from
                                                         the committed side
            keep():   what stands is part of the step

The committed side is read and never written, so going back is exact and costs only the bytes.  What
stays in memory is read again too, or was never touched: its update worked on a copy, as the plan
has chosen (schedule/undo.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from offload.engine.history import History
from offload.engine.ledger import Ledger, Made, account
from offload.engine.updates import Rows, UpdateBuilder
from offload.errors import StateError, StoreError
from offload.optim.jobs import Job
from offload.partition.unit import Unit
from offload.runtime.gradients import GradientKeeper
from offload.runtime.loans import Loans
from offload.schedule.undo import Undo

_LOG = logging.getLogger(__name__)


@dataclass
class _Bet:
    """An update that runs on the assumption that nothing changes until step()."""

    job: Job
    rows: dict[str, bytes]
    grad_dtype: torch.dtype  # of the kept gradients, which may be widened when more come
    takes: int | None = None  # of the gradients it reads; None: not complete

    def ended(self) -> bool:
        """True when the job reads nothing any more."""
        return self.job.closed or self.job.done()


class Assumption:
    """What a backward bets on, and the order of the units' next uses."""

    def __init__(self, rows: Rows, order: Sequence[int]) -> None:
        self.rows = rows
        self._places = {unit: place for place, unit in enumerate(order)}

    def place(self, unit: Unit) -> int:
        return self._places.get(unit.index, len(self._places))


class Speculator:
    """Owns the updates submitted before step().  Called from hooks and step(), one at a time."""

    def __init__(
        self, undo: Undo, units: Mapping[int, Unit], builder: UpdateBuilder, ledger: Ledger,
        keeper: GradientKeeper, *,
        loans: Loans, assume: Callable[[], Assumption],
    ) -> None:  # fmt: skip
        """`undo`: what may run ahead of step().

        `assume()`: what holds if nothing is clipped and every parameter gets a gradient.
        """
        self._mode = undo.overlap
        self._units = units
        self._builder = builder
        self._ledger = ledger
        self._keeper = keeper
        self._loans = loans
        self._assume = assume
        self._bets: dict[int, _Bet] = {}
        self._now: Assumption | None = None  # of this backward; None: holding
        self.history = History()
        self._never = set(undo.held)  # units that cannot be taken back, or not worth a bet
        self._settling: set[int] = set()  # gradients complete, their spills in flight

    def begin_backward(self) -> None:
        """The last backward of a step begins: decide whether to speculate in it."""
        self.history.voided += sum(self._units[unit].trainable_elems for unit in self._bets)
        self._drop_all()
        spent = self._ledger.metrics.last.get("seconds", {})
        self.history.took(sum(spent.get(phase, 0.0) for phase in ("forward", "backward", "step")))
        if self._mode == "speculate" or (self._mode == "auto" and self.history.pays()):
            self._ledger.finish()  # the spare sides are free once the last commit is there
            self._loans.open = True
            self._now = self._assume()

    def begin(self, unit: int) -> None:
        """Backward reaches a unit: read its state ahead."""
        now, found = self._now, self._units.get(unit)
        if now is None or found is None or unit in self._bets or unit in self._never:
            return
        self._release_settled()
        assumed = now.rows.of(found)
        if assumed:
            job = self._builder.submit(
                [found], now.rows, urgency=now.place, released=False,
                weights=self._loans.addresses(unit),
            )  # fmt: skip
            self._bets[unit] = bet = _Bet(job, assumed, self._keeper[unit].dtype)
            self._loans.lend(unit, bet.ended)

    def release(self, unit: int) -> None:
        """A unit's gradients are kept: run its update, once they can be read."""
        bet = self._bets.get(unit)
        if bet is not None and bet.grad_dtype is not self._keeper[unit].dtype:
            self._drop(unit)
        elif bet is not None and bet.takes is None:
            bet.takes = self._keeper[unit].takes
            self._settling.add(unit)
            self._release_settled()

    def _release_settled(self) -> None:
        for unit in [unit for unit in self._settling if self._keeper.settled(unit)]:
            self._settling.discard(unit)
            self._builder.resident.bet(unit)
            self._bets[unit].job.release()

    def before_take(self, unit: int) -> None:
        """More gradients are about to come: an update that read the kept ones is void."""
        bet = self._bets.get(unit)
        if bet is not None and bet.takes is not None:
            self.history.voided += self._units[unit].trainable_elems
            self._drop(unit)

    def settle(self, rows: Rows | None, *, clipped: bool) -> None:
        """Drop the bets that do not hold under the true `rows` (None: no step)."""
        self._loans.open = False
        self._release_settled()  # step() has waited for spilled gradients
        staked = lost = self.history.take_voided()
        for unit, bet in list(self._bets.items()):
            true = rows.of(self._units[unit]) if rows is not None else {}
            staked += self._units[unit].trainable_elems
            if bet.rows != true or bet.takes != self._keeper[unit].takes:
                lost += self._units[unit].trainable_elems
                self._drop(unit)
            if rows is not None and bet.rows.keys() != true.keys():
                self._never.add(unit)  # some tensor of it gets no gradient
        if rows is not None:
            self.history.add(staked, lost, clipped=clipped)
        self._now = None

    @property
    def standing(self) -> Collection[int]:
        """The units whose updates need not be made again, after `settle`."""
        return self._bets.keys()

    def keep(self) -> dict[int, Made]:
        """Hand the bets that stand to the step: from now on memory holds its generation."""
        kept = {unit: Made(bet.job, 0) for unit, bet in self._bets.items()}
        self._bets.clear()
        self._builder.resident.keep(kept)
        return kept

    def discard(self) -> None:
        """Drop every bet: there will be no step."""
        self.history.take_voided()
        self._drop_all()

    def _drop_all(self) -> None:
        self._loans.open = False
        for unit in list(self._bets):
            self._drop(unit)
        self._now = None

    def _drop(self, unit: int) -> None:
        job = self._bets.pop(unit).job
        self._settling.discard(unit)
        try:
            job.cancel()
            with self._ledger.metrics.stall("redo", self._units[unit].name):
                job.wait()  # transfers in flight touch slots and the spare side
        except StateError:
            pass
        except StoreError as error:  # the step does it all again, and fails if that fails
            _LOG.warning("an update that is not needed any more has failed: %s", error)
        finally:  # Ctrl-C ends the wait above too
            undone = self._builder.resident.forget(unit)
            self.history.undone[self._units[unit].name] += undone
            account(job, self._ledger.metrics)
            job.close()
