"""A drive fails, stumbles or is late at any block of a training step: a typed error or the same
numbers, no hang, and the last generation goes on bit for bit.

The fast suite tries a sample of the blocks, the slow one every block.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import models
import pytest
from faulty import (
    TYPED,
    Outcome,
    Reference,
    faulty_from_birth,
    open_engine,
    queue_of,
    train,
)

from aio.faults import Fault, Faults
from offload.errors import StoreError

pytestmark = pytest.mark.timeout(240)  # what hangs fails
NUM_SAMPLED = 4
EVERY = 1 << 20

SETTINGS = {
    "held": {"overlap": "hold", "gradient_clipping": 1.0},
    "speculated": {"overlap": "speculate"},
}
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
STUMBLES: dict[str, Callable[[int], Fault]] = {
    "EAGAIN": lambda n: Fault.error(n, errno.EAGAIN),
    "EINTR": lambda n: Fault.error(n, errno.EINTR),
    "short": lambda n: Fault.short(n, 512),
    "odd": lambda n: Fault.short(n, 77),
    "delay": lambda n: Fault.delay(n, 3),
}


@pytest.fixture(scope="module", params=SETTINGS)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    made = Reference.make(tmp_path_factory.mktemp("good"), **SETTINGS[request.param])
    assert made.num_blocks > 100
    return made


def numbers(reference: Reference, count: int, *, salt: int) -> list[int]:
    """`count` block numbers spread over the step, others for every kind of fault."""
    stride = max(1, reference.num_blocks // count)
    return list(range(salt * 7 % stride, reference.num_blocks, stride))


def check_errors(reference: Reference, folder: Path, number: int, count: int) -> list[Outcome]:
    found = []
    for nth in numbers(reference, count, salt=number):
        outcome = reference.check(folder, lambda at: Fault.error(at, number), nth)
        if outcome.error is not None:
            assert errno.errorcode[number] in outcome.error or errno_text(number) in outcome.error
        elif outcome.block is not None and reference.settings["overlap"] == "hold":
            # Only what is read ahead and not needed may fail in silence.
            assert outcome.block.operation == "read", nth
        found.append(outcome)
    return found


def errno_text(number: int) -> str:
    return {errno.EIO: "Input/output error", errno.ENOSPC: "No space left on device"}[number]


def check_stumbles(reference: Reference, folder: Path, kind: str, count: int) -> None:
    for nth in numbers(reference, count, salt=list(STUMBLES).index(kind)):
        assert reference.check(folder, STUMBLES[kind], nth).error is None, (kind, nth)


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_at_a_sampled_block_is_typed_and_the_last_generation_goes_on(
    reference: Reference, tmp_path: Path, kind: str
) -> None:
    found = check_errors(reference, tmp_path / "case", ERRORS[kind], NUM_SAMPLED)
    assert any(outcome.error for outcome in found)


@pytest.mark.parametrize("kind", STUMBLES)
def test_a_stumble_at_a_sampled_block_changes_no_number(
    reference: Reference, tmp_path: Path, kind: str
) -> None:
    check_stumbles(reference, tmp_path / "case", kind, NUM_SAMPLED)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_at_any_block_is_typed_and_the_last_generation_goes_on(
    reference: Reference, tmp_path: Path, kind: str
) -> None:
    found = check_errors(reference, tmp_path / "case", ERRORS[kind], EVERY)
    assert sum(outcome.error is not None for outcome in found) > len(found) // 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", STUMBLES)
def test_a_stumble_at_any_block_changes_no_number(
    reference: Reference, tmp_path: Path, kind: str
) -> None:
    check_stumbles(reference, tmp_path / "case", kind, EVERY)


def test_close_tells_of_a_last_step_that_is_lost(tmp_path: Path) -> None:
    """Nothing else can: step() has returned, and the script would end with status 0."""
    engine = open_engine(tmp_path, aio_backend="faults", host_memory="16MiB", overlap="hold")
    train(engine, 0)
    engine.full_fp32_param("head.weight")
    engine.backward(engine(*models.batch(1)))
    faults = Faults(queue_of(engine))
    at = len(faults.log())
    faults.inject(*(Fault.error(n, errno.EIO) for n in range(at, at + 1000)))
    engine.step()
    with pytest.raises(StoreError, match="Input/output error"):
        engine.close()
    engine.close()
    with open_engine(tmp_path, resume=True) as engine:
        assert engine.global_step == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_saved_while_its_step_is_written_ends_as_that_step_does(
    tmp_path: Path, fails: bool
) -> None:
    settings = {"aio_backend": "faults", "host_memory": "16MiB", "overlap": "hold"}
    (tmp_path / "store").mkdir()
    engine = open_engine(tmp_path / "store", **settings)
    train(engine, 0)
    engine.save_checkpoint(tmp_path / "ck", "old").wait()
    engine.backward(engine(*models.batch(1)))
    faults = Faults(queue_of(engine))
    at = len(faults.log())
    if fails:
        faults.inject(*(Fault.error(n, errno.EIO) for n in range(at, at + 1000)))
    faults.allow(0)
    engine.step()
    saving = engine.save_checkpoint(tmp_path / "ck", "new")
    assert not saving.done()
    faults.allow()
    if fails:
        with pytest.raises(StoreError, match=r"its step is lost.*Input/output error"):
            saving.wait()
        with pytest.raises(StoreError, match="Input/output error"):
            engine.close()
    else:
        saving.wait()
        engine.close()
    assert (tmp_path / "ck" / "latest").read_text() == ("old\n" if fails else "new\n")
    with open_engine(tmp_path / "store", resume=True) as engine:
        assert engine.global_step == (1 if fails else 2)
        engine.load_checkpoint(tmp_path / "ck")
        assert engine.global_step == (1 if fails else 2)
        train(engine, 2)


def test_an_error_of_the_script_is_told_and_not_the_step_that_it_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script() -> None:
        settings = {"aio_backend": "faults", "host_memory": "16MiB", "overlap": "hold"}
        with open_engine(tmp_path, **settings) as engine:
            engine.backward(engine(*models.batch(0)))
            faults = Faults(queue_of(engine))
            at = len(faults.log())
            faults.inject(*(Fault.error(n, errno.EIO) for n in range(at, at + 1000)))
            engine.step()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        script()
    assert any("the last step is lost" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("nth", [0, 1, 5, 9])
def test_an_error_while_the_first_generation_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    with (
        faulty_from_birth(monkeypatch, Fault.error(nth, errno.ENOSPC)) as born,
        pytest.raises(TYPED, match="No space left"),
    ):
        open_engine(tmp_path, aio_backend="faults")
    assert len(born) == 1
    assert not list(tmp_path.iterdir())
