"""The pool: the same bits on any number of threads, from any thread, and never across a fork."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_arrays import tame_state, wild_state

from offload import kernels
from offload.errors import ConfigError, StateError

ROW = kernels.adam_row(1e-3, (0.9, 0.999), 1e-8, 0.01, 5, decoupled=True)


@settings(max_examples=20, deadline=None)
@given(
    n=st.sampled_from([0, 1, 4095, 4096, 4097, 8191, 40_000, 65536 * 3 + 17, 300_007]),
    seed=st.integers(0, 2**32 - 1),
    num_threads=st.integers(1, 5),
    wild=st.booleans(),
)
def test_the_number_of_threads_changes_no_bit(
    n: int, seed: int, num_threads: int, wild: bool
) -> None:
    start = (wild_state if wild else tame_state)(seed, n, "bfloat16")
    alone, together = start.copy(), start.copy()
    reported = alone.update(ROW)
    with kernels.Threads(num_threads) as threads:
        assert together.update(ROW, threads) is reported
        assert together.data() == alone.data()
        whole, copy = start.master(), start.copy()
        weight = torch.zeros(n, dtype=torch.float16)
        kernels.adam_whole(
            whole, copy.exp_avg, copy.exp_avg_sq, copy.grad, row=ROW, weight=weight, threads=threads
        )
        if not wild:
            assert whole.tobytes() == alone.master().tobytes()
            assert torch.equal(weight, torch.from_numpy(whole).half())
        joined, half = np.empty(n, np.float32), torch.empty(n, dtype=torch.float16)
        kernels.join(alone.hi, alone.lo, joined, threads=threads)
        assert joined.tobytes() == alone.master().tobytes()
        kernels.convert(joined, half, threads=threads)
        single = torch.empty(n, dtype=torch.float16)
        kernels.convert(joined, single)
        assert torch.equal(half.view(torch.int16), single.view(torch.int16))


def test_a_pool_serves_call_after_call_without_losing_a_tile() -> None:
    src = np.arange(1, 20_001, dtype=np.float32)
    with kernels.Threads(4) as threads:
        for _ in range(300):
            dst = np.zeros(len(src), np.float32)
            half = np.zeros(len(src), np.float16)
            kernels.convert(src, half, threads=threads)
            kernels.convert(half, dst, threads=threads)
            assert np.all(dst > 0)


def test_a_result_that_is_not_finite_is_reported_from_any_tile() -> None:
    with kernels.Threads(3) as threads:
        for at in (0, 70_000, 199_999):
            state = tame_state(1, 200_000, "float32")
            state.grad[at] = np.nan
            assert state.update(ROW, threads)
        assert not tame_state(1, 200_000, "float32").update(ROW, threads)


def test_closing_twice_is_fine_and_using_closed_threads_is_not() -> None:
    threads = kernels.Threads(2)
    threads.close()
    threads.close()
    with pytest.raises(StateError, match="closed"):
        tame_state(1, 10, "float32").update(ROW, threads)


@pytest.mark.parametrize("num_threads", [0, -1, 1025, 2**32])
def test_an_impossible_number_of_threads_is_refused(num_threads: int) -> None:
    with pytest.raises(ConfigError, match=f"got {num_threads}"):
        kernels.Threads(num_threads)


def test_one_pool_may_be_used_by_several_threads_in_turn() -> None:
    results = []
    with kernels.Threads(2) as threads:
        for _ in range(3):
            state = tame_state(2, 50_000, "float16")
            caller = threading.Thread(target=lambda s=state: results.append(s.update(ROW, threads)))
            caller.start()
            caller.join()
    assert results == [False] * 3


def test_a_forked_child_is_refused_and_may_close_and_open_its_own() -> None:
    threads = kernels.Threads(2)
    state = tame_state(3, 100_000, "float32")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            state.update(ROW, threads)
        except StateError as error:
            threads.close()
            with kernels.Threads(2) as own:
                code = 0 if "fork" in str(error) and not state.update(ROW, own) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not state.update(ROW, threads)
    threads.close()
