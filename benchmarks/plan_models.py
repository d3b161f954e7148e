"""The models of bench_plan, as functions that `offload plan plan_models:NAME` can name."""

from __future__ import annotations

from offload.cli.generic_decoder import GenericDecoder
from offload.schedule.generic import DecoderShape

SMALL = DecoderShape(layers=6, width=512, tied=True, vocab=4096)
MEDIUM = DecoderShape(layers=8, width=512, tied=False, vocab=8192)
LARGE = DecoderShape(layers=8, width=768, tied=False, vocab=4096)


def small() -> GenericDecoder:
    return GenericDecoder(SMALL)


def medium() -> GenericDecoder:
    return GenericDecoder(MEDIUM)


def checkpointed() -> GenericDecoder:
    return GenericDecoder(MEDIUM, checkpointing=True)


def large() -> GenericDecoder:
    return GenericDecoder(LARGE)
