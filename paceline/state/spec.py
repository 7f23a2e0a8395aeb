"""What workers and servers must agree on about a model and its optimizer: names, shapes and plain values."""

from __future__ import annotations

from math import prod
from typing import Any

from msgspec import Struct

FROZEN = -1


class TensorSpec(Struct, frozen=True):
    """A parameter. `group` is the index of its optimizer param group, `FROZEN` where no update ever changes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


class BufferSpec(Struct, frozen=True):
    """A persistent buffer, such as a running mean."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)


class OptimizerSpec(Struct, frozen=True):
    """An optimizer: its class as "module:qualname", the hyperparameters of each param group (plain values), and whether
    an element's update depends on that element alone, so that its tensors may be split."""

    cls: str
    groups: tuple[dict[str, Any], ...]
    elementwise: bool


class ModelSpec(Struct, frozen=True):
    """A model and its optimizer; tied parameters are listed once."""

    tensors: tuple[TensorSpec, ...]
    buffers: tuple[BufferSpec, ...]
    optimizer: OptimizerSpec


def difference(a: ModelSpec, b: ModelSpec) -> str | None:
    """The first thing in which `b` differs from `a`, as a clause; None when they are equal.

    >>> optimizer = OptimizerSpec("torch.optim.sgd:SGD", ({"lr": 0.1},), True)
    >>> one = ModelSpec((TensorSpec("weight", (2, 3), "float32", 0),), (), optimizer)
    >>> two = ModelSpec((TensorSpec("weight", (2, 4), "float32", 0),), (), optimizer)
    >>> difference(one, two)
    'parameter weight has shape (2, 4), not (2, 3)'
    """
    return (
        _named("parameter", a.tensors, b.tensors)
        or _named("buffer", a.buffers, b.buffers)
        or _optimizers(a.optimizer, b.optimizer)
    )


def _named(
    what: str,
    ours: tuple[TensorSpec, ...] | tuple[BufferSpec, ...],
    theirs: tuple[TensorSpec, ...] | tuple[BufferSpec, ...],
) -> str | None:
    expected, got = {t.name: t for t in ours}, {t.name: t for t in theirs}
    for name in expected:
        if name not in got:
            return f"{what} {name} is missing"
    for name, tensor in got.items():
        if name not in expected:
            return f"{what} {name} is one too many"
        for field in tensor.__struct_fields__:
            mine, other = getattr(expected[name], field), getattr(tensor, field)
            if mine != other:
                return f"{what} {name} has {_field(field, other)}, not {_field(field, mine, short=True)}"
    for wanted, found in zip(expected, got, strict=True):
        if wanted != found:
            return f"{what} {found} comes where {wanted} was expected"
    return None


def _field(field: str, value: object, short: bool = False) -> str:
    text = "none (it is frozen)" if field == "group" and value == FROZEN else str(value)
    label = "param group" if field == "group" else field
    return text if short else f"{label} {text}"


def _optimizers(ours: OptimizerSpec, theirs: OptimizerSpec) -> str | None:
    if ours.cls != theirs.cls:
        return f"the optimizer is {theirs.cls}, not {ours.cls}"
    if len(ours.groups) != len(theirs.groups):
        return f"the optimizer has {len(theirs.groups)} param groups, not {len(ours.groups)}"
    for index, (mine, other) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        for key in [*mine, *(key for key in other if key not in mine)]:
            if key not in mine or key not in other or mine[key] != other[key]:
                want, got = mine.get(key, "unset"), other.get(key, "unset")
                return f"the optimizer's param group {index} has {key} = {got}, not {want}"
    if ours.elementwise != theirs.elementwise:
        return "the optimizer may split tensors on one of them only"
    return None
