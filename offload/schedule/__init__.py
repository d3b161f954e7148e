"""WHEN things move: the trace of a step and what is placed where.  Pure: no torch, no I/O."""
