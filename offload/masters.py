"""Weights and masters as tensors, in whichever way they are kept (`partition/weights.py`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from offload import kernels
from offload.errors import StateError
from offload.partition.role import Role
from offload.partition.weights import Weights

FP16_LIMIT = 65520.0  # from here on a value rounds to infinity


def dtype_of(weights: Weights, role: Role) -> torch.dtype:
    """Type of the elements of one of the roles of `weights`."""
    found = getattr(torch, weights.type_of(role))
    assert isinstance(found, torch.dtype)
    return found


def moved_dtype(weights: Weights) -> torch.dtype:
    """What moves to the device."""
    found = getattr(torch, weights.dtype)
    assert isinstance(found, torch.dtype)
    return found


def encode(
    weights: Weights,
    values: Tensor,  # (n,) of any floating type, anywhere
    pieces: Mapping[Role, Tensor],  # (n,) each of both roles, HOST; written
) -> None:
    """Make `values` the masters, and the weights that belong to them."""
    param, master = (pieces[role] for role in weights.roles)
    same = values.dtype is param.dtype and values.device.type == "cpu"
    if same and not weights.apart:
        # The master is these bits and sixteen zeros.  Not by torch: its threads wait for one
        # another, at times for seconds where the drive's work takes the processors.
        param.view(torch.int16).numpy()[:] = values.view(torch.int16).numpy()
        master.numpy()[:] = 0
        return
    whole = values.to(device="cpu", dtype=torch.float32).contiguous()
    if weights.apart:
        kernels.convert(whole, master)
        kernels.convert(master, param)
    else:
        kernels.split(whole, param, master)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:  # values: fp32, HOST
    """A copy in `dtype`, to nearest even; raises StateError where fp16 cannot hold a value."""
    out = torch.empty(values.shape, dtype=dtype)
    kernels.convert(values, out)
    if dtype is torch.float16 and not bool((values.abs() < FP16_LIMIT).all()):
        raise StateError(
            "export: expected weights within float16's range, +-65504, got a larger one or NaN."
            " Export as bf16 or fp32."
        )
    return out


def decode(
    weights: Weights,
    pieces: Mapping[Role, Tensor],  # (n,) each of `weights.decoded_from(...)`, HOST
    out: Tensor,  # (n,) fp32, HOST
) -> None:
    """Write the fp32 values to `out`."""
    if weights.master not in pieces:
        kernels.convert(pieces[Role.PARAM], out)
    elif weights.apart:
        kernels.convert(pieces[Role.MASTER], out)
    else:
        kernels.join(pieces[Role.PARAM], pieces[Role.MASTER_LO], out)
