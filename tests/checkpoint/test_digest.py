"""A digest stands for a tensor: ranks write only tensors whose digest differs from rank 0's."""

import pytest
import torch

from forge.checkpoint.format.tensor_encoding import digest

SIZES = (0, 1, 1000, 4096, 32768, 70001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("size", SIZES)
def test_a_copy_has_the_same_digest_and_any_flipped_bit_another(dtype, size):
    """Wherever it is: in the first block, the last, and what is left over at the end."""
    torch.manual_seed(size)
    memory = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8)
    tensor = memory.view(dtype)
    expected = digest(tensor)
    assert digest(tensor.clone()) == expected
    found = set()
    places = {0, len(memory) // 2, len(memory) - 1} if size else ()
    for place in places:
        for bit in (0, 7):
            memory[place] ^= 1 << bit
            found.add(digest(tensor))
            memory[place] ^= 1 << bit
    assert len(found) == 2 * len(places)
    assert expected not in found
    assert digest(tensor) == expected


def test_flips_that_cancel_each_other_in_a_sum_are_seen():
    """Two signs, two values exchanged, a value moved to another block."""
    torch.manual_seed(1)
    tensor = torch.randn(200_000)
    expected = digest(tensor)
    for one, other in ((1, 3), (1, 65537), (65535, 65536), (7, 199_999)):
        signs, exchanged = tensor.clone(), tensor.clone()
        signs[[one, other]] *= -1
        exchanged[[one, other]] = tensor[[other, one]]
        assert expected not in (digest(signs), digest(exchanged))


def test_the_same_bytes_of_another_kind_are_another_tensor():
    zeros = torch.zeros(8192)
    others = (zeros.view(64, 128), zeros.view(torch.int32), torch.zeros(8193), -zeros)
    assert len({digest(one) for one in (zeros, *others)}) == 5


def test_where_it_lies_makes_no_difference():
    """A view into a larger tensor, at any place of it, and one that is transposed."""
    whole = torch.randn(3 + 64 * 128)
    part = whole[3:]
    expected = digest(part.clone())
    assert digest(part) == expected
    turned = part.view(64, 128).t()
    assert digest(turned) == digest(turned.contiguous()) != digest(turned.t())
