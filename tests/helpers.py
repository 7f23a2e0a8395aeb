"""Small models, data and reference computations that several tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

torch.set_num_threads(1)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def regression(n: int = 96, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """`n` examples of 5 features and 2 targets."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, :2]) + 0.1 * torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def small_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Two linear layers, with initial values of their own generator (the global one is left alone)."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def mse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((model(x) - y) ** 2).mean()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of any tensor's values: max |a - b| / max(1, max |b|)."""
    assert a.keys() == b.keys()
    return max(
        float((a[k].double() - b[k].double()).abs().max() / b[k].double().abs().max().clamp(min=1))
        if a[k].numel()
        else 0.0
        for k in a
    )
