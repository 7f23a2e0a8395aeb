"""A model and its optimizer, as a spec: all that a server needs in order to update that model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim

from paceline.errors import ModelError, OptimizerError
from paceline.state.layout import WIDTHS
from paceline.state.spec import FROZEN, BufferSpec, ModelSpec, OptimizerSpec, TensorSpec
from paceline.state.tensors import dtype_name

# Each element's update depends on that element's own history alone. Exact classes: a subclass may do otherwise.
ELEMENTWISE = {
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
}


def describe(model: nn.Module, optimizer: optim.Optimizer) -> ModelSpec:
    """The spec of `model` as `optimizer` trains it.

    A parameter is frozen when it is in no param group, or needs no gradient. Tied parameters and shared buffers appear
    once, under their first name; buffers that are not persistent do not appear.

    Raises OptimizerError for an optimizer that servers cannot run or that trains other tensors than the model's, and
    ModelError for a tensor that cannot be sent.
    """
    _check_class(optimizer)
    groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    parameters = dict(model.named_parameters())
    _check_owned(optimizer, {id(p) for p in parameters.values()})
    tensors = []
    for name, parameter in parameters.items():
        _check_tensor(f"parameter {name}", parameter)
        trained = parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex())
        group = groups.get(id(parameter), FROZEN) if trained else FROZEN
        tensors.append(TensorSpec(name, tuple(parameter.shape), dtype_name(parameter.dtype), group))
    buffers = []
    for name, buffer in persistent_buffers(model):
        _check_tensor(f"buffer {name}", buffer)
        buffers.append(BufferSpec(name, tuple(buffer.shape), dtype_name(buffer.dtype)))
    cls = type(optimizer)
    rule = OptimizerSpec(f"{cls.__module__}:{cls.__qualname__}", hyperparameters(optimizer), cls in ELEMENTWISE)
    return ModelSpec(tuple(tensors), tuple(buffers), rule)


def hyperparameters(optimizer: optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """The hyperparameters of each param group as plain values: one-element tensors become numbers, tuples lists.

    Raises OptimizerError that names a value which is not plain.
    """
    return tuple(
        {key: _plain(key, value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    )


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the buffers that are part of the model's state dict, each tensor once."""
    seen = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _plain(key: str, value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(key, item) for item in value]
    if getattr(value, "ndim", None) == 0 and isinstance(number := value.item(), bool | int | float):
        return number
    raise OptimizerError(
        f"the optimizer's hyperparameter {key} is a {type(value).__name__}: {value!r}",
        "use numbers, strings, None, or lists of those",
    )


def _check_class(optimizer: optim.Optimizer) -> None:
    cls = type(optimizer)
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptimizerError(
            f"{cls.__name__} needs a closure that evaluates the loss again, which no server can do",
            "use torch.optim.SGD with momentum, or torch.optim.AdamW",
        )
    if isinstance(optimizer, optim.SparseAdam):
        raise OptimizerError(
            f"{cls.__name__} takes sparse gradients, and gradients are sent dense", "use torch.optim.Adam or Adagrad"
        )
    if "<locals>" in cls.__qualname__:
        raise OptimizerError(
            f"the servers cannot import {cls.__qualname__}, which is defined in a function",
            "define the optimizer's class at the top level of its module",
        )
    states = optimizer.state.values()
    if any(s.get("step", 0) > 0 or s.get("momentum_buffer") is not None for s in states if isinstance(s, dict)):
        raise OptimizerError(
            f"this {cls.__name__} has made steps already, or has loaded a state, which would be lost",
            "prepare a new optimizer: its state lives on the servers",
        )


def _check_owned(optimizer: optim.Optimizer, ours: set[int]) -> None:
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in ours:
                raise OptimizerError(
                    f"the optimizer's param group {index} has a tensor that is not in the model: "
                    f"number {position}, shape {tuple(parameter.shape)}",
                    "build the optimizer from the parameters of the model that you prepare, after its last change",
                )


def _check_tensor(what: str, tensor: Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise ModelError(f"{what} has no shape yet", "run the model on one batch before prepare()")
    if tensor.layout is not torch.strided:
        raise ModelError(f"{what} is sparse", "make it dense, or register the buffer with persistent=False")
    if dtype_name(tensor.dtype) not in WIDTHS:
        raise ModelError(f"{what} has dtype {tensor.dtype}", f"use one of {', '.join(WIDTHS)}")
