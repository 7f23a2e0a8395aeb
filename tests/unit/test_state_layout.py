import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ModelError
from paceline.state.layout import WIDTHS, lay_out
from paceline.state.spec import FROZEN, BufferSpec, ModelSpec, OptimizerSpec, TensorSpec

DTYPES = st.sampled_from(["float32", "bfloat16", "float64", "int64", "bool"])
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def specs(draw):
    tensors = draw(st.lists(st.tuples(SHAPES, DTYPES, st.integers(FROZEN, 1)), max_size=8))
    buffers = draw(st.lists(st.tuples(SHAPES, DTYPES), max_size=4))
    return ModelSpec(
        tuple(TensorSpec(f"t{i}", *t) for i, t in enumerate(tensors)),
        tuple(BufferSpec(f"b{i}", *b) for i, b in enumerate(buffers)),
        OptimizerSpec("torch.optim.sgd:SGD", ({}, {}), draw(st.booleans())),
    )


@given(specs(), st.integers(1, 4), st.integers(1, 300))
def test_each_element_is_in_exactly_one_piece(spec, shards, piece_bytes):
    layout = lay_out(spec, shards, piece_bytes)
    found = {("t", i): [] for i in range(len(spec.tensors))} | {("b", i): [] for i in range(len(spec.buffers))}
    assert [piece.index for piece in layout.pieces] == list(range(len(layout.pieces)))
    for piece in layout.pieces:
        assert 0 <= piece.shard < shards
        end = 0
        for part in piece.slices:
            tensor = (spec.buffers if piece.kind == "buffer" else spec.tensors)[part.tensor]
            assert tensor.dtype == piece.dtype
            assert part.offset == end
            end += part.numel
            found[("b" if piece.kind == "buffer" else "t", part.tensor)].append((part.start, part.stop))
            if piece.kind != "buffer":
                assert (tensor.group == FROZEN) == (piece.kind == "frozen")
        assert piece.nbytes == end * WIDTHS[piece.dtype]
        whole = piece.kind == "param" and not spec.optimizer.elementwise and len(piece.slices) == 1
        assert piece.nbytes <= max(piece_bytes, WIDTHS[piece.dtype]) or whole
    for (kind, index), ranges in found.items():
        tensor = (spec.buffers if kind == "b" else spec.tensors)[index]
        ranges = sorted(ranges)
        assert ranges
        assert ranges[0][0] == 0
        assert ranges[-1][1] == tensor.numel
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
        if kind == "t" and tensor.group != FROZEN and not spec.optimizer.elementwise:
            assert len(ranges) == 1


@given(specs(), st.integers(1, 4), st.integers(1, 300))
def test_no_shard_holds_more_than_the_least_by_more_than_a_piece(spec, shards, piece_bytes):
    layout = lay_out(spec, shards, piece_bytes)
    for kinds in (("param", "buffer"), ("param", "buffer", "frozen")):
        pieces = [piece for piece in layout.pieces if piece.kind in kinds]
        loads = [sum(piece.nbytes for piece in pieces if piece.shard == shard) for shard in range(shards)]
        assert max(loads) - min(loads) <= max((piece.nbytes for piece in pieces), default=0)


def model(*tensors, buffers=(), elementwise=True):
    return ModelSpec(tensors, buffers, OptimizerSpec("torch.optim.sgd:SGD", ({},), elementwise))


def test_small_tensors_share_a_piece_past_the_big_ones_between_them():
    bias, weight = TensorSpec("b", (10,), "float32", 0), TensorSpec("w", (100,), "float32", 0)
    layout = lay_out(model(bias, weight, bias, weight, bias), shards=1, piece_bytes=400)
    assert [[part.tensor for part in piece.slices] for piece in layout.pieces] == [[0, 2, 4], [1], [3]]
    big = TensorSpec("w", (101,), "float32", 0)
    layout = lay_out(model(bias, big, bias, big, bias), shards=1, piece_bytes=400)
    assert [[part.tensor for part in piece.slices] for piece in layout.pieces] == [[0, 2, 4], [1], [1], [3], [3]]


def test_a_big_tensor_is_split_evenly():
    layout = lay_out(model(TensorSpec("w", (1000,), "float32", 0)), shards=3, piece_bytes=1500)
    assert [piece.nbytes for piece in layout.pieces] == [1332, 1332, 1336]
    assert sorted(piece.shard for piece in layout.pieces) == [0, 1, 2]


def test_a_frozen_backbone_does_not_unbalance_what_travels():
    frozen = TensorSpec("backbone", (10_000,), "float32", FROZEN)
    heads = [TensorSpec(f"head{i}", (25,), "float32", 0) for i in range(4)]
    layout = lay_out(model(frozen, *heads), shards=2, piece_bytes=100)
    moving = [sum(p.nbytes for p in layout.of_shard(shard) if p.kind == "param") for shard in (0, 1)]
    assert moving == [200, 200]


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ModelError, match="weight has dtype quint8"):
        lay_out(model(TensorSpec("weight", (3,), "quint8", 0)), 1)


def test_the_same_in_another_process_and_without_torch():
    script = (
        "import sys; from paceline.state.layout import *; from paceline.state.spec import *\n"
        "tensors = tuple(TensorSpec(f't{i}', (i * 37 % 101, 3), 'float32', i % 3 - 1) for i in range(40))\n"
        "layout = lay_out(ModelSpec(tensors, (), OptimizerSpec('torch.optim.sgd:SGD', ({}, {}), True)), 3, 200)\n"
        "assert 'torch' not in sys.modules\n"
        "print(layout)"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
    assert "Piece(index=0" in runs.pop()


def test_pieces_are_values():
    layout = lay_out(model(TensorSpec("w", (10,), "float32", 0)), 1)
    assert layout == lay_out(model(TensorSpec("w", (10,), "float32", 0)), 1)
    assert layout != lay_out(model(TensorSpec("w", (11,), "float32", 0)), 1)
    assert replace(layout.pieces[0], shard=1) != layout.pieces[0]
