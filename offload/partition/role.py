"""What a flat buffer holds."""

from __future__ import annotations

import enum


class Role(enum.Enum):
    """What a flat buffer holds.  The value names it in the store and in messages."""

    PARAM = "param"  # 16-bit weight: the high half of the master, or the master rounded
    MASTER_LO = "master_lo"  # low half of the fp32 master, int16
    MASTER = "master"  # the fp32 master, whole, beside an fp16 weight
    EXP_AVG = "exp_avg"  # the optimizer's first state, whatever it calls it
    EXP_AVG_SQ = "exp_avg_sq"  # its second state
    EXP_AVG_SCALE = "exp_avg_scale"  # fp32, one for each block of a packed first state
    EXP_AVG_SQ_SCALE = "exp_avg_sq_scale"
    GRAD = (
        "grad"  # kept until the step is validated; spilled to disk where the host budget is short
    )
