"""A worker's copy of the model, seen as the pieces of its layout."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.state.layout import Layout, Piece
from paceline.state.spec import FROZEN, ModelSpec
from paceline.state.tensors import Bytes, as_bytes, dtype_of, flat, from_bytes


class Replica:
    """The tensors of `model`, which `spec` describes and `layout` cuts in pieces. Their bytes are given without a copy
    where they are contiguous CPU memory of the right dtype, and are good until the model changes."""

    def __init__(self, model: nn.Module, layout: Layout, spec: ModelSpec) -> None:
        self.layout = layout
        self.spec = spec
        every = list(model.named_parameters(remove_duplicate=False))
        self._places = [(name, *_place(model, name), parameter) for name, parameter in every]
        named = dict(every)
        self._parameters = [named[tensor.name] for tensor in spec.tensors]
        pairs = zip(spec.tensors, self._parameters, strict=True)
        self._frozen = [(t.name, p) for t, p in pairs if t.group == FROZEN and not p.requires_grad]
        self._signs = {id(p): (p.dtype, p.shape) for p in self._parameters}
        self._buffers = [_place(model, buffer.name) for buffer in spec.buffers]

    # To the servers ---------------------------------------------------------------------------------------------------

    def gradients(
        self, piece: Piece, instead: Mapping[str, Tensor] | None = None
    ) -> tuple[tuple[int, ...] | None, list[memoryview]]:
        """What this worker contributes to a piece: the positions of the slices that have a gradient (None: all), and
        their bytes in that order. A piece of buffers gives their values.

        `instead` gives gradients by parameter name, in place of the parameters' own. Gradients of another dtype are
        cast to the parameter's, sparse ones made dense.
        """
        if piece.kind == "buffer":
            return None, self.values(piece)
        positions, views = [], []
        dtype = dtype_of(piece.dtype)
        for position, part in enumerate(piece.slices):
            gradient = self._gradient(part.tensor, instead)
            if gradient is not None:
                positions.append(position)
                views.append(as_bytes(flat(gradient)[part.start : part.stop].to(dtype)))
        return (None if len(positions) == len(piece.slices) else tuple(positions)), views

    def values(self, piece: Piece) -> list[memoryview]:
        """The bytes of a piece's slices as the model holds them, in order."""
        return [as_bytes(flat(self._tensor(piece, s.tensor))[s.start : s.stop]) for s in piece.slices]

    def finite(self, instead: Mapping[str, Tensor] | None = None) -> str | None:
        """The name of the first parameter whose gradient has a NaN, an infinity, or a value beyond the parameter's
        dtype; None when there is none."""
        for index, tensor in enumerate(self.spec.tensors):
            gradient = self._gradient(index, instead) if tensor.group != FROZEN else None
            if gradient is None or gradient.numel() == 0:
                continue
            gradient = flat(gradient)
            low, high = torch.aminmax(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
            limit = torch.finfo(dtype_of(tensor.dtype)).max
            if not (-limit <= float(low) and float(high) <= limit):
                return tensor.name
        return None

    def _gradient(self, index: int, instead: Mapping[str, Tensor] | None) -> Tensor | None:
        return self._parameters[index].grad if instead is None else instead.get(self.spec.tensors[index].name)

    # From the servers -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, piece: Piece, payload: Bytes) -> None:
        """Copy a piece's bytes into the model, in place. Raises FrameError when they are too few or too many."""
        values = from_bytes(payload, dtype_of(piece.dtype), (piece.numel,))
        for part in piece.slices:
            target = self._tensor(piece, part.tensor).detach()
            new = values[part.offset : part.offset + part.numel]
            if target.is_contiguous():
                target.view(-1)[part.start : part.stop].copy_(new)
            else:
                whole = flat(target)
                whole[part.start : part.stop].copy_(new)
                target.copy_(whole.view(target.shape))

    # Checks -----------------------------------------------------------------------------------------------------------

    def check_identity(self) -> None:
        """Raise ModelError, which names it, if a parameter is not the one that was prepared any more, has another shape
        or dtype, or was frozen then and is not now."""
        for name, module, attribute, parameter in self._places:
            found = module._parameters.get(attribute)
            if found is not parameter:
                raise ModelError(
                    f"parameter {name} was replaced after prepare()",
                    "change it in place under torch.no_grad(), or replace it before prepare()",
                )
            if (found.dtype, found.shape) != self._signs[id(found)]:
                dtype, shape = self._signs[id(found)]
                raise ModelError(
                    f"parameter {name} is {found.dtype} of shape {tuple(found.shape)} now, and was {dtype} of shape "
                    f"{tuple(shape)} at prepare()",
                    "convert the model before prepare()",
                )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ModelError(
                    f"parameter {name} was frozen at prepare() and requires a gradient now",
                    "set requires_grad_(True) before prepare(); it may be False from time to time afterwards",
                )

    def digest(self) -> str:
        """A BLAKE2b hash over all values, parameters then buffers, in the spec's order."""
        hashed = hashlib.blake2b(digest_size=16)
        for tensor in [*self._parameters, *(module._buffers[name] for module, name in self._buffers)]:
            assert tensor is not None
            hashed.update(as_bytes(tensor))
        return hashed.hexdigest()

    def _tensor(self, piece: Piece, index: int) -> Tensor:
        """A parameter, or the buffer that stands under its name now: modules may replace buffers."""
        if piece.kind != "buffer":
            return self._parameters[index]
        module, attribute = self._buffers[index]
        buffer, spec = module._buffers.get(attribute), self.spec.buffers[index]
        if buffer is None or tuple(buffer.shape) != spec.shape or buffer.dtype != dtype_of(spec.dtype):
            now = "gone" if buffer is None else f"{buffer.dtype} of shape {tuple(buffer.shape)}"
            raise ModelError(
                f"buffer {spec.name} is {now} now, and was {spec.dtype} of shape {spec.shape} at prepare()",
                "keep its shape and dtype, or register it with persistent=False",
            )
        return buffer


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor called `name`, and the attribute under which it does."""
    prefix, _, attribute = name.rpartition(".")
    return model.get_submodule(prefix), attribute
