"""The time of a step before it runs: the bound of metrics/bound.py, from predicted times.

    compute      arithmetic / rate of products + activations, gradients out, weights in
    update       bytes of the update / memory's rate; checksums of what is written
    processors   both, where the model computes on the processors too: updates slow it down
    drives       bytes / rates of the profile

    passes       |  pass 1 ... pass m-1  |  pass m + updates  |   each: the greatest of its times

Only the last micro-step's pass has the update beside it.  An update that is held runs beside the
next forward alone.  Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.metrics.bound import Bound, Flow, Machine, Rates, Spent, bound_of
from offload.partition.unit import Unit
from offload.schedule.device import weight_bytes
from offload.schedule.traffic import Layout, Traffic, Uses, update_bytes
from offload.schedule.work import Work


@dataclass(frozen=True)
class Speeds:
    """What this machine was measured to do, per second."""

    flops: float  # products forward and backward, in the type that computes
    attention: float  # floating-point operations of dot products of attention; 0: there are none
    activations: float  # elements into and out of products, by what is between: norms and the like
    take: float  # bytes of gradients read and written, on one thread
    fill: float  # bytes of weights written to new device memory
    update: float  # bytes read and written in place by the update's threads


@dataclass(frozen=True)
class Threads:
    """How many compute and update; `processors`: those that both share."""

    compute: int
    update: int
    processors: int
    shared: bool  # the model computes on the processors


@dataclass(frozen=True)
class Prediction:
    """What a step needs of each resource, and how long it takes."""

    bound: Bound  # `step_s` is the predicted step
    forward_s: float  # of compute alone, all micro-steps
    backward_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        return self.bound.step_s


@dataclass(frozen=True)
class _Parts:
    """Seconds of a step, alone on its resource."""

    forward: float
    backward: float
    fill: float
    update: float
    cpu: float


def predict(
    layout: Layout, uses: Uses, traffic: Traffic, *,
    work: Work, speeds: Speeds, threads: Threads, rates: Rates | None, held: bool = False,
) -> Prediction:  # fmt: skip
    """Say how long a step takes; `rates` None: the drives are not known and take no time.

    `held`: updates wait for the norm.
    """
    parts = _parts(layout, uses, work, speeds, threads)
    compute = parts.forward + parts.backward
    if threads.shared:
        compute = max(compute, parts.cpu / threads.processors)
    drives = rates or Rates()
    read = Flow(traffic.likely_read(held=held))
    written = Flow(sum(traffic.written.values()))
    step_s = _step(parts, traffic, uses, threads=threads, rates=drives, held=held)
    spent = Spent(
        compute, fill_s=parts.fill, update_s=parts.update, cpu_s=parts.cpu,
        read=read, write=written,
    )  # fmt: skip
    found = bound_of(spent, Machine(threads.processors, threads.shared), drives)
    bound = Bound(found.terms, max(step_s, found.seconds), 0.0)
    return Prediction(bound, parts.forward, parts.backward, parts.update)


def _parts(
    layout: Layout, uses: Uses, work: Work, speeds: Speeds, threads: Threads
) -> _Parts:  # fmt: skip
    share = work.forward_flops / work.flops if work.flops else 0.5
    model = work.activation_elems / speeds.activations
    if work.product_flops:
        model += work.product_flops / speeds.flops
    if work.attention_flops:
        model += work.attention_flops / speeds.attention
    fill = _filled_bytes(layout, uses) / speeds.fill
    take = uses.micro_steps * sum(map(layout.taken_bytes, layout.all_units)) / speeds.take
    update = sum(_update_bytes(layout, unit) for unit in layout.all_units) / speeds.update
    update += 2 * layout.placement.undo.num_bytes / speeds.take  # on one thread
    on_one_thread = take
    on_all = model + fill
    cpu = threads.compute * on_all + on_one_thread + threads.update * update
    forward = share * model + fill / 2
    return _Parts(forward, model + fill + take - forward, fill, update, cpu)


def _filled_bytes(layout: Layout, uses: Uses) -> int:
    """Weights that come to the device: for each use, or once a step where they stay."""
    filled = 0
    for order in (uses.forward, uses.backward):
        come_and_go = [layout.units[index] for index in order if index not in layout.placement.kept]
        filled += uses.passes * weight_bytes(come_and_go, layout.formats)
    kept = [layout.units[index] for index in layout.placement.kept]
    return filled + weight_bytes([u for u in kept if u.trainable_elems], layout.formats)


def _update_bytes(layout: Layout, unit: Unit) -> int:
    """What the kernel reads and writes, and what the checksums read."""
    moved = dict(update_bytes(layout, unit))
    made = unit.states.weights.made
    read = sum(size for role, size in moved.items() if role not in made)
    grads = unit.trainable_elems * layout.formats.grad_of(unit)
    return read + grads + 2 * sum(moved.values())


def _step(
    parts: _Parts, traffic: Traffic, uses: Uses, *, threads: Threads, rates: Rates, held: bool
) -> float:
    passes = uses.passes
    forward = sum(size for name, size in traffic.read.items() if name.startswith("forward."))
    backward = sum(size for name, size in traffic.read.items() if name.startswith("backward."))
    spilled = traffic.written.get("backward.grad", 0)
    back = traffic.likely_read(held=held) - forward - backward
    out = sum(traffic.written.values()) - spilled
    compute = (parts.forward + parts.backward) / passes
    plain = max(compute, _drive_s((forward + backward) / passes, spilled / passes, rates))
    beside = parts.update * threads.update / threads.processors if threads.shared else 0.0
    if not held:
        alone = threads.compute < threads.processors
        busy = compute if alone and threads.shared else compute + beside
        both = (forward + backward) / passes + back, spilled / passes + out
        return (passes - 1) * plain + max(busy, parts.update, _drive_s(*both, rates))
    first = max(
        parts.forward / passes + beside, parts.update,
        _drive_s(forward / passes + back, out, rates),
    )  # fmt: skip
    rest = max(parts.backward / passes, _drive_s(backward / passes, spilled / passes, rates))
    return (passes - 1) * plain + first + rest


def _drive_s(read: float, written: float, rates: Rates) -> float:
    pairs = (read, rates.read), (written, rates.write), (read + written, rates.mixed)
    return max(size / rate if rate else 0.0 for size, rate in pairs)
