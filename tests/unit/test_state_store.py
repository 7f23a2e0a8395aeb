import copy

import pytest
import torch
from torch import nn

from paceline.errors import FrameError, OptimizerError
from paceline.state.layout import lay_out
from paceline.state.spec import ModelSpec, OptimizerSpec, TensorSpec
from paceline.state.store import ShardStore
from paceline.state.tensors import as_bytes, from_bytes
from tests.unit.state_helpers import Cluster, random_gradients


class Needy(torch.optim.Optimizer):
    """Needs an argument that is not among its hyperparameters."""

    def __init__(self, params, secret):
        super().__init__(params, {"lr": 1.0})


class Failing(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        raise ValueError("no such luck")


def linear(bias=False, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=bias).double()
    return model, torch.optim.SGD(model.parameters(), **{"lr": 0.1, **settings})


def ones(model, value=1.0):
    return {name: torch.full_like(p, value) for name, p in model.named_parameters()}


# Reading while writing


def test_what_is_being_sent_does_not_change_under_an_update():
    model, optimizer = linear()
    cluster = Cluster(model, optimizer, shards=1, piece_bytes=1000)
    store, piece = cluster.stores[0], cluster.layout.pieces[0]
    before = model.weight.detach().clone()
    sent = store.values(piece)[8:]
    cluster.update([(cluster.push(0, 0, ones(model)), 1.0, 0.0)])
    assert torch.equal(from_bytes(sent, torch.float64, (11,)), before.flatten()[1:])
    assert torch.equal(cluster.pull()["weight"], before - 0.1)
    cluster.update([(cluster.push(0, 1, ones(model)), 1.0, 0.0)])
    torch.testing.assert_close(cluster.pull()["weight"], before - 0.2)


def test_memory_is_kept_when_nobody_reads():
    model, optimizer = linear(momentum=0.9)
    cluster = Cluster(model, optimizer, shards=1, piece_bytes=1000)
    store, piece = cluster.stores[0], cluster.layout.pieces[0]
    address = store.memory.flats[piece.index].data_ptr()
    for step in range(2):
        bytes(store.values(piece))
        cluster.update([(cluster.push(0, step, ones(model)), 1.0, 0.0)])
        assert store.memory.flats[piece.index].data_ptr() == address
    view = store.values(piece)
    assert from_bytes(view, torch.float64, (12,)).data_ptr() == address


# Staging


def test_a_payload_must_match_its_piece():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    cluster = Cluster(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=1, piece_bytes=1000)
    store = cluster.stores[0]
    kinds = {(piece.kind, piece.dtype): piece for piece in cluster.layout.pieces}
    param, frozen, buffer = (kinds[kind, "float32"] for kind in ("param", "frozen", "buffer"))
    key = (0, 0, 0)
    for piece, present, size in [
        (param, None, param.nbytes - 4),
        (param, (0,), param.nbytes),
        (param, (0, 0), 32),
        (param, (1, 0), 24),
        (param, (0, 3), 16),
        (param, (-1,), 8),
        (frozen, None, frozen.nbytes),
        (buffer, (0,), 8),
        (buffer, None, buffer.nbytes + 1),
    ]:
        with pytest.raises(FrameError):
            store.stage(key, piece, present, bytearray(size))
    with pytest.raises(FrameError):
        store.set_values(param, bytes(3))


def test_a_contribution_that_is_not_whole_is_refused():
    model, optimizer = linear()
    cluster = Cluster(model, optimizer, shards=1, piece_bytes=40)
    store = cluster.stores[0]
    store.stage((0, 0, 0), cluster.layout.pieces[0], None, bytearray(cluster.layout.pieces[0].nbytes))
    with pytest.raises(FrameError, match="came without its piece 1"):
        store.reduce([((0, 0, 0), 1.0, 0.0)])


def test_dropped_and_used_contributions_leave_nothing():
    model, optimizer = linear()
    cluster = Cluster(model, optimizer, shards=1, workers=2)
    used, dropped = cluster.push(0, 0, ones(model)), cluster.push(1, 0, ones(model))
    store = cluster.stores[0]
    store.drop(dropped)
    store.drop((9, 9, 9))
    cluster.update([(used, 1.0, 0.0)])
    assert store.version == 1
    assert not store._staged
    with pytest.raises(FrameError):
        store.reduce([(dropped, 1.0, 0.0)])


def test_parts_of_coefficient_zero_are_left_out():
    model, optimizer = linear()
    cluster = Cluster(model, optimizer, workers=2)
    good, bad = cluster.push(0, 0, ones(model)), cluster.push(1, 0, ones(model, float("nan")))
    cluster.update([(bad, 0.0, 0.0), (good, 1.0, 0.0)])
    torch.testing.assert_close(cluster.pull()["weight"], model.weight.detach() - 0.1)


def test_the_sum_is_in_the_order_given_however_they_arrive():
    model = linear()[0].float()
    generator = torch.Generator().manual_seed(0)
    gradients = [random_gradients(model, generator) for _ in range(3)]
    results = []
    for arrival in [(0, 1, 2), (2, 0, 1)]:
        cluster = Cluster(model, torch.optim.SGD(model.parameters(), lr=1.0), workers=3)
        for worker in arrival:
            cluster.push(worker, 0, gradients[worker])
        cluster.update([((worker, 0, 0), c, 0.0) for worker, c in enumerate((0.1, 0.7, 0.2))])
        results.append(cluster.pull()["weight"])
    assert torch.equal(*results)


def test_without_any_gradient_nothing_moves():
    model, optimizer = linear(momentum=0.9, weight_decay=0.5)
    cluster = Cluster(model, optimizer)
    assert cluster.update([(cluster.push(0, 0, {}), 1.0, 0.0)]) == 0.0
    assert torch.equal(cluster.pull()["weight"], model.weight.detach())


# Buffers


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("narrow_", torch.zeros(2, dtype=torch.float16))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))


def test_buffers_are_averaged_by_weight_and_counters_are_those_of_the_furthest():
    model = Counted()
    cluster = Cluster(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=2, piece_bytes=8, workers=3)
    for worker, value in enumerate([1.0, 2.0, 4.0]):
        cluster.models[worker].average.fill_(value)
        cluster.models[worker].narrow_.fill_(30_000 * value / 2)
        cluster.models[worker].count.fill_(10 * worker)
        cluster.models[worker].seen[worker % 2] = True
    keys = [cluster.push(worker, step, ones(model)) for worker, step in [(0, 5), (1, 7), (2, 7)]]
    cluster.update([(keys[0], 0.25, 0.0), (keys[1], 0.15, 0.0), (keys[2], 0.1, 0.0)])
    state = cluster.pull()
    torch.testing.assert_close(state["average"], torch.full((3,), 0.5 * 1 + 0.3 * 2 + 0.2 * 4))
    torch.testing.assert_close(state["narrow_"], torch.full((2,), 28_500.0).half())
    assert state["count"] == 10
    assert state["seen"].tolist() == [False, True]


def test_a_model_without_parameters_to_train_on_some_shard():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    cluster = Cluster(model, torch.optim.Adam(model.parameters()), shards=5)
    assert sum(store.optimizer is None for store in cluster.stores) == 4
    cluster.update([(cluster.push(0, 0, ones(model)), 1.0, 0.0)])
    assert {store.version for store in cluster.stores} == {1}


def test_frozen_values_are_held_and_never_change():
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    cluster = Cluster(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5))
    cluster.update([(cluster.push(0, 0, ones(model)), 1.0, 0.0)])
    state = cluster.pull()
    assert torch.equal(state["bias"], model.bias)
    assert not torch.equal(state["weight"], model.weight)


# Delay compensation


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_delay_compensation(dtype):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    cluster = Cluster(model, torch.optim.SGD(model.parameters(), lr=0.5), shards=2, piece_bytes=48, workers=2)
    for store in cluster.stores:
        store.remember(1)
    read = copy.deepcopy(cluster.pull())
    cluster.update([(cluster.push(0, 0, ones(model, 0.25)), 1.0, 0.0)])
    now = copy.deepcopy(cluster.pull())
    gradients = random_gradients(model, torch.Generator().manual_seed(5))
    del gradients["bias"]
    cluster.update([(cluster.push(1, 0, gradients), 1.0, 0.4)])
    g, w_now, w_read = (d["weight"].double() for d in (gradients, now, read))
    expected = w_now - 0.5 * (g + 0.4 * g * g * (w_now - w_read))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-3
    torch.testing.assert_close(cluster.pull()["weight"].double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(cluster.pull()["bias"], now["bias"])


def test_delay_compensation_of_nothing_is_the_plain_update_bitwise():
    results = []
    for lam, late in [(0.0, True), (0.7, False)]:
        model, optimizer = linear(bias=True, momentum=0.9)
        cluster = Cluster(model, optimizer, workers=2)
        for step in range(3):
            for store in cluster.stores:
                if not late or step == 0:
                    store.remember(0)
            cluster.update([(cluster.push(0, step, ones(model, step + 1)), 1.0, lam)])
        results.append(cluster.pull())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_compensation_without_a_remembered_read_is_refused():
    model, optimizer = linear()
    cluster = Cluster(model, optimizer)
    for store in cluster.stores:
        store.remember(0)
        store.forget(0)
        store.forget(3)
    with pytest.raises(FrameError, match="worker 0"):
        cluster.update([(cluster.push(0, 0, ones(model)), 1.0, 0.5)])


# The optimizer


@pytest.mark.parametrize(
    ("cls", "match"),
    [
        ("torch.optim.sgd:Nothing", "cannot find"),
        ("no_such_module:SGD", "cannot find"),
        ("SGD", "cannot find"),
        ("collections:OrderedDict", "is not an optimizer"),
        (f"{__name__}:Needy", "cannot build"),
    ],
)
def test_classes_that_are_no_optimizer_here(cls, match, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("types").SimpleNamespace(Needy=Needy))
    spec = ModelSpec((TensorSpec("w", (2,), "float32", 0),), (), OptimizerSpec(cls, ({"lr": 1.0},), False))
    with pytest.raises(OptimizerError, match=match) as caught:
        ShardStore(spec, lay_out(spec, 1), 0)
    assert caught.value.fix


def test_errors_of_the_optimizer_have_its_name(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("types").SimpleNamespace(Failing=Failing))
    model = nn.Linear(2, 2)
    cluster = Cluster(model, Failing(model.parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match="Failing failed on a server: ValueError: no such luck"):
        cluster.update([(cluster.push(0, 0, ones(model)), 1.0, 0.0)])


def test_a_param_group_added_later_is_refused():
    model, optimizer = linear()
    cluster = Cluster(model, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(OptimizerError, match="2 param groups now"):
        cluster.update([(cluster.push(0, 0, ones(model)), 1.0, 0.0)])


def test_settings_of_the_workers_device_do_not_reach_the_server():
    model, optimizer = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["capturable"] = True
    cluster = Cluster(model, optimizer)
    cluster.update([(cluster.push(0, 0, ones(model)), 1.0, 0.0)])
    torch.testing.assert_close(cluster.pull()["weight"], model.weight.detach() - 0.1)


def test_the_norm_can_be_left_out():
    model, optimizer = linear()
    cluster = Cluster(model, optimizer, shards=1)
    key = cluster.push(0, 0, ones(model))
    assert cluster.stores[0].reduce([(key, 1.0, 0.0)], norm=False) == 0.0
    assert as_bytes(model.weight).nbytes == 96
