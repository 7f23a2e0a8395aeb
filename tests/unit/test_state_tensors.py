import pytest
import torch

from paceline.errors import FrameError
from paceline.state.layout import WIDTHS
from paceline.state.tensors import as_bytes, dtype_name, dtype_of, from_bytes


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_round_trip(name, shape):
    dtype = dtype_of(name)
    assert dtype.itemsize == WIDTHS[name]
    assert dtype_name(dtype) == name
    tensor = (torch.arange(torch.Size(shape).numel()) % 2).to(dtype).reshape(shape)
    view = as_bytes(tensor)
    assert view.nbytes == tensor.numel() * dtype.itemsize
    back = from_bytes(bytes(view), dtype, shape)
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert bytes(as_bytes(back)) == bytes(view)


def test_contiguous_memory_is_shared_both_ways():
    tensor = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    view = as_bytes(tensor)
    again = from_bytes(view, torch.bfloat16, (4,))
    with torch.no_grad():
        tensor[2] = 1.5
    assert again[2] == 1.5


def test_non_contiguous_is_copied_in_logical_order():
    tensor = torch.arange(6.0).reshape(2, 3).t()
    assert from_bytes(as_bytes(tensor), torch.float32, (6,)).tolist() == [0, 3, 1, 4, 2, 5]
    assert from_bytes(as_bytes(torch.ones(1).expand(3)), torch.float32, (3,)).tolist() == [1, 1, 1]
    conjugate = torch.tensor([1 + 2j]).conj()
    assert from_bytes(as_bytes(conjugate), torch.complex64, (1,)).tolist() == [1 - 2j]


def test_the_view_keeps_the_memory_alive():
    view = as_bytes(torch.full((1000,), 7.0).clone()[::2])
    assert from_bytes(view, torch.float32, (500,)).sum() == 3500


def test_read_only_memory_is_not_written():
    raw = bytes(4)
    from_bytes(raw, torch.float32, ()).add_(1)
    assert raw == bytes(4)


def test_wrong_length_and_dtype_are_refused():
    with pytest.raises(FrameError, match="7 bytes"):
        from_bytes(bytes(7), torch.float32, (2,))
    with pytest.raises(FrameError, match="object"):
        dtype_of("object")
