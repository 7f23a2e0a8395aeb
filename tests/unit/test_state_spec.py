import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from paceline.errors import ModelError, OptimizerError
from paceline.state.describe import ELEMENTWISE, describe, hyperparameters
from paceline.state.spec import FROZEN, ModelSpec, difference
from tests.unit.state_helpers import Cluster


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 4, bias=False)
        self.decoder = nn.Linear(3, 4)
        self.decoder.weight = self.encoder.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.other_norm = self.norm


class MySGD(torch.optim.SGD):
    pass


class Closing(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})

    def step(self, closure):
        return closure()


def test_a_model_is_described():
    model = Tied()
    model.decoder.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [
            {"params": [model.encoder.weight], "lr": torch.tensor(0.5)},
            {"params": [*model.norm.parameters(), model.decoder.bias]},
        ],
        lr=np.float64(0.25),
        betas=(0.8, 0.9),
    )
    spec = describe(model, optimizer)
    assert [(t.name, t.shape, t.dtype, t.group) for t in spec.tensors] == [
        ("encoder.weight", (4, 3), "float32", 0),
        ("decoder.bias", (4,), "float32", FROZEN),
        ("norm.weight", (4,), "float32", 1),
        ("norm.bias", (4,), "float32", 1),
    ]
    assert [(b.name, b.shape, b.dtype) for b in spec.buffers] == [
        ("norm.running_mean", (4,), "float32"),
        ("norm.running_var", (4,), "float32"),
        ("norm.num_batches_tracked", (), "int64"),
    ]
    assert spec.optimizer.cls == "torch.optim.adamw:AdamW"
    assert spec.optimizer.elementwise
    first, second = spec.optimizer.groups
    assert (first["lr"], second["lr"], first["betas"]) == (0.5, 0.25, [0.8, 0.9])
    assert "params" not in first
    assert type(second["lr"]) is float
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec
    assert difference(spec, describe(model, optimizer)) is None


def test_named_parameters_are_no_hyperparameter():
    model = nn.Linear(2, 2)
    assert "param_names" not in hyperparameters(torch.optim.SGD(model.named_parameters(), lr=0.1))[0]


def test_elementwise_is_by_exact_class():
    model = nn.Linear(3, 2)
    for cls in ELEMENTWISE:
        assert describe(model, cls(model.parameters())).optimizer.elementwise
    assert not describe(model, MySGD(model.parameters(), lr=0.1)).optimizer.elementwise
    assert not describe(model, torch.optim.Adafactor(model.parameters())).optimizer.elementwise


def test_optimizers_without_a_server_form():
    model = nn.Linear(3, 2)

    class Local(torch.optim.SGD):
        pass

    for optimizer, match in [
        (torch.optim.LBFGS(model.parameters()), "LBFGS needs a closure"),
        (Closing(model.parameters()), "Closing needs a closure"),
        (torch.optim.SparseAdam(model.parameters()), "SparseAdam takes sparse gradients"),
        (Local(model.parameters(), lr=0.1), "defined in a function"),
        (torch.optim.SGD(nn.Linear(5, 2).parameters(), lr=0.1), r"param group 0 .* not in the model.*\(2, 5\)"),
    ]:
        with pytest.raises(OptimizerError, match=match) as caught:
            describe(model, optimizer)
        assert caught.value.fix


def test_a_hyperparameter_must_be_plain():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["schedule"] = lambda step: 0.1
    with pytest.raises(OptimizerError, match="schedule is a function"):
        describe(model, optimizer)


def test_an_optimizer_with_a_past_is_refused():
    model = nn.Linear(3, 2)
    for optimizer in (torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), momentum=0.9)):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        with pytest.raises(OptimizerError, match="has made steps already"):
            describe(model, optimizer)


def test_tensors_that_cannot_be_sent():
    lazy = nn.LazyLinear(2)
    with pytest.raises(ModelError, match="weight has no shape yet"):
        describe(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))
    model = nn.Linear(3, 2)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(ModelError, match="buffer graph is sparse"):
        describe(model, torch.optim.SGD(model.parameters(), lr=0.1))


def spec_of(model=None, cls=torch.optim.SGD, **settings):
    model = model or nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    return describe(model, cls(model.parameters(), **{"lr": 0.1, **settings}))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (spec_of(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))), r"0.weight has shape (2, 4), not (2, 3)"),
        (
            spec_of(nn.Sequential(nn.Linear(3, 2).double(), nn.BatchNorm1d(2))),
            "0.weight has dtype float64, not float32",
        ),
        (spec_of(nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2))), "parameter 0.bias is missing"),
        (spec_of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(1, 1))), "2.weight is one too many"),
        (spec_of(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))), "buffer 1.running_mean is missing"),
        (spec_of(cls=torch.optim.Adam), "the optimizer is torch.optim.adam:Adam, not torch.optim.sgd:SGD"),
        (spec_of(lr=0.2), "the optimizer's param group 0 has lr = 0.2, not 0.1"),
    ],
)
def test_difference_names_the_first(other, expected):
    assert expected in difference(spec_of(), other)


def test_difference_in_groups_order_and_freezing():
    model = nn.Linear(3, 2)
    whole = spec_of(model)
    model.bias.requires_grad_(False)
    assert difference(whole, spec_of(model)) == "parameter bias has param group none (it is frozen), not 0"
    first, second = whole.tensors
    swapped = ModelSpec((second, first), whole.buffers, whole.optimizer)
    assert difference(whole, swapped) == "parameter bias comes where weight was expected"
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    model.bias.requires_grad_(True)
    assert "param group 1, not 0" in difference(whole, describe(model, optimizer))


def test_every_elementwise_optimizer_is_the_same_split_and_whole():
    for cls in sorted(ELEMENTWISE, key=lambda c: c.__name__):
        torch.manual_seed(0)
        model = nn.Linear(5, 7).double()
        optimizer = cls(model.parameters(), lr=0.01)
        split = Cluster(model, optimizer, shards=3, piece_bytes=40)
        for step in range(3):
            gradients = {name: torch.randn(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
            split.update([(split.push(0, step, gradients), 1.0, 0.0)])
            for name, p in model.named_parameters():
                p.grad = gradients[name]
            optimizer.step()
        for name, value in split.pull().items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-13, atol=1e-13)
