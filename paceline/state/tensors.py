"""Tensors as bytes and back, without a copy where the memory allows it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from paceline.errors import FrameError
from paceline.state.layout import WIDTHS

Bytes = bytes | bytearray | memoryview


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, as specs carry it.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype called `name`. Raises FrameError for one that is not sent.

    >>> dtype_of("float16")
    torch.float16
    """
    if name not in WIDTHS:
        raise FrameError(f"unknown dtype {name!r}", f"known are {', '.join(WIDTHS)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def flat(tensor: Tensor) -> Tensor:
    """The elements in logical order as one contiguous dimension: a view of the same memory, or else a copy."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1)


def as_bytes(tensor: Tensor) -> memoryview:
    """The elements' bytes in logical order. For a contiguous tensor in CPU memory they are that memory, not a copy; the
    view keeps alive whatever it shows."""
    return flat(tensor).cpu().view(torch.uint8).numpy().data


def from_bytes(buffer: Bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor over `buffer`, sharing its memory unless that is read-only.

    Raises FrameError when the buffer is not as long as dtype and shape say.
    """
    view = memoryview(buffer)
    expected = prod(shape) * dtype.itemsize
    if view.nbytes != expected:
        raise FrameError(f"a payload of {view.nbytes} bytes came where {expected} bytes of {dtype} were expected")
    if expected == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    raw = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    return raw.view(dtype).view(tuple(shape))
