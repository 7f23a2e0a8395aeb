"""Servers and workers in one process, without a wire: what the tests of paceline.state share."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor, nn

from paceline.state.describe import describe, hyperparameters
from paceline.state.layout import lay_out
from paceline.state.replica import Replica
from paceline.state.spec import ModelSpec
from paceline.state.store import Key, ShardStore

torch.set_num_threads(1)


class Cluster:
    """The shards of a model, and one replica a worker. Specs and hyperparameters cross a msgpack round trip."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, shards=2, piece_bytes=64, workers=1) -> None:
        self.optimizer = optimizer
        spec = describe(model, optimizer)
        self.spec = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec)
        assert self.spec == spec
        self.layout = lay_out(self.spec, shards, piece_bytes)
        self.stores = [ShardStore(self.spec, self.layout, shard) for shard in range(shards)]
        self.models = [copy.deepcopy(model) for _ in range(workers)]
        self.replicas = [Replica(each, self.layout, self.spec) for each in self.models]
        for piece in self.layout.pieces:
            self.stores[piece.shard].set_values(piece, b"".join(self.replicas[0].values(piece)))
        self.version = 0

    def push(self, worker: int, step: int, gradients: Mapping[str, Tensor] | None = None) -> Key:
        """Stage a worker's contribution on every shard."""
        key = (worker, 0, step)
        for piece in self.layout.pieces:
            if piece.kind != "frozen":
                present, views = self.replicas[worker].gradients(piece, gradients)
                self.stores[piece.shard].stage(key, piece, present, bytearray(b"".join(views)))
        return key

    def update(self, parts: Sequence[tuple[Key, float, float]], lr_scale=1.0, clip=None, max_norm=None):
        """Reduce and apply on every shard; returns the squared norm."""
        self.version += 1
        squared = sum(store.reduce(parts) for store in self.stores)
        scale = 1.0 if max_norm is None else min(1.0, max_norm / (squared**0.5 + 1e-6))
        wire = msgspec.msgpack.decode(msgspec.msgpack.encode(hyperparameters(self.optimizer)))
        for store in self.stores:
            store.apply(self.version, wire, lr_scale, scale, clip)
        return squared

    def pull(self, worker: int = 0) -> dict[str, Tensor]:
        """Load all pieces into a worker's model; returns its state dict."""
        for piece in self.layout.pieces:
            self.replicas[worker].load(piece, self.stores[piece.shard].values(piece))
        return self.models[worker].state_dict()


def random_gradients(model: nn.Module, generator: torch.Generator, missing: frozenset[str] = frozenset()):
    """A gradient by name for each parameter that needs one, save the missing."""
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        for name, p in model.named_parameters()
        if name not in missing
    }


def assert_close(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float) -> None:
    """Every tensor equal to `rtol`, relative to the tensor's largest element."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        scale = float(value.abs().max()) if value.numel() and value.is_floating_point() else 1.0
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=rtol * scale, msg=lambda m, n=name: f"{n}: {m}")
