"""Let Ctrl-C and SIGTERM wait until a step is either submitted or not, a commit written or not.

Python runs signal handlers between any two bytecodes of the main thread; an exception raised there
would leave half of what belongs together.  Inside the block signals are noted, after it they act.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM for the block; keep it free of long waits.

    Only the main thread runs handlers, so elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held = [number for number, action in before.items() if action is not None]
    for number in held:  # one that was not set from Python could not be put back
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in held:
            signal.signal(number, before[number])
        for arrived in noted:
            signal.raise_signal(arrived)
