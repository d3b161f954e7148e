"""A unit whose state lies in files, in memory or nowhere, and what an update makes of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

import aio
from offload import kernels
from offload.kernels import ROW, adam_row
from offload.optim.chunks import GRAD_FORMATS, StreamPlace, build_unit_chunks, stack
from offload.optim.pipeline import UPDATE_ROLES, UpdateJob, UpdatePipeline
from offload.optim.reference import TYPES, TensorState
from offload.partition.states import BLOCK_ELEMS, FP32_MOMENTS, SCALES, STATES, StateTable
from offload.partition.unit import Role, TensorSpec, Unit, lay_out, round_up

ON_DISK = dict.fromkeys(UPDATE_ROLES, "disk")


def make_unit(
    name: str, sizes: list[int], *, frozen: int = 0, states: StateTable = FP32_MOMENTS
) -> Unit:
    """Tensors of `sizes` elements; `frozen` more elements that no update touches.

    Every third one is plain.
    """
    specs = [
        TensorSpec(f"{name}.{index}", (size,), plain=index % 3 == 2)
        for index, size in enumerate(sizes)
    ]
    last = TensorSpec(f"{name}.frozen", (frozen,), trainable=False)
    return lay_out(name, 0, [*specs, last], states=states)


def make_rows(num_rows: int) -> np.ndarray:
    """Rows that differ, so that a segment with the wrong one shows."""
    return np.array(
        [
            adam_row(1e-3 * (i + 1), (0.9, 0.99), 1e-8, 0.1, i + 1, decoupled=True, grad_scale=0.5)
            for i in range(num_rows)
        ],
        ROW,
    )


def encode(
    unit: Unit, roles: Mapping[Role, torch.Tensor], index: int, values: torch.Tensor
) -> None:
    """Set a state in both sections of a unit."""
    borders = (0, unit.packed_elems, unit.trainable_elems)
    for start, stop in itertools.pairwise(borders):
        if start < stop:
            state = state_in(unit, roles, index, start, stop)
            kernels.state_encode(values[start:stop], state, index=index, step=0)


def state_in(
    unit: Unit, roles: Mapping[Role, torch.Tensor], index: int, start: int, stop: int
) -> kernels.State:
    """Elements [start, stop) of a state in `roles`, which hold bytes; shares memory."""
    role, packed = STATES[index], unit.is_packed(start)
    first, last = (unit.byte_of(role, at) for at in (start, stop))
    data = roles[role][first:last].view(TYPES[unit.states.format(role, packed=packed)])
    if not packed:
        return kernels.State(role.value, data)
    blocks = (start, round_up(stop, BLOCK_ELEMS))
    first, last = (unit.byte_of(SCALES[index], at) for at in blocks)
    return kernels.State(role.value, data, roles[SCALES[index]][first:last].view(torch.float32))


@dataclass
class StoredUnit:
    """Side A holds generation g; an update writes g+1 to side B, and in memory in place."""

    unit: Unit
    folder: Path
    # "disk"; "late": read after the release; "host"; "copy": of host memory, in a slot; "beside":
    # of host memory, in other host memory; "zero"
    placement: Mapping[Role, str]
    grad_dtype: str = "bfloat16"
    seed: int = 0
    initial: dict[Role, torch.Tensor] = field(default_factory=dict)
    memory: dict[Role, aio.Buffer] = field(default_factory=dict)
    beside: dict[Role, aio.Buffer] = field(default_factory=dict)
    files: dict[tuple[Role, str], aio.File] = field(default_factory=dict)
    before: dict[Role, bytes] = field(default_factory=dict)  # side B

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._make_state()
        for role, tensor in self.initial.items():
            if self.placement[role] == "zero":
                tensor.zero_()
            if self.placement[role] in ("host", "copy", "beside"):
                self.memory[role] = aio.Buffer(self.num_bytes(role))
                self._view(role)[:] = tensor.view(torch.uint8)
                if self.placement[role] == "beside":
                    self.beside[role] = aio.Buffer(self.num_bytes(role))
            else:
                self._write_file(role, "a", tensor)
            before = torch.zeros_like(tensor)
            if role is Role.PARAM:
                before[self.unit.trainable_elems :] = tensor[self.unit.trainable_elems :]
            self.before[role] = _raw(before)
            self._write_file(role, "b", before)  # frozen tensors are on both sides from the start

    def _make_state(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        size = self.unit.trainable_elems  # padding gets values too: it must be carried through
        values = torch.randn(size, generator=random)
        frozen = torch.randn(self.unit.num_elems - size, generator=random)
        if self.unit.states.weights.apart:
            param, master = values.half(), values
        else:
            weights = TensorState.of(values, table=StateTable(()))
            param, master = weights.param, weights.master_lo
        self.initial = {
            Role.PARAM: torch.cat([param, frozen.to(param.dtype)]),
            self.unit.states.weights.master: master,
        }
        moments = (
            torch.randn(size, generator=random) * 0.1, torch.rand(size, generator=random) * 0.01
        )  # fmt: skip
        for role in self.unit.roles[2:]:
            self.initial[role] = torch.zeros(self.unit.role_bytes(role), dtype=torch.uint8)
        for index, values in enumerate(moments[: len(self.unit.states.states)]):
            encode(self.unit, self.initial, index, values)
        grad = torch.randn(size, generator=random).to(getattr(torch, self.grad_dtype))
        self.initial[Role.GRAD] = grad

    def num_bytes(self, role: Role) -> int:
        if role is Role.GRAD:
            width = GRAD_FORMATS[self.grad_dtype][0]
            return round_up(self.unit.trainable_elems * width, 4096)
        return round_up(self.unit.role_bytes(role), 4096)

    def _view(self, role: Role) -> torch.Tensor:
        tensor = self.initial[role]
        raw = np.frombuffer(self.memory[role].view, np.uint8)[: tensor.nbytes]
        return torch.from_numpy(raw)

    def path(self, role: Role, side: str) -> Path:
        return self.folder / f"{self.unit.name}.{role.value}.{side}"

    def _write_file(self, role: Role, side: str, tensor: torch.Tensor) -> None:
        raw = tensor.view(torch.uint8).numpy().tobytes()
        self.path(role, side).write_bytes(raw.ljust(self.num_bytes(role), b"\0"))
        self.files[role, side] = aio.File(self.path(role, side), "r+")

    def streams(self) -> dict[Role, StreamPlace]:
        """The places of every role; gradients are not written."""
        return {role: self._place(role) for role in self.initial}

    def _place(self, role: Role) -> StreamPlace:
        where = self.placement[role]
        memory = {"host": self.memory, "beside": self.beside}.get(where)
        place = StreamPlace(
            host_address=memory[role].address if memory else None,
            source_address=self.memory[role].address if where in ("copy", "beside") else None,
            read=(self.files[role, "a"], 0) if where in ("disk", "late") else None,
            write=None if role is Role.GRAD else (self.files[role, "b"], 0),
            after_release=where == "late",
        )
        if role is not Role.GRAD:
            return place
        elem_bytes, code = GRAD_FORMATS[self.grad_dtype]
        return replace(place, elem_bytes=elem_bytes, format=code)

    def expected(self, rows: np.ndarray, row_of: Mapping[str, int | None]) -> dict[Role, bytes]:
        """Generation g+1 by the reference; frozen tensors, those without a row, padding stay."""
        after = {role: self.initial[role].clone() for role in self.unit.roles}
        for slot in self.unit.slots:
            row = row_of.get(slot.tensor.name)
            if row is None or not slot.tensor.trainable:
                continue
            halves = (after[role][slot.start : slot.stop] for role in self.unit.roles[:2])
            states = tuple(
                state_in(self.unit, after, index, slot.start, slot.stop)
                for index in range(len(self.unit.states.states))
            )
            key = kernels.tensor_key(slot.tensor.name)
            grad = self.initial[Role.GRAD][slot.start : slot.stop]
            if self.unit.states.weights.apart:
                weight, master = halves
                origin = kernels.Origin(key)
                whole = kernels.Whole(master, weight)
                kernels.update(whole, states, grad, row=rows[row], origin=origin)
            else:
                TensorState(*halves, states, key).update(grad, rows[row])
        return {role: _raw(tensor) for role, tensor in after.items()}

    def written(self) -> dict[Role, bytes]:
        """Side B, without the padding to 4096."""
        return {
            role: self.path(role, "b").read_bytes()[: self.initial[role].nbytes]
            for role in self.unit.roles
        }

    def is_written(self) -> bool:
        return any(raw != self.before[role] for role, raw in self.written().items())

    def fill_gradients(self) -> None:
        """Put the gradients where the update finds them, in memory or on disk."""
        tensor = self.initial[Role.GRAD]
        if Role.GRAD in self.memory:
            self._view(Role.GRAD)[:] = tensor.view(torch.uint8)
        else:
            raw = _raw(tensor).ljust(self.num_bytes(Role.GRAD), b"\0")
            self.path(Role.GRAD, "a").write_bytes(raw)

    def in_memory(self, role: Role) -> bytes:
        return _raw(self._view(role).clone())

    def before_update(self, role: Role) -> bytes:
        return _raw(self.initial[role])

    def close(self) -> None:
        for file in self.files.values():
            file.close()


ROWS = make_rows(6)


def row_of(stored: StoredUnit) -> dict[str, int | None]:
    """Another row for each tensor."""
    return {slot.tensor.name: index for index, slot in enumerate(stored.unit.slots)}


def chunks_of(
    stored: StoredUnit,
    *,
    chunk_elems: int = 2048,
    unit_index: int = 0,
    deadline: int = 0,
    **changes,
):
    settings = {"streams": stored.streams(), "rows": row_of(stored), **changes}
    return build_unit_chunks(
        stored.unit, unit_index=unit_index, chunk_elems=chunk_elems, deadline=deadline, **settings
    )


def submit(
    pipeline: UpdatePipeline,
    *stored: StoredUnit,
    released: bool = True,
    checksums: bool = False,
    **settings,
) -> UpdateJob:
    """One job; unit i has deadline i."""
    parts = [
        chunks_of(unit, unit_index=index, deadline=index, **settings)
        for index, unit in enumerate(stored)
    ]
    chunks, segments = stack(parts)
    flags = np.full(len(stored), released, np.uint8)
    names = [unit.unit.name for unit in stored]
    return pipeline.submit(
        chunks, segments, ROWS, flags, unit_names=names, keep_alive=stored, checksums=checksums
    )


def assert_updated(stored: StoredUnit) -> None:
    expected = stored.expected(ROWS, row_of(stored))
    assert expected[Role.PARAM] != stored.initial[Role.PARAM].view(torch.uint8).numpy().tobytes()
    assert stored.written() == expected


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
