"""Weighted sums of gradients and buffers, in a fixed order and in a dtype wide enough. Inputs may be overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.state.layout import Piece

BLOCK = 65_536


@dataclass(frozen=True, slots=True)
class Packed:
    """Values of the slices at `positions` of a piece, back to back in one flat tensor."""

    positions: tuple[int, ...]
    values: Tensor

    def split(self, piece: Piece) -> dict[int, Tensor]:
        """Views of each slice's values, by position."""
        lengths = [piece.slices[i].numel for i in self.positions]
        return dict(zip(self.positions, self.values.split(lengths), strict=True))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in: float32 for the narrower floating ones, else the dtype itself."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def weighted_sum(terms: Sequence[tuple[float, Tensor]]) -> Tensor:
    """`sum(coefficient * tensor)` in the order given, in the wide dtype; a single one of coefficient 1 stays as is."""
    (coefficient, first), *rest = terms
    if coefficient == 1.0 and not rest:
        return first
    total = first.to(wide(first.dtype)).mul_(coefficient)
    for coefficient, term in rest:
        total.add_(term.to(total.dtype) if term.dtype.itemsize == 1 else term, alpha=coefficient)
    return total


def combine(piece: Piece, parts: Sequence[tuple[float, Packed]]) -> list[Packed]:
    """The weighted sums of the slices that at least one part has; a part without a slice counts as zero there."""
    if len({part.positions for _, part in parts}) == 1:
        positions = parts[0][1].positions
        return [Packed(positions, weighted_sum([(c, part.values) for c, part in parts]))] if positions else []
    split = [(c, part.split(piece)) for c, part in parts]
    sums = []
    for position in range(len(piece.slices)):
        if terms := [(c, views[position]) for c, views in split if position in views]:
            sums.append(Packed((position,), weighted_sum(terms)))
    return sums


def compensate(gradient: Tensor, now: Tensor, read: Tensor, lam: float) -> Tensor:
    """`g + lam * g * g * (w_now - w_read)` elementwise: what the gradient would about be at the present parameters, had
    it been computed from those (Zheng et al. 2017, DC-ASGD, arXiv 1609.08326, eq. 10)."""
    g = gradient.to(wide(gradient.dtype))
    return torch.addcmul(g, g * g, now.to(g.dtype) - read.to(g.dtype), value=lam)


def squared_norm(values: Tensor) -> float:
    """The squared L2 norm of a flat tensor, added up in float64."""
    if values.is_complex():
        values = torch.view_as_real(values).view(-1)
    return sum((float(wider.dot(wider)) for wider in map(torch.Tensor.double, values.split(BLOCK))), 0.0)


def finish(total: Tensor, dtype: torch.dtype, scale: float, clip_value: float | None) -> Tensor:
    """The gradient for the optimizer: scaled, then clamped to ±`clip_value`, then of the parameter's dtype."""
    if scale != 1.0:
        total = total.to(wide(total.dtype)).mul_(scale)
    if clip_value is not None:
        parts = torch.view_as_real(total) if total.is_complex() else total
        parts.clamp_(-clip_value, clip_value)
    return total.to(dtype)
