import copy

import pytest
import torch
from torch import nn

from paceline.errors import ModelError
from paceline.state.describe import describe
from paceline.state.layout import lay_out
from paceline.state.replica import Replica
from paceline.state.tensors import from_bytes
from tests.unit.state_helpers import Cluster


def make(model, piece_bytes=1000, optimizer=None):
    spec = describe(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1))
    return Replica(model, lay_out(spec, 1, piece_bytes), spec)


def pieces(replica, kind):
    return [piece for piece in replica.layout.pieces if piece.kind == kind]


def test_gradients_are_views_of_the_parameters_gradients():
    model = nn.Linear(3, 2)
    replica = make(model)
    model.weight.grad, model.bias.grad = torch.ones(2, 3), torch.full((2,), 2.0)
    (piece,) = pieces(replica, "param")
    present, views = replica.gradients(piece)
    model.weight.grad[1, 2] = 5
    assert present is None
    assert from_bytes(b"".join(views), torch.float32, (8,)).tolist() == [1, 1, 1, 1, 1, 5, 2, 2]


def test_slices_without_a_gradient_are_left_out():
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(2, 1))
    replica = make(model)
    model[1].bias.grad = torch.full((1,), 3.0)
    (piece,) = pieces(replica, "param")
    present, views = replica.gradients(piece)
    assert present == (3,)
    assert from_bytes(b"".join(views), torch.float32, (1,)).tolist() == [3]
    assert replica.gradients(piece, {}) == ((), [])


def test_gradients_of_any_form():
    model = nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True), "line": nn.Linear(3, 2, bias=False)}).half()
    replica = make(model, piece_bytes=8)
    model["table"](torch.tensor([1, 1, 3])).sum().backward()
    got = {}
    instead = {"table.weight": model["table"].weight.grad, "line.weight": torch.arange(6.0).reshape(3, 2).t()}
    for piece in pieces(replica, "param"):
        present, views = replica.gradients(piece, instead)
        assert present is None
        for part, view in zip(piece.slices, views, strict=True):
            got.setdefault(part.tensor, []).extend(from_bytes(view, torch.float16, (part.numel,)).tolist())
    assert list(got.values()) == [[0, 0, 2, 2, 0, 0, 1, 1], [0, 2, 4, 1, 3, 5]]
    assert replica.finite(instead) is None


@pytest.mark.parametrize("piece_bytes", [8, 100, 10_000])
def test_values_and_load_are_inverse(piece_bytes):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(2, 2).bfloat16())
    net[0].bias.requires_grad_(False)
    net = net.to(memory_format=torch.channels_last)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.zero_()
    here, there = make(net, piece_bytes), make(other, piece_bytes)
    assert not net[0].weight.is_contiguous()
    assert {piece.kind for piece in here.layout.pieces} == {"param", "frozen", "buffer"}
    before = {name: id(p) for name, p in other.named_parameters()}
    for piece in here.layout.pieces:
        there.load(piece, b"".join(here.values(piece)))
    for name, value in net.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    assert {name: id(p) for name, p in other.named_parameters()} == before
    assert not other[0].weight.is_contiguous()
    assert here.digest() == there.digest()
    other[1].num_batches_tracked.add_(1)
    assert here.digest() != there.digest()


def test_a_non_finite_gradient_is_named():
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(2, 1))
    replica = make(model)
    assert replica.finite() is None
    for bad in (float("nan"), float("inf"), -float("inf")):
        model[1].weight.grad = torch.tensor([[0.0, bad]])
        assert replica.finite() == "1.weight"
    assert replica.finite({"0.bias": torch.zeros(1)}) is None


def test_a_gradient_beyond_the_parameters_dtype_is_not_finite():
    model = nn.Linear(2, 1).half()
    assert make(model).finite({"bias": torch.tensor([1e5])}) == "bias"
    assert make(model).finite({"bias": torch.tensor([6e4])}) is None


def test_a_replaced_parameter_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    replica = make(model)
    replica.check_identity()
    kept = model[1].weight
    model[1].weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ModelError, match=r"parameter 1\.weight was replaced"):
        replica.check_identity()
    model[1].weight = kept
    replica.check_identity()
    model.double()
    with pytest.raises(ModelError, match=r"0\.weight is torch\.float64"):
        replica.check_identity()


def test_a_frozen_parameter_may_not_be_thawed_but_a_trained_one_may_rest():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    replica = make(model)
    model.weight.requires_grad_(False)
    replica.check_identity()
    model.bias.requires_grad_(True)
    with pytest.raises(ModelError, match="bias was frozen"):
        replica.check_identity()


def test_a_buffer_may_be_replaced_by_one_like_it():
    model = nn.BatchNorm1d(2)
    replica = make(model)
    model.running_mean = torch.full((2,), 3.0)
    piece = next(p for p in pieces(replica, "buffer") if p.dtype == "float32")
    present, views = replica.gradients(piece)
    assert present is None
    assert from_bytes(b"".join(views), torch.float32, (4,)).tolist() == [3, 3, 1, 1]
    model.running_mean = torch.zeros(3)
    with pytest.raises(ModelError, match="buffer running_mean is"):
        replica.values(piece)


def test_loading_does_not_disturb_autograd():
    model = nn.Linear(2, 1)
    cluster = Cluster(model, torch.optim.SGD(model.parameters(), lr=0.1))
    cluster.pull()
    cluster.models[0](torch.ones(1, 2)).sum().backward()
    assert cluster.models[0].weight.grad.tolist() == [[1, 1]]
    assert all(p.is_leaf and p.requires_grad for p in cluster.models[0].parameters())
