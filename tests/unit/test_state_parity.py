"""The servers' update is torch.optim's on the weighted sum, whatever the shards, pieces, weights and dtype."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.unit.state_helpers import Cluster, assert_close, random_gradients

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}


class Model(nn.Module):
    """A matrix that is split, small vectors that are fused, a scalar, an empty tensor."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"matrix": (5, 7), "a": (3,), "scalar": (), "empty": (0, 4), "b": (11,)}.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            self.register_parameter(name, nn.Parameter(value))


def two_groups(model):
    return [
        {"params": [model.matrix, model.scalar], "lr": 0.02},
        {"params": [model.a, model.empty, model.b], "weight_decay": 0.1},
    ]


def reference_step(model, optimizer, gradients, coefficients):
    """One step of torch.optim on the weighted sum; a parameter that no contribution has gets no gradient."""
    for name, p in model.named_parameters():
        terms = [(c, g[name]) for c, g in zip(coefficients, gradients, strict=True) if name in g]
        wide = torch.float32 if p.dtype.itemsize < 4 else p.dtype
        p.grad = sum(c * g.to(wide) for c, g in terms).to(p.dtype) if terms else None
    optimizer.step()
    optimizer.zero_grad()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    shards=st.integers(1, 3),
    piece_bytes=st.sampled_from([1, 24, 100, 10_000]),
    groups=st.booleans(),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_equals_one_process(name, dtype, shards, piece_bytes, groups, seed, data):
    model = Model(dtype)
    optimizer = OPTIMIZERS[name](two_groups(model) if groups else model.parameters())
    cluster = Cluster(model, optimizer, shards, piece_bytes, workers=3)
    generator = torch.Generator().manual_seed(seed)
    for step in range(3):
        workers = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        weights = data.draw(st.lists(st.integers(1, 9), min_size=len(workers), max_size=len(workers)))
        absent = st.frozensets(st.sampled_from(["matrix", "a", "scalar", "empty", "b"]), max_size=3)
        gradients = [random_gradients(model, generator, data.draw(absent)) for _ in workers]
        coefficients = [weight / sum(weights) for weight in weights]
        keys = [cluster.push(worker, step, g) for worker, g in zip(workers, gradients, strict=True)]
        cluster.update([(key, c, 0.0) for key, c in zip(keys, coefficients, strict=True)])
        reference_step(model, optimizer, gradients, coefficients)
    assert_close(cluster.pull(), model.state_dict(), 1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_contributor_is_the_plain_optimizer_bitwise(name):
    model = Model(torch.float32)
    optimizer = OPTIMIZERS[name](model.parameters())
    cluster = Cluster(model, optimizer, shards=2, piece_bytes=10_000)
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        gradients = random_gradients(model, generator)
        cluster.update([(cluster.push(0, step, gradients), 1.0, 0.0)])
        reference_step(model, optimizer, [gradients], [1.0])
    for key, value in cluster.pull().items():
        assert torch.equal(value, model.state_dict()[key])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_are_added_up_in_float32(dtype):
    model = nn.Linear(3, 1, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    cluster = Cluster(model, optimizer, shards=1, workers=3)
    # In float16, 60000 + 60000 is infinite; in either, a sum of halves from `even` on loses each 1 that is added.
    even = 2 / torch.finfo(dtype).eps
    rows = [[60_000.0, even, 1.0], [60_000.0, 1.0, 1.0], [-60_000.0, 1.0, 1.0]]
    keys = [cluster.push(w, 0, {"weight": torch.tensor([row], dtype=dtype)}) for w, row in enumerate(rows)]
    cluster.update([(key, 1.0, 0.0) for key in keys])
    expected = -torch.tensor(rows).to(dtype).double().sum(0).to(dtype)
    assert expected[1] == -(even + 2)
    assert torch.equal(cluster.pull()["weight"][0], expected)


@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_clipping_by_norm_equals_torch(max_norm, shards):
    model = Model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    cluster = Cluster(model, optimizer, shards, workers=2)
    generator = torch.Generator().manual_seed(2)
    gradients = [random_gradients(model, generator) for _ in range(2)]
    keys = [cluster.push(worker, 0, g) for worker, g in enumerate(gradients)]
    squared = cluster.update([(keys[0], 0.75, 0.0), (keys[1], 0.25, 0.0)], max_norm=max_norm)
    for name, p in model.named_parameters():
        p.grad = 0.75 * gradients[0][name] + 0.25 * gradients[1][name]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    assert squared**0.5 == pytest.approx(float(norm), rel=1e-13)
    assert_close(cluster.pull(), model.state_dict(), 1e-12)


def test_clipping_by_value_equals_torch():
    model = Model(torch.float64)
    optimizer = torch.optim.Adam(model.parameters())
    cluster = Cluster(model, optimizer)
    gradients = random_gradients(model, torch.Generator().manual_seed(3))
    cluster.update([(cluster.push(0, 0, gradients), 1.0, 0.0)], clip=0.3)
    for name, p in model.named_parameters():
        p.grad = gradients[name].clone()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.3)
    optimizer.step()
    assert_close(cluster.pull(), model.state_dict(), 1e-12)


def test_learning_rates_travel_and_are_scaled_for_one_update():
    model = Model(torch.float64)
    optimizer = torch.optim.SGD(two_groups(model), lr=0.1, momentum=0.9)
    cluster = Cluster(model, optimizer)
    generator = torch.Generator().manual_seed(4)
    for step, (lr, lr_scale) in enumerate([(0.1, 1.0), (0.05, 0.5), (0.2, 1.0)]):
        gradients = random_gradients(model, generator)
        optimizer.param_groups[1]["lr"] = lr
        cluster.update([(cluster.push(0, step, gradients), 1.0, 0.0)], lr_scale=lr_scale)
        kept = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= lr_scale
        reference_step(model, optimizer, [gradients], [1.0])
        for group, value in zip(optimizer.param_groups, kept, strict=True):
            group["lr"] = value
    assert_close(cluster.pull(), model.state_dict(), 1e-12)


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Muon])
def test_optimizers_that_need_whole_tensors(cls):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False))
    optimizer = cls(model.parameters(), lr=0.01)
    cluster = Cluster(model, optimizer, shards=2, piece_bytes=16)
    for step in range(3):
        gradients = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
        cluster.update([(cluster.push(0, step, gradients), 1.0, 0.0)])
        reference_step(model, optimizer, [gradients], [1.0])
    assert_close(cluster.pull(), model.state_dict(), 1e-6)


def test_complex_parameters():
    model = nn.Linear(3, 2, bias=False, dtype=torch.complex64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    cluster = Cluster(model, optimizer, workers=2)
    gradients = [{"weight": torch.randn(2, 3, dtype=torch.complex64)} for _ in range(2)]
    keys = [cluster.push(worker, 0, g) for worker, g in enumerate(gradients)]
    squared = cluster.update([(keys[0], 0.5, 0.0), (keys[1], 0.5, 0.0)])
    mean = (gradients[0]["weight"] + gradients[1]["weight"]) / 2
    assert squared == pytest.approx(float(mean.abs().double().square().sum()), rel=1e-5)
    model.weight.grad = mean
    optimizer.step()
    torch.testing.assert_close(cluster.pull()["weight"], model.weight.detach())
