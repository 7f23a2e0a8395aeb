"""The user's optimizer, built again on a server from its spec."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import OptimizerError
from paceline.state.spec import OptimizerSpec

# Not the group's own parameters, nor what has a meaning only in the worker's process or on its device.
_LOCAL = {"params", "param_names", "capturable", "differentiable"}


def build(spec: OptimizerSpec, groups: Sequence[Sequence[Parameter]]) -> Optimizer:
    """The optimizer of `spec` over `groups` of parameters, one sequence (it may be empty) for each param group.

    Raises OptimizerError when the class cannot be found, is no optimizer, or does not take these hyperparameters.
    """
    cls = find(spec.cls)
    settings = [plain(group) for group in spec.groups]
    known = inspect.signature(cls).parameters
    defaults = {key: value for key, value in settings[0].items() if key in known}
    try:
        return cls([{"params": list(ps), **s} for ps, s in zip(groups, settings, strict=True)], **defaults)
    except Exception as error:
        raise OptimizerError(
            f"the servers cannot build {spec.cls}: {type(error).__name__}: {error}",
            "each required argument of its constructor must be a hyperparameter of its param groups",
        ) from error


def find(path: str) -> type[Optimizer]:
    """The optimizer class at "module:qualname". Raises OptimizerError."""
    module, _, qualname = path.partition(":")
    try:
        cls = reduce(getattr, qualname.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise OptimizerError(
            f"the servers cannot find the optimizer {path!r}: {error}",
            "define its class at the top level of a module that can be imported",
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise OptimizerError(f"{path!r} is not an optimizer", "use a subclass of torch.optim.Optimizer")
    return cls


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group as the optimizer takes them: what travelled as a list is a tuple again."""
    return {key: _tuples(value) for key, value in group.items() if key not in _LOCAL}


def step(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], lr_scale: float) -> None:
    """Make a step with the hyperparameters `groups`, learning rates multiplied by `lr_scale`, and clear the gradients.

    Raises OptimizerError when the step fails, or there are more or fewer groups than the optimizer has.
    """
    if len(groups) != len(optimizer.param_groups):
        raise OptimizerError(
            f"the optimizer has {len(groups)} param groups now, and had {len(optimizer.param_groups)} at prepare()",
            "add all param groups before prepare()",
        )
    for ours, theirs in zip(optimizer.param_groups, groups, strict=True):
        ours.update(plain(theirs))
        if lr_scale != 1.0 and "lr" in ours:
            ours["lr"] *= lr_scale
    try:
        optimizer.step()
    except Exception as error:
        raise OptimizerError(
            f"{type(optimizer).__name__} failed on a server: {type(error).__name__}: {error}",
            "its step() must work on CPU tensors, and on a part of the model's parameters",
        ) from error
    optimizer.zero_grad(set_to_none=True)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
