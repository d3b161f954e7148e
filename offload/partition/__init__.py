"""WHAT travels: units, their layout, their chunks.  Pure integers and frozen dataclasses: no torch, no I/O."""
