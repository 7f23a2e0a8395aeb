"""A shard: the values of its pieces, the user's optimizer over them, and the contributions staged for an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from paceline.errors import FrameError
from paceline.state import rebuild, sums
from paceline.state.layout import Layout, Piece
from paceline.state.memory import Memory, split
from paceline.state.spec import ModelSpec
from paceline.state.sums import Packed
from paceline.state.tensors import Bytes, dtype_of, from_bytes

Key = tuple[int, int, int]
"""A contribution: (worker, incarnation, step)."""


class ShardStore:
    """The values of shard `shard`, zero until set; `version` counts updates. Every piece given must be one of its own.

    Raises OptimizerError when the user's optimizer cannot be built here.
    """

    def __init__(self, spec: ModelSpec, layout: Layout, shard: int) -> None:
        self.version = 0
        self.pieces = layout.of_shard(shard)
        self.memory = Memory(self.pieces, spec.tensors)
        groups: list[list[torch.nn.Parameter]] = [[] for _ in spec.optimizer.groups]
        for piece in self._kind("param"):
            for part, parameter in zip(piece.slices, self.memory.params[piece.index], strict=True):
                groups[spec.tensors[part.tensor].group].append(parameter)
        # A shard may have nothing to train.
        self.optimizer = rebuild.build(spec.optimizer, groups) if any(groups) else None
        self._staged: dict[Key, dict[int, Packed]] = {}
        self._used: list[tuple[Key, float, dict[int, Packed]]] = []
        self._reduced: dict[int, list[Packed]] = {}

    # Values -----------------------------------------------------------------------------------------------------------

    def set_values(self, piece: Piece, payload: Bytes) -> None:
        """Take a piece's values from its bytes. Raises FrameError when they are too few or too many."""
        values = from_bytes(payload, dtype_of(piece.dtype), (piece.numel,))
        with torch.no_grad():
            self.memory.writable(piece.index).copy_(values)

    def values(self, piece: Piece) -> memoryview:
        """The bytes of a piece at this version, without a copy. They do not change while the view, or a part of it, is
        alive: an update meanwhile goes to other memory."""
        return self.memory.show(piece.index)

    def remember(self, worker: int) -> None:
        """Keep the present parameters as those that `worker` computes its next gradient from (delay compensation)."""
        self.memory.remember(worker)

    def forget(self, worker: int) -> None:
        """Keep no parameters for `worker` any more."""
        self.memory.forget(worker)

    # Contributions ----------------------------------------------------------------------------------------------------

    def stage(self, key: Key, piece: Piece, present: Sequence[int] | None, payload: Bytes) -> None:
        """Keep one piece of a contribution: the bytes of the slices at the positions in `present` (None: of all), back
        to back. They are gradients, for a piece of buffers the worker's values. The payload belongs to the store from
        now on and may be overwritten.

        Raises FrameError when positions or length do not match the piece.
        """
        everything = tuple(range(len(piece.slices)))
        positions = everything if present is None else tuple(present)
        ascending = all(a < b for a, b in pairwise(positions))
        known = not positions or (positions[0] >= 0 and positions[-1] < len(everything))
        if piece.kind == "frozen" or not (ascending and known) or (piece.kind == "buffer" and positions != everything):
            of = f"{piece.kind} piece {piece.index}, which has {len(everything)} slices"
            raise FrameError(f"a push of slices {list(positions)} of {of}")
        numel = sum(piece.slices[i].numel for i in positions)
        packed = Packed(positions, from_bytes(payload, dtype_of(piece.dtype), (numel,)))
        self._staged.setdefault(key, {})[piece.index] = packed

    def drop(self, key: Key) -> None:
        """Throw away what is staged under `key`."""
        self._staged.pop(key, None)

    # Updates ----------------------------------------------------------------------------------------------------------

    def reduce(self, parts: Sequence[tuple[Key, float, float]], norm: bool = True) -> float:
        """Sum `coefficient * gradient` over `parts`, each a (key, coefficient, lam), in the order given, for the
        `apply` that follows; what is staged under these keys is used up. Parts of coefficient 0 are left out. Where
        `lam` is not 0 the gradient is first compensated for its delay.

        Returns the squared L2 norm of the shard's part of the sum (with `norm=False`: 0.0, and saves a pass).
        Raises FrameError when a part is not staged in whole, or lacks the remembered values it is compensated by.
        """
        taken = [(key, coefficient, lam, self._staged.pop(key, {})) for key, coefficient, lam in parts]
        used = [row for row in taken if row[1] != 0.0]
        self._used = [(key, coefficient, staged) for key, coefficient, _, staged in used]
        self._reduced = {}
        for piece in self._kind("param") if used else []:
            terms = []
            for key, coefficient, lam, staged in used:
                gradient = _find(staged, key, piece)
                terms.append((coefficient, self._compensate(piece, key[0], gradient, lam) if lam else gradient))
            self._reduced[piece.index] = sums.combine(piece, terms)
        if not norm:
            return 0.0
        return sum((sums.squared_norm(p.values) for found in self._reduced.values() for p in found), 0.0)

    def _compensate(self, piece: Piece, worker: int, gradient: Packed, lam: float) -> Packed:
        now, read = self.memory.flats[piece.index], self.memory.read_by(worker, piece.index)
        if read is None:
            raise FrameError(f"no values are remembered for worker {worker}, by which to compensate its delay")
        if read is now or not gradient.positions:
            return gradient
        if len(gradient.positions) < len(piece.slices):
            now, read = (torch.cat([split(piece, v)[i] for i in gradient.positions]) for v in (now, read))
        return Packed(gradient.positions, sums.compensate(gradient.values, now, read, lam))

    def apply(
        self,
        version: int,
        groups: Sequence[Mapping[str, Any]],
        lr_scale: float = 1.0,
        grad_scale: float = 1.0,
        clip_value: float | None = None,
    ) -> None:
        """Make the reduced gradient, times `grad_scale` and clamped to ±`clip_value`, the optimizer step that gives
        `version`, with the hyperparameters `groups`, learning rates times `lr_scale`. Parameters to whose gradient
        nobody contributed are skipped. Floating-point and complex buffers become the contributors' average, weighted
        like gradients; the others come from the contributor of the largest step, the first of several.

        Raises OptimizerError when the optimizer's step fails, or the number of param groups has changed.
        """
        with torch.no_grad():
            for index, params in self.memory.params.items():
                self._set_gradients(index, params, grad_scale, clip_value)
            if self.optimizer is not None:
                rebuild.step(self.optimizer, groups, lr_scale)
            for piece in self._kind("buffer") if self._used else []:
                self._average(piece)
        self._used, self._reduced = [], {}
        self.version = version

    def _set_gradients(
        self, index: int, params: list[torch.nn.Parameter], scale: float, clip_value: float | None
    ) -> None:
        flat = self.memory.writable(index)
        for packed in self._reduced.get(index, ()):
            total = sums.finish(packed.values, flat.dtype, scale, clip_value)
            chosen = [params[position] for position in packed.positions]
            for parameter, view in zip(chosen, total.split([p.numel() for p in chosen]), strict=True):
                parameter.grad = view.view(parameter.shape)

    def _average(self, piece: Piece) -> None:
        flat = self.memory.writable(piece.index)
        if flat.is_floating_point() or flat.is_complex():
            total = sum(coefficient for _, coefficient, _ in self._used)
            terms = [(c / total, _find(staged, key, piece).values) for key, c, staged in self._used]
            flat.copy_(sums.weighted_sum(terms))
        else:
            key, _, staged = max(self._used, key=lambda used: used[0][-1])
            flat.copy_(_find(staged, key, piece).values)

    def _kind(self, kind: str) -> list[Piece]:
        return [piece for piece in self.pieces if piece.kind == kind]


def _find(staged: Mapping[int, Packed], key: Key, piece: Piece) -> Packed:
    if piece.index not in staged:
        raise FrameError(f"contribution {key} came without its piece {piece.index}")
    return staged[piece.index]
