"""Copies on streams of their own: in every order that the events allow, the same numbers."""

from __future__ import annotations

import pytest
import torch
from case import (
    Case,
    Trained,
    assert_same,
    collect_engine,
    engine_step,
    train_in_memory,
    train_offloaded,
)
from scripted_streams import ScriptedStreams

from offload.runtime import binding
from offload.runtime.device import StreamDevice
from offload.runtime.residency import Residency
from offload.runtime.streams import CudaStreams, Lane

NUM_ELEMS = 64


def halves(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_ELEMS, generator=generator).bfloat16()


def test_a_fill_comes_behind_compute_and_compute_behind_the_fill() -> None:
    streams = ScriptedStreams(0)
    StreamDevice(streams).fill(torch.zeros(NUM_ELEMS), halves(0), None)
    assert streams.log == [
        "record compute", "wait in for compute", "run in", "record in", "wait compute for in"
    ]  # fmt: skip


def test_a_fill_waits_for_no_more_of_compute_than_its_storage_does() -> None:
    streams = ScriptedStreams(0)
    device = StreamDevice(streams)
    left = device.mark()
    streams.log.append("compute")
    device.fill(torch.zeros(NUM_ELEMS), halves(0), None, behind=left)
    assert streams.copies == [(streams.log.index("run in"), left.at)]
    assert streams.log.count("record compute") == 1


def test_gradients_leave_behind_what_made_them_and_compute_waits_for_nothing() -> None:
    streams = ScriptedStreams(0)
    device = StreamDevice(streams)
    grads = [torch.randn(NUM_ELEMS), torch.randn(NUM_ELEMS)]
    landed = [torch.zeros(NUM_ELEMS) for _ in grads]
    copied = device.copy_out(list(zip(landed, grads, strict=True)), behind=device.mark())
    assert streams.log == ["record compute", "wait out for compute", "run out", "record out"]
    assert not copied.passed
    copied.wait()
    assert all(torch.equal(one, grad) for one, grad in zip(landed, grads, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_host_memory_may_change_when_the_event_has_passed_and_not_before(seed: int) -> None:
    streams = ScriptedStreams(seed, ignore_waits_of=Lane.COMPUTE)  # nobody else moves the copies
    device = StreamDevice(streams)
    slot, flat = halves(seed).clone(), torch.zeros(NUM_ELEMS)
    copied = device.fill(flat, slot, None)
    assert not copied.passed
    while not copied.done():
        assert torch.equal(slot, halves(seed))
    slot.fill_(7.0)
    assert torch.equal(flat, halves(seed).float())


def test_whole_weights_are_joined_on_the_way() -> None:
    master = torch.randn(NUM_ELEMS)
    bits = master.view(torch.int32)
    hi = ((bits + 0x8000) >> 16).to(torch.int16)
    lo = (bits - (hi.to(torch.int32) << 16)).to(torch.int16)
    flat = torch.zeros(NUM_ELEMS)
    StreamDevice(ScriptedStreams(1)).fill(flat, hi.view(torch.bfloat16), lo).wait()
    assert torch.equal(flat, master)


def log_units(streams: ScriptedStreams, monkeypatch) -> None:
    """Note in the log where compute turns to another unit, and where storages are made."""

    def ensure(residency, index, *, again=False, real=Residency.ensure):
        real(residency, index, again=again)
        note = f"compute {residency.bound[index].unit.name}"
        if note not in [entry for entry in streams.log if entry.startswith("compute")][-1:]:
            streams.log.append(note)

    def new_storage(*args, real=binding.new_storage):
        streams.log.append("make")
        return real(*args)

    monkeypatch.setattr(Residency, "ensure", ensure)
    monkeypatch.setattr(binding, "new_storage", new_storage)


@pytest.mark.parametrize("place", ["disk", "host", "device"])
@pytest.mark.parametrize("overlap", ["hold", "speculate"])
def test_the_copy_of_a_unit_runs_beside_the_unit_before(
    overlap, place, scripted, tmp_path, monkeypatch
) -> None:
    """It waits for no more of compute than what had its memory before."""
    case = Case(num_steps=4)
    made = scripted(seed=1, lazy=True)
    settings = {"placement": {"weights": place, "state": "disk"}, "overlap": overlap}
    with case.engine(tmp_path, host_memory="4MB", **settings) as engine:
        streams, trained = made[-1], Trained()
        engine_step(engine, case, 0, trained)
        log_units(streams, monkeypatch)
        engine_step(engine, case, 1, trained)
        log, begin, given = streams.log, len(streams.log), len(streams.copies)
        engine_step(engine, case, 2, trained)
        engine_step(engine, case, 3, trained)
        assert_same(collect_engine(engine, trained), train_in_memory(case))
    beside = waiting = 0
    for at, behind in streams.copies[given:]:
        before = [i for i in range(begin, at) if log[i].startswith("compute")]
        made_at = [i for i in range(at) if log[i] == "make"][-2:]  # the next one's may be there
        assert place == "device" or behind > made_at[0]
        if len(before) > 1:
            beside += behind < before[-1]
            waiting += behind > before[-1]
    assert beside > 3 * waiting


@pytest.mark.parametrize("place", ["disk", "host", "device", "auto"])
@pytest.mark.parametrize("overlap", ["hold", "speculate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_training_over_streams_equals_memory(dtype, overlap, place, scripted, tmp_path) -> None:
    case = Case(dtype=dtype, clipping=1.65, num_steps=4)
    made = scripted(seed=3)
    with case.engine(tmp_path, overlap=overlap, placement=place) as engine:
        assert_same(train_offloaded(engine, case), train_in_memory(case))
        assert len(made[-1].registered) == 1
    assert made[-1].registered == []


@pytest.mark.parametrize("seed", range(3))
def test_three_slots_of_many_chunks_are_reused_only_behind_their_copies(
    seed, scripted, tmp_path
) -> None:
    """Whoever asks for a slot finds the copies unfinished, and waits for the oldest."""
    case = Case(num_steps=3)
    made = scripted(seed, lazy=True)
    with case.engine(tmp_path, host_memory="240KB") as engine:
        assert engine.plan.placement.fetch_slots == 3
        assert_same(train_offloaded(engine, case), train_in_memory(case))
    assert made[-1].most_waiting > 3


def test_memory_that_cannot_be_pinned_is_told(scripted, tmp_path, monkeypatch) -> None:
    case = Case(num_steps=3)
    monkeypatch.setattr(ScriptedStreams, "register", lambda *args: None)
    scripted(seed=5)
    with case.engine(tmp_path) as engine:
        assert "host memory is not pinned" in engine.describe()
        assert_same(train_offloaded(engine, case), train_in_memory(case))


def test_the_reason_is_logged(monkeypatch, caplog) -> None:
    class Refusing:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    streams = object.__new__(CudaStreams)  # there need not be a GPU
    streams._device = torch.device("cpu")
    assert streams.register(4096, 8192) is None
    assert "8,192 bytes of host memory cannot be pinned" in caplog.text
    assert "error 2" in caplog.text


def test_a_failed_call_leaves_no_error_for_the_next_kernel(monkeypatch) -> None:
    """Torch asks for the last error behind each kernel, whoever has made it."""
    left = ["invalid argument"]

    class Refusing:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            return 1

    def ones(*args, real=torch.ones, **options):
        if left:
            raise RuntimeError(f"CUDA error: {left.pop()}")
        return real(*args, **options)

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    monkeypatch.setattr(torch, "ones", ones)
    streams = object.__new__(CudaStreams)
    streams._device = torch.device("cpu")
    assert streams.register(4096, 8192) is None
    assert not left


def test_a_mistake_in_the_order_is_found(scripted, tmp_path) -> None:
    case = Case(num_steps=3)
    scripted(seed=5, ignore_waits_of=Lane.COMPUTE)
    with case.engine(tmp_path, placement="disk") as engine, pytest.raises(AssertionError):
        assert_same(train_offloaded(engine, case), train_in_memory(case))
