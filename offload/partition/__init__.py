"""WHAT travels: units, their layout, their chunks.  Pure: no torch, no I/O."""
