"""`OffloadEngine`: train a model whose state lives on disk.

    engine = OffloadEngine(model, nvme_path="/mnt/nvme")
    loss = engine(x, y);  engine.backward(loss);  engine.step()
    loss.backward();  engine.optimizer.step();  engine.optimizer.zero_grad()   a plain loop works

The facade: every method delegates in a few lines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from offload.checkpoint.save import Saving
from offload.config import EngineConfig, make_config, parse_bytes
from offload.engine.blueprint import Blueprint, plan
from offload.engine.checkpoints import Checkpoints
from offload.engine.configured import configure, store_folder
from offload.engine.connect import Captures, Parts, connect, take_over
from offload.engine.describe import describe
from offload.engine.exporting import exportable
from offload.engine.generation import (
    Stateful,
    Tracked,
    capture_late,
    encode,
    restore_groups,
)
from offload.engine.importing import import_zero
from offload.engine.intact import check_intact
from offload.engine.loading_dict import StateDictLoading
from offload.engine.micro_batches import train_batch
from offload.engine.planning import PlanOnly, current_plan, first_plan
from offload.engine.reader import current
from offload.engine.rewriting import commit_first
from offload.engine.run_state import adopt_zero, capture_state, check_state, restore, resume
from offload.engine.states import check_adam, optimizer_state
from offload.engine.step import Groups
from offload.engine.stepping import EngineStepper, alive, check_writable
from offload.engine.thaw import begin_forward, grow_for, thaw
from offload.errors import ConfigError, OffloadError, StateError
from offload.interchange.deepspeed import ZeroCheckpoint
from offload.interchange.export import export_safetensors
from offload.interchange.notes import ModelNotes, all_names
from offload.interchange.pretrained import open_pretrained
from offload.metrics import Metrics
from offload.optim.choice import Choice, choose
from offload.optim.loss_scale import LossScale
from offload.optim.optimizer import OffloadOptimizer
from offload.runtime.hooks import is_hooked
from offload.runtime.source import LoadedModel, unpack
from offload.schedule.plan import Plan

_LOG = logging.getLogger(__name__)


class OffloadEngine:
    """A model, its store, and what moves between them.  Use from one thread; close when done."""

    def __init__(
        self, model: nn.Module | LoadedModel, *, params: Any = None, lr_scheduler: Any = None,
        optimizer: Any = None, config: Any = None, **settings: Any,
    ) -> None:  # fmt: skip
        """Take over `model`: its parameters are written to the store and leave memory.

        `params`: parameter groups as for torch.optim.AdamW (default: all trainable parameters).
        `optimizer`: a name, a torch class or a new instance (see `offload/optim/README.md`);
        default: the configuration's, else AdamW.
        `config`: a DeepSpeed file, as path, dict or base64; other arguments win over it
        (`offload/engine/configured.py`).  Its scheduler is stepped by the optimizer.
        `settings`: the optimizer's (lr, ...), and the fields of `offload.config.EngineConfig`.

        Raises ConfigError, BudgetError, StoreError before anything is allocated; nothing is left
        behind then.
        """
        given = configure(config, optimizer, settings, lr_scheduler=lr_scheduler)
        choice = choose(given.optimizer, params, given.settings)
        self.config = make_config(choice.rest, beside=choice.defaults, under=given.under)
        model, places = unpack(model)
        _refuse_second(model)
        blueprint = _decide(model, self.config, choice)
        self.module = model
        self.optimizer = _make_optimizer(self, choice, blueprint.found.parameters)
        self.global_step = 0
        self.grad_norm: float | None = None
        self._tracked = Tracked()
        self._micro_steps = 0
        self._saved_groups: list[dict[str, Any]] | None = None
        self._notes = ModelNotes.of(model)
        self._parts = connect(blueprint, _captures(self), places)
        self._checkpoints = Checkpoints(self._parts)
        self._close = weakref.finalize(self, _close, self._parts, os.getpid(), given.scratch)
        with _undone_on_error(self, given.scratch):
            take_over(model, self._parts)
            StateDictLoading(model, self._parts)
            if self.resumed:
                resume(self)
            else:
                commit_first(self._parts.ground.ledger, encode(capture_state(self)))
            given.attach(self, lr_scheduler)
        for line in self.describe().splitlines():
            _LOG.info(line)

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *,
        make: Callable[[], nn.Module] | None = None, **settings: Any,
    ) -> Self:  # fmt: skip
        """Train the model that `folder` holds as safetensors; memory never holds its weights.

        `make` builds the module where config.json does not name an architecture of transformers.
        """
        scratch = store_folder(settings)
        return cls(open_pretrained(Path(folder), scratch=scratch, make=make), **settings)

    # --- the three verbs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; returns what it returns."""
        self._check_open()
        check_intact(self.module, self._parts)
        try:
            with _no_autocast_cache(), _access(self):
                return self.module(*args, **kwargs)
        except BaseException:
            self._parts.hooks.abort()
            raise

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Backward of one micro-step; divides by `gradient_accumulation_steps`."""
        self._check_open()
        check_writable(self)
        steps = self.config.gradient_accumulation_steps
        self._parts.hooks.last_micro_step = self._micro_steps + 1 >= steps
        try:
            self.scale(loss / steps).backward(**kwargs)
        finally:
            self._parts.hooks.last_micro_step = steps == 1
        self._micro_steps += 1
        return loss

    @property
    def scale(self) -> LossScale:
        """The fp16 loss scale: `scale(loss).backward()` in a plain loop, `scale.value`.

        With another dtype it is 1.  Updates, norms and `kept_grad` are unscaled.
        """
        return self._parts.scale

    def step(self) -> None:
        """Update the weights if this was the last micro-step of the accumulation window."""
        config = self.config
        whole = self._micro_steps >= config.gradient_accumulation_steps
        if whole or not config.managed_gradient_accumulation:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def train_batch(
        self, batches: Sequence[Any], loss_fn: Callable[[Any], torch.Tensor] | None = None, *,
        order: str | None = None,
    ) -> list[torch.Tensor]:  # fmt: skip
        """All micro-steps of one step, and the step; returns their losses, detached.

        `batches`: `gradient_accumulation_steps` of them, each the model's arguments (a tuple, a
        mapping or one tensor).  `loss_fn(output)`: default `output.loss`, or the output itself.
        `order`: "horizontal", or "layer": all micro-batches through a unit before the next, so
        that weights move once a step; all graphs are alive at once.  Equal bit for bit.  Default:
        the engine's setting of this name.
        """
        self._check_open()
        check_writable(self)
        thaw(self)
        return train_batch(self, batches, loss_fn, order or self.config.order)

    # --- reading

    def full_fp32_param(self, parameter: nn.Parameter | str) -> torch.Tensor:
        """A HOST copy of the fp32 master, wherever the parameter is."""
        with _access(self):
            return self._parts.reader.master(_name(self, parameter))

    def full_optimizer_state(self, parameter: nn.Parameter | str, state: str) -> torch.Tensor:
        """A HOST copy of one of the optimizer's state tensors, such as "exp_avg"."""
        name = _name(self, parameter)
        with _access(self):
            return optimizer_state(self._parts, name, state)

    def kept_grad(self, parameter: nn.Parameter | str) -> torch.Tensor | None:
        """A HOST copy of the gradient of this step, unscaled; None if there is none yet.

        `p.grad` is the same gradient, to edit: it stays in host memory until the step has ended.
        """
        return self._parts.lent.copy_of(_name(self, parameter))

    @contextlib.contextmanager
    def gathered(self, parameters: Any = None) -> Iterator[None]:
        """Hold `parameters` (one, several, a module or None: all) readable and editable inside the
        block.

        Edits are written back as a new generation; they replace the masters they touch.
        """
        with _access(self), self._parts.editor.gathered(_select(self, parameters)):
            yield

    def export(
        self, folder: str | os.PathLike[str], *,
        dtype: torch.dtype | str | None = None, max_shard_size: int | str = "5GB",
    ) -> None:  # fmt: skip
        """Write weights and buffers as safetensors that `from_pretrained` reads, in bounded memory.

        `dtype`: "bf16", "fp16", "fp32" (the exact masters) or None: what moves.
        """
        self._check_open()
        model = exportable(self._parts, self.module, dtype=dtype, notes=self._notes)
        shard_bytes = parse_bytes(max_shard_size, "max_shard_size")
        with _access(self):
            export_safetensors(model, Path(folder), max_shard_bytes=shard_bytes, progress=True)

    def describe(self) -> str:
        """What lives where, and what a step costs."""
        return describe(self._parts)

    @property
    def plan(self) -> Plan:
        """Where everything lives, what a step moves, what bounds it.  Data; str() prints it."""
        return current_plan(self._parts)

    @property
    def metrics(self) -> Metrics:
        return self._parts.ground.metrics

    @property
    def resumed(self) -> bool:
        """True when the engine continues a generation that it found."""
        return self._parts.ground.resumed

    @property
    def skipped_steps(self) -> int:
        return self._parts.ground.metrics.skipped_steps

    # --- state that is not tensors

    def track(self, **items: Stateful) -> None:
        """Make objects with a state_dict part of every generation; load what was resumed."""
        for name, item in items.items():
            if self._tracked.add(name, item) and self._saved_groups is not None:
                # A scheduler's constructor has reset the learning rate.
                restore_groups(self.optimizer.param_groups, self._saved_groups)

    def save_checkpoint(
        self, directory: str | os.PathLike[str], tag: str | None = None,
        client_state: Mapping[str, Any] | None = None, *, keep: int | None = None,
    ) -> Saving:  # fmt: skip
        """Save the state as it is now to `directory/tag`; training may go on at once.

        Call it after step(), whose writes may still be under way: nothing here waits for them, or
        for anything but an earlier checkpoint.  On the store's file system files are linked,
        elsewhere they are copied in the background; the ticket's `wait()` returns when all is
        complete and flushed, and only then `tag` and `latest` name it; it raises StoreError if
        that step is lost.  With durability="none", what stays in memory is written first.
        `tag`: default global_step<n>.  `keep`: remove all but the newest n.
        Raises StoreError where there is no space; training can go on.
        """
        self._check_open()
        check_writable(self)
        if self._parts.lent.has_gradients:
            _LOG.warning("save_checkpoint: gradients since the last step are not saved.")
        return self._checkpoints.save(
            Path(directory), tag or f"global_step{self.global_step}", capture_state(self),
            client_state=client_state, keep=keep,
        )  # fmt: skip

    def load_checkpoint(
        self, directory: str | os.PathLike[str], tag: str | None = None
    ) -> tuple[Path | None, dict[str, Any]]:
        """Go on from a checkpoint (`tag` None: the latest); return its folder and client state.

        Weights, optimizer, step counts, param_groups, buffers, random numbers and tracked objects
        are as they were, whatever the budgets, chunks and paths.  (None, {}): there is none.
        Raises StoreError or StoreCorrupt, with the engine unchanged, where it does not fit.
        """
        self._check_open()
        check_writable(self)
        where, check = Path(directory), partial(check_state, self)
        grow_for(self, self._checkpoints.trained(where, tag, check=check))
        found = self._checkpoints.load(where, tag)
        if found is None:
            _LOG.warning("load_checkpoint: no checkpoint in %s, nothing is loaded.", directory)
            return None, {}
        restore(self, found[1])
        return found[0], found[2]

    def load_deepspeed(self, directory: str | os.PathLike[str], tag: str | None = None) -> None:
        """Go on from a DeepSpeed ZeRO-3 checkpoint of the same model (`tag` None: the latest).

        Masters, moments, step counts and buffers come from it, whatever the number of ranks that
        wrote it; hyper-parameters, schedules and random numbers stay this engine's.
        """
        self._check_open()
        check_writable(self)
        check_adam(self._parts)
        checkpoint = ZeroCheckpoint.open(Path(directory), tag)
        import_zero(
            self._parts, checkpoint, all_names(self.module),
            lambda found: encode(adopt_zero(self, checkpoint, found)),
        )  # fmt: skip

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    def close(self) -> None:
        """Finish and commit what was stepped, release everything; may be called twice.

        Raises StoreError where the last step cannot be committed; all is released even then.
        """
        if self._close.alive:
            ledger = self._parts.ground.ledger
            try:
                self._parts.hooks.abort()
                ledger.engine_called()
                ledger.finish_or_discard()
            except BaseException:
                ledger.abandon()
                raise
            finally:
                self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None and self._close.alive:  # perhaps between step() and scheduler.step()
            self._parts.hooks.abort()
            self._close()
        self.close()

    # --- inside

    def _check_open(self) -> None:
        if not self._close.alive:
            raise StateError("engine: expected an open engine, got a closed one. Make a new one.")


def leave_settings_open(engine: OffloadEngine) -> None:
    """Let whoever resumes choose hyper-parameters and random numbers: an import has none."""
    store = engine._parts.ground.store
    assert store.committed is not None
    payload = encode({**capture_state(engine), "groups": None, "rng": None})
    store.commit(sides={}, generation=store.committed.generation, payload=payload)


@contextlib.contextmanager
def _undone_on_error(
    engine: OffloadEngine, scratch: tempfile.TemporaryDirectory[str] | None
) -> Iterator[None]:  # fmt: skip
    """Release everything, and remove a store made just now, if the block fails."""
    with contextlib.ExitStack() as undo:
        if scratch is not None:
            undo.callback(scratch.cleanup)
        undo.push(engine._parts.ground.closing)
        undo.push(engine._parts.ground.attached)
        undo.callback(engine._close.detach)
        yield
        undo.pop_all()


def _decide(model: nn.Module, config: EngineConfig, choice: Choice) -> Blueprint:
    """All decisions; ends a script that only wanted to see them."""
    blueprint = plan(model, config, choice.rule)
    if config.plan_only:
        raise PlanOnly(first_plan(blueprint))
    return blueprint


def _make_optimizer(
    engine: OffloadEngine, choice: Choice, known: Mapping[str, nn.Parameter]
) -> OffloadOptimizer:  # fmt: skip
    params = choice.params
    if params is None:
        params = [parameter for parameter in known.values() if parameter.requires_grad]
        if not params:
            raise ConfigError(
                f"model {type(engine.module).__name__}: expected trainable parameters, got none"
                " with requires_grad. Set requires_grad before making the engine."
            )
    try:
        return OffloadOptimizer(
            params, EngineStepper(engine), known=known.values(),
            rule=choice.rule, defaults=choice.defaults, takes_all=choice.params is None,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise ConfigError(f"params: {error}.") from error


def _captures(engine: OffloadEngine) -> Captures:
    """What its parts ask of an engine; they hold it weakly."""
    me, tracked, own = weakref.ref(engine), engine._tracked, engine.optimizer
    return Captures(
        lambda: capture_state(alive(me)),
        lambda: capture_late(tracked, own.param_groups),
        Groups(lambda: alive(me).optimizer.param_groups, lambda group: _names(me, group)),
        lambda: begin_forward(alive(me)),
    )


def _name(engine: OffloadEngine, parameter: nn.Parameter | str) -> str:
    if isinstance(parameter, str):
        return parameter
    name = engine._parts.names_by_id.get(id(parameter))
    if name is None:
        raise StateError("expected a parameter of the engine's model, got another.")
    return name


def _select(engine: OffloadEngine, parameters: Any) -> list[str]:
    if parameters is None:
        return list(engine._parts.ground.blueprint.found.parameters)
    if isinstance(parameters, nn.Module):
        parameters = list(parameters.parameters())
    if isinstance(parameters, nn.Parameter | str):
        parameters = [parameters]
    return [_name(engine, parameter) for parameter in parameters]


def _names(me: weakref.ref[OffloadEngine], group: Mapping[str, Any]) -> list[str]:
    names = alive(me)._parts.names_by_id
    return [names[id(parameter)] for parameter in group["params"]]


@contextlib.contextmanager
def _access(engine: OffloadEngine) -> Iterator[None]:
    """Read weights in the block; beside another owner without gradients, and checked afterwards."""
    if not engine.config.read_only:
        yield
        return
    with current(engine._parts.ground.store), torch.no_grad():
        yield


def _refuse_second(model: nn.Module) -> None:
    if is_hooked(model):
        raise StateError(
            f"model {type(model).__name__}: an engine holds it already. Close that engine first."
        )


@contextlib.contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Autocast would keep casts of weights that are refilled with other values later."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _close(
    parts: Parts, pid: int, scratch: tempfile.TemporaryDirectory[str] | None
) -> None:  # fmt: skip
    """Commit what was stepped, then release in reverse order of construction."""
    if os.getpid() != pid:  # a fork has neither the threads nor the lock
        return
    try:
        parts.ground.ledger.finish_or_discard()
    except (OffloadError, OSError) as error:
        _LOG.error("close: the last step is lost: %s", error)
        parts.ground.ledger.abandon()
    finally:
        with parts.ground.closing:
            parts.ground.attached.close()
        if scratch is not None:
            scratch.cleanup()
