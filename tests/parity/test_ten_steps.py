"""Ten steps with accumulation and clipping: the same bits as in memory, whatever carries them."""

import re

import models
import pytest
from case import (
    BF16,
    FP32,
    Case,
    assert_learned,
    assert_offloaded,
    assert_same,
    train_in_memory,
    train_offloaded,
)
from oracle import Group

import aio
from offload import kernels
from offload.partition.chunk import chunks_of, segments_of
from offload.partition.unit import TensorSpec, lay_out

SMALL, LARGE = 4096, 4 << 20
BACKENDS = ("uring", "libaio", "threads")
VARIANTS = ("portable", "avx2", "avx512", "neon")

TEN_STEPS = {"num_steps": 10, "accumulation": 2, "clipping": 0.5}
SMALL_TENSORS = Case(**TEN_STEPS)
# One tensor longer than the largest chunk: the embedding.
LONG_TENSOR = Case(
    kind=models.Decoder,
    options=(("vocab", 60_000), ("width", 70), ("num_blocks", 2), ("tied", True)),
    batch_options=(("size", 1), ("seq", 3)),
    **TEN_STEPS,
)


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """One of the three, or a visible skip where this machine forbids it."""
    try:
        aio.Queue(request.param).close()
    except OSError as error:
        pytest.skip(f"{request.param} does not work here: {error}")
    monkeypatch.setenv("OFFLOAD_AIO_BACKEND", request.param)
    return request.param


@pytest.fixture(params=VARIANTS)
def variant(request):
    if request.param not in kernels.supported():
        pytest.skip(f"this machine cannot run {request.param}")
    kernels.select(request.param)
    yield request.param
    kernels.select(None)


def chunk_borders_cut(case: Case, chunk_elems: int) -> bool:
    """Whether some tensor lies in two chunks of a unit, laid out alone as the partitioner would."""
    for name, param in case.model().named_parameters():
        unit = lay_out("alone", 0, [TensorSpec(name, tuple(param.shape))])
        pieces = [list(segments_of(unit, c)) for c in chunks_of(unit.num_elems, chunk_elems)]
        if len(pieces) > 1 and pieces[1][0].tensor_start == chunk_elems:
            return True
    return False


@pytest.mark.parametrize(
    ("case", "chunk_elems"), [(SMALL_TENSORS, SMALL), (LONG_TENSOR, LARGE)], ids=["4096", "4Mi"]
)
def test_ten_steps_equal_memory_on_every_backend(case, chunk_elems, backend, tmp_path):
    assert chunk_borders_cut(case, chunk_elems)
    with case.engine(tmp_path, **settings(chunk_elems)) as engine:
        trained = train_offloaded(engine, case)
        assert re.search(rf"\b{backend}\b", engine.describe())
        assert_offloaded(engine)
    assert_learned(case, trained)
    assert_same(trained, train_in_memory(case))


def test_ten_steps_equal_memory_in_every_variant(variant, tmp_path):
    case = SMALL_TENSORS
    with case.engine(tmp_path, **settings(SMALL)) as engine:
        assert kernels.variant() == variant
        assert_same(train_offloaded(engine, case), train_in_memory(case))


@pytest.mark.slow
def test_long_tensors_equal_memory_in_every_variant_on_every_backend(variant, backend, tmp_path):
    case = LONG_TENSOR
    with case.engine(tmp_path, **settings(LARGE)) as engine:
        assert_same(train_offloaded(engine, case), train_in_memory(case))


@pytest.mark.parametrize("compute_dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["moves-bf16", "moves-fp32"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_what_moves_and_what_computes_are_two_choices(dtype, compute_dtype, accumulation, tmp_path):
    if (dtype, compute_dtype) == (FP32, BF16):
        pytest.skip("nobody moves more bits than compute reads")
    case = Case(dtype=dtype, compute_dtype=compute_dtype, accumulation=accumulation, clipping=0.5)
    with case.engine(tmp_path) as engine:
        trained = train_offloaded(engine, case)
        assert_offloaded(engine)
    assert_learned(case, trained)
    assert_same(trained, train_in_memory(case))


@pytest.mark.parametrize("overlap", ["hold", "speculate", "auto"])
@pytest.mark.parametrize(
    "clipping", [0.0, 1e9, 1.65, 1e-3], ids=["off", "never", "sometimes", "always"]
)
def test_clipping_is_exact_at_every_rate_in_every_overlap(clipping, overlap, tmp_path):
    case = Case(clipping=clipping, accumulation=2, num_steps=6)
    clipped = {norm > clipping for norm in train_in_memory(case).norms} if clipping else set()
    assert clipped == {0.0: set(), 1e9: {False}, 1.65: {False, True}, 1e-3: {True}}[clipping]
    with case.engine(tmp_path, overlap=overlap) as engine:
        assert_same(train_offloaded(engine, case), train_in_memory(case))


@pytest.mark.parametrize("threshold", [1, 49, 145, 10**9])
def test_tensors_kept_on_the_device_have_the_same_bits(threshold, tmp_path):
    case = Case(accumulation=2, clipping=0.5)
    with case.engine(tmp_path, param_persistence_threshold=threshold) as engine:
        assert_same(train_offloaded(engine, case), train_in_memory(case))


def test_interleaved_groups_have_their_own_settings(tmp_path):
    groups = (
        Group("bias", lr=3e-2, weight_decay=0.0),
        Group("norm", lr=5e-3, weight_decay=0.0, betas=(0.5, 0.9)),
        Group("blocks.1", lr=1e-2, weight_decay=0.3, eps=1e-5),
        Group(lr=2e-3),
    )
    case = Case(groups=groups, accumulation=2, clipping=0.5)
    with case.engine(tmp_path) as engine:
        trained = train_offloaded(engine, case)
        assert len(engine.optimizer.param_groups) == len(groups)
    assert_same(trained, train_in_memory(case))
    alike = train_in_memory(Case(groups=(Group(lr=2e-3),), accumulation=2, clipping=0.5))
    assert trained.losses != alike.losses


def settings(chunk_elems: int) -> dict[str, object]:
    if chunk_elems == SMALL:
        return {"chunk_elems": chunk_elems}
    # A slot of 4 Mi elements holds 12 to 16 bytes each, and the embedding computes in fp32.
    return {"chunk_elems": chunk_elems, "host_memory": "320MiB", "device_memory": "96MiB"}
