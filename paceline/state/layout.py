"""The layout of a model in pieces: what is sent, staged and updated as one, and which shard holds it. Pure: every
process works it out for itself from the same spec."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from paceline.errors import ModelError
from paceline.state.spec import FROZEN, BufferSpec, ModelSpec, TensorSpec

Kind = Literal["param", "frozen", "buffer"]

# Bytes of one element.
WIDTHS = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex128": 16,
    "complex64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}


LEAST_BYTES = 64_000


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `start` to `stop` of a flattened tensor, at element `offset` of the piece. `tensor` is an index in the
    spec's `tensors`, in its `buffers` for a piece of buffers."""

    tensor: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Piece:
    """Slices of one dtype and kind, back to back, on one shard. Frozen ones are sent at the start and the end only."""

    index: int
    shard: int
    kind: Kind
    dtype: str
    nbytes: int
    slices: tuple[Slice, ...]

    @property
    def numel(self) -> int:
        return self.nbytes // WIDTHS[self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """All pieces of a model, by index; each element of each tensor is in exactly one."""

    shards: int
    pieces: tuple[Piece, ...]

    def of_shard(self, shard: int) -> tuple[Piece, ...]:
        """The pieces that `shard` holds, by index."""
        return tuple(piece for piece in self.pieces if piece.shard == shard)


def lay_out(spec: ModelSpec, shards: int, piece_bytes: int = 4_000_000) -> Layout:
    """Lay a model out in pieces of about `piece_bytes`, balanced over `shards` by bytes. For a small model the pieces
    are smaller, so that each shard gets one, down to 64 kB.

    A tensor above that size is split evenly, unless the optimizer needs it whole; those of up to half that size share
    pieces, in order. Pieces go largest first to the shard that holds least: first those that travel at every step, so
    that these are balanced among themselves, then the frozen ones.

    >>> from paceline.state.spec import OptimizerSpec
    >>> sgd = OptimizerSpec("torch.optim.sgd:SGD", ({"lr": 0.1},), True)
    >>> weight, bias = TensorSpec("weight", (64, 64), "float32", 0), TensorSpec("bias", (64,), "float32", 0)
    >>> layout = lay_out(ModelSpec((weight, bias), (), sgd), shards=2, piece_bytes=10_000)
    >>> [(piece.shard, piece.nbytes) for piece in layout.pieces]
    [(0, 8192), (1, 8192), (0, 256)]
    """
    total_bytes = sum(t.numel * WIDTHS.get(t.dtype, 1) for t in spec.tensors)
    piece_bytes = min(piece_bytes, max(LEAST_BYTES, -(-total_bytes // shards)))
    pieces = [
        Piece(index, 0, kind, dtype, slices[-1].offset * WIDTHS[dtype] + slices[-1].numel * WIDTHS[dtype], slices)
        for index, (kind, dtype, slices) in enumerate(_cut(spec, piece_bytes))
    ]
    loads = [(0, shard) for shard in range(shards)]
    homes: dict[int, int] = {}
    for piece in sorted(pieces, key=lambda p: (p.kind == "frozen", -p.nbytes, p.index)):
        held, shard = heapq.heappop(loads)
        heapq.heappush(loads, (held + piece.nbytes, shard))
        homes[piece.index] = shard
    return Layout(shards, tuple(replace(piece, shard=homes[piece.index]) for piece in pieces))


def _cut(spec: ModelSpec, piece_bytes: int) -> Iterator[tuple[Kind, str, tuple[Slice, ...]]]:
    """The slices of each piece: the parameters', then the frozen ones', then the buffers'."""
    moving = [(i, t) for i, t in enumerate(spec.tensors) if t.group != FROZEN]
    frozen = [(i, t) for i, t in enumerate(spec.tensors) if t.group == FROZEN]
    yield from _cut_kind("param", moving, piece_bytes, spec.optimizer.elementwise)
    yield from _cut_kind("frozen", frozen, piece_bytes, True)
    yield from _cut_kind("buffer", list(enumerate(spec.buffers)), piece_bytes, True)


def _cut_kind(
    kind: Kind, tensors: list[tuple[int, TensorSpec]] | list[tuple[int, BufferSpec]], piece_bytes: int, divisible: bool
) -> list[tuple[Kind, str, tuple[Slice, ...]]]:
    pieces: list[tuple[str, list[Slice]]] = []
    shared: dict[str, list[Slice]] = {}
    for index, tensor in tensors:
        if tensor.dtype not in WIDTHS:
            raise ModelError(f"{tensor.name} has dtype {tensor.dtype}", f"use one of {', '.join(WIDTHS)}")
        room = max(1, piece_bytes // WIDTHS[tensor.dtype])
        if (numel := tensor.numel) > room // 2:
            parts = -(-numel // room) if divisible else 1
            cuts = [numel * part // parts for part in range(parts + 1)]
            pieces += [(tensor.dtype, [Slice(index, a, b, 0)]) for a, b in pairwise(cuts)]
            continue
        slices = shared.get(tensor.dtype)
        end = slices[-1].offset + slices[-1].numel if slices else 0
        if slices is None or end + numel > room:
            slices, end = [], 0
            shared[tensor.dtype] = slices
            pieces.append((tensor.dtype, slices))
        slices.append(Slice(index, 0, numel, end))
    return [(kind, dtype, tuple(slices)) for dtype, slices in pieces]
