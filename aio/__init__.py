"""Asynchronous direct I/O: files, buffers, and a queue that gives a ticket for every transfer.

    with aio.Queue() as queue, aio.File("weights.bin") as file, aio.Buffer(file.size) as buffer:
        ticket = queue.read(file, buffer, 0)
        ...
        ticket.wait()

Knows nothing of tensors or training; `aio/README.md` tells the life of a request.
"""

from aio import faults
from aio.buffer import Buffer
from aio.errors import IOFailed
from aio.file import File
from aio.native import MAX_BLOCKS_IN_FLIGHT
from aio.probe import Probe, probe
from aio.queue import MAX_DRIVES, Queue, Request
from aio.stats import Flow, Stats
from aio.ticket import Ticket

__all__ = [
    "MAX_BLOCKS_IN_FLIGHT",
    "MAX_DRIVES",
    "Buffer",
    "File",
    "Flow",
    "IOFailed",
    "Probe",
    "Queue",
    "Request",
    "Stats",
    "Ticket",
    "faults",
    "probe",
]
