"""What every test gets: a fixed number of torch threads and the environment of a first run."""

import os
import signal

import pytest
import torch

NUM_THREADS = 1
RERUN_UNDER = ("OFFLOAD_SIMD", "OFFLOAD_AIO_BACKEND")


@pytest.fixture(autouse=True, scope="session")
def first_run():
    """No setting of the shell reaches a test; products have the bits of one thread."""
    for name in [name for name in os.environ if name.startswith("OFFLOAD_")]:
        if name not in RERUN_UNDER:
            del os.environ[name]
    torch.set_num_threads(NUM_THREADS)


def pytest_configure() -> None:
    """A background job of a shell ignores SIGINT, and so would whatever a test interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
