"""The memory of a shard's pieces, shared for as long as nobody writes.

What is shown to be sent, and what a worker is remembered to have read, is the piece's own memory. A write that comes
while such a reader is left goes to a copy, which takes the memory's place; the reader keeps what it has.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.state.layout import Piece
from paceline.state.spec import TensorSpec
from paceline.state.tensors import dtype_of


class Memory:
    """One flat tensor a piece, zero at first, and in pieces of kind "param" a parameter over each slice: of the
    tensor's shape where the slice is the whole of it, else flat."""

    def __init__(self, pieces: Sequence[Piece], tensors: Sequence[TensorSpec]) -> None:
        self.flats = {p.index: torch.zeros(p.numel, dtype=dtype_of(p.dtype)) for p in pieces}
        self.params: dict[int, list[Parameter]] = {}
        self._pieces = {p.index: p for p in pieces}
        self._shown: dict[int, weakref.ref[np.ndarray[Any, Any]]] = {}
        self._read: dict[int, dict[int, Tensor]] = {}
        self._kept: set[int] = set()
        for piece in pieces:
            if piece.kind == "param":
                views = zip(piece.slices, split(piece, self.flats[piece.index]), strict=True)
                shaped = [v.view(t.shape) if s.numel == (t := tensors[s.tensor]).numel else v for s, v in views]
                self.params[piece.index] = [Parameter(view) for view in shaped]

    def show(self, index: int) -> memoryview:
        """The bytes of piece `index` as they are now. They do not change while the view, or a part of it, is alive."""
        shown = self._shown.get(index)
        array = shown() if shown is not None else None
        if array is None:
            array = self.flats[index].view(torch.uint8).numpy()
            self._shown[index] = weakref.ref(array)
        return array.data

    def writable(self, index: int) -> Tensor:
        """The flat tensor of piece `index`, read by nobody else: it may be written until it is next shown or kept."""
        shown = self._shown.pop(index, None)
        if index in self._kept or (shown is not None and shown() is not None):
            self._kept.discard(index)
            self.flats[index] = self.flats[index].clone()
            if index in self.params:
                views = split(self._pieces[index], self.flats[index])
                for parameter, view in zip(self.params[index], views, strict=True):
                    parameter.data = view.view(parameter.shape)
        return self.flats[index]

    def remember(self, worker: int) -> None:
        """Keep the parameters as they are now as those that `worker` has read."""
        self._read[worker] = {index: self.flats[index] for index in self.params}
        self._kept.update(self.params)

    def forget(self, worker: int) -> None:
        """Keep nothing for `worker`."""
        self._read.pop(worker, None)

    def read_by(self, worker: int, index: int) -> Tensor | None:
        """The flat tensor of piece `index` as `worker` has read it, None where nothing is kept."""
        return self._read.get(worker, {}).get(index)


def split(piece: Piece, values: Tensor) -> tuple[Tensor, ...]:
    """Views of the values of each slice of a piece."""
    return values.split([part.numel for part in piece.slices])
