"""Leaves that are rare, odd or hostile: exact after a save and a load, or refused by their path."""

import collections
import math
import struct
import sys
import threading

import numpy
import pytest
import torch

from forge.checkpoint.format.encoding import MAX_DEPTH
from forge.checkpoint.format.leaves import differences
from forge.checkpoint.store import Store
from forge.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*beta state:UserWarning",
    "ignore:.*[Qq]uantiz",
    "ignore:.*ComplexHalf:UserWarning",
    "ignore:.*nested tensors:UserWarning",
    "ignore:Sparse invariant checks:UserWarning",
)


def bits(tensor):
    """Every bit of the values, whatever the dtype or the strides."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    if not plain.numel():
        return b""
    return bytes(plain.reshape(-1).view(torch.uint8).tolist())


@pytest.fixture
def round_trip(store):
    def through_disk(state):
        store.check_savable({"state": state})
        store.commit(store.snapshot(1, {"state": state}, copy=False))
        return store.newest().state["state"]

    return through_disk


# -- tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_small_dtype_comes_back_with_its_bits(dtype, shape, round_trip):
    """Each bit pattern has a meaning."""
    raw = torch.arange(math.prod(shape), dtype=torch.uint8) * 11
    tensor = raw.view(dtype).reshape(shape)
    found = round_trip({"it": tensor, "t": tensor.t() if len(shape) == 2 else tensor})
    assert found["it"].dtype is dtype
    assert found["it"].shape == tensor.shape
    assert bits(found["it"]) == bits(tensor)
    assert found["t"].stride() == (tensor.t().stride() if len(shape) == 2 else tensor.stride())


def uncoalesced():
    return torch.sparse_coo_tensor([[0, 2, 0]], [1.0, 2.0, 4.0], (5,))


SPARSE = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "coo, not coalesced": uncoalesced,
    "coo, coalesced": lambda: uncoalesced().coalesce(),
    "coo with dense dimensions": lambda: torch.randn(4, 3).to_sparse(1),
    "coo with nothing in it": lambda: torch.zeros(3, 2).to_sparse(),
    "coo of a size of zero": lambda: torch.zeros(0, 2).to_sparse(),
    "coo of bfloat16": lambda: torch.eye(3, dtype=torch.bfloat16).to_sparse(),
    "coo, a parameter": lambda: torch.nn.Parameter(torch.eye(3).to_sparse()),
}


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_tensor_comes_back_part_by_part(name, round_trip):
    """Embeddings have sparse gradients, and graphs sparse matrices; order and doublets count."""
    tensor = SPARSE[name]().detach()
    found = round_trip(tensor)
    assert (found.layout, found.dtype, found.shape) == (tensor.layout, tensor.dtype, tensor.shape)
    assert found.is_coalesced() == tensor.is_coalesced()
    for one in ("_indices", "_values"):
        part, expected = getattr(found, one)(), getattr(tensor, one)()
        assert part.dtype is expected.dtype
        assert torch.equal(part, expected)


@pytest.mark.parametrize(
    "make",
    {
        "channels last, one channel": lambda t: t[:, :1].to(memory_format=torch.channels_last),
        "a transposed row": lambda t: t[0, 0, :1].t(),
        "a matrix of one column": lambda t: t[0, 0].t()[:, :1].contiguous().t(),
    }.items(),
    ids=lambda item: item[0],
)
def test_strides_come_back_also_where_a_size_of_one_hides_them(make, round_trip):
    """Kernels choose by strides, whether or not `is_contiguous` cares."""
    tensor = make[1](torch.randn(2, 3, 4, 5).clone())
    found = round_trip(tensor)
    assert torch.equal(found, tensor)
    dense = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    assert [s for s, n in zip(found.stride(), tensor.shape, strict=True) if n > 1] == dense
    if tensor.dim() == 4:
        assert tensor.stride() != tensor.clone(memory_format=torch.contiguous_format).stride()
        assert found.stride() == tensor.stride()


@pytest.mark.parametrize("copy", [False, True])
def test_where_new_tensors_are_made_by_default_makes_no_difference(copy, store):
    """A script that sets it to cuda found every checkpoint damaged; meta stands for cuda here."""
    state = {
        "small": torch.arange(5.0),
        "large": torch.arange(40_000),
        "transposed": torch.randn(3, 4).t(),
        "complex": torch.randn(3, dtype=torch.complex128),
        "array": numpy.arange(3),
        **{name: SPARSE[name]().detach() for name in SPARSE},
    }
    with torch.device("meta"):
        store.check_savable(state)
        store.commit(store.snapshot(1, state, copy=copy))
        found = store.newest().state
    assert not list(differences(found, state))
    assert {one.device.type for one in found.values() if torch.is_tensor(one)} == {"cpu"}


def test_a_parameter_and_a_buffer_come_back_as_the_tensors_they_hold(round_trip):
    """Whether something is trained is for the module to say, and for `frozen`."""
    held = torch.arange(3.0)
    found = round_trip({"p": torch.nn.Parameter(held), "b": torch.nn.Buffer(held + 1)})
    assert [type(one) for one in found.values()] == [torch.Tensor, torch.Tensor]
    assert not found["p"].requires_grad
    assert found["p"].tolist() == [0, 1, 2]


def test_a_tied_tensor_whose_strides_are_put_back_is_tied_again(round_trip):
    """A transposed head is the embedding's memory, too."""
    head = torch.randn(3, 4).t()
    found = round_trip({"a": head, "b": head})
    assert found["a"].stride() == (1, 4)
    assert found["a"].data_ptr() == found["b"].data_ptr()


# -- other leaves ----------------------------------------------------------------------------------


def nan(bits):
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


NANS = [0x7FF8000000000000, 0xFFF8000000000000, 0x7FF8000000000001, 0x7FF0000000000001, 2**64 - 1]


@pytest.mark.parametrize("raw", NANS, ids=hex)
def test_a_nan_comes_back_with_its_payload(raw, round_trip):
    """They are all called nan, and are compared by bits where runs are."""
    found = round_trip([nan(raw), complex(nan(raw), 0.0)])
    assert struct.pack("<d", found[0]) == struct.pack("<Q", raw)
    assert struct.pack("<d", found[1].real) == struct.pack("<Q", raw)


ARRAYS = {
    "times": numpy.array(["2020-01-01", "NaT"], dtype="datetime64[ns]"),
    "durations": numpy.array([1, -5], dtype="timedelta64[25s]"),
    "texts": numpy.array(["é", "", "abc"]),
    "bytes": numpy.array([b"ab\0c", b""]),
    "columns first": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    "columns first, three dimensions": numpy.asfortranarray(numpy.arange(24).reshape(2, 3, 4)),
    "no dimension": numpy.array(2.5, dtype=">f4"),
    "half": numpy.array([numpy.nan, -0.0], dtype="<f2"),
    "nothing in it": numpy.zeros((0, 4), dtype="<M8[D]"),
    "long double": numpy.array([1, 3], dtype=numpy.longdouble) / 3,
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back_byte_by_byte(name, round_trip):
    """Datasets keep their bookkeeping in them."""
    array = ARRAYS[name]
    found = round_trip(array)
    assert type(found) is numpy.ndarray
    assert (found.dtype, found.shape, found.strides) == (array.dtype, array.shape, array.strides)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


SCALARS = {
    "text": numpy.str_("é"),
    "empty text": numpy.str_(""),
    "bytes": numpy.bytes_(b"a\0b"),
    "time": numpy.datetime64("2020-01-01T00:00", "m"),
    "no time": numpy.timedelta64("NaT"),
    "long double": numpy.longdouble(1) / 3,
    "NaN": numpy.array([0x7FC00001], dtype="<u4").view("<f4")[0],
}


@pytest.mark.parametrize("name", SCALARS)
def test_a_numpy_scalar_comes_back_byte_by_byte(name, round_trip):
    """With its type: a float64 is a float, too, and must not become one."""
    found = round_trip([SCALARS[name]])[0]
    assert type(found) is type(SCALARS[name])
    assert found.dtype == SCALARS[name].dtype
    assert found.tobytes() == SCALARS[name].tobytes()


VALUES = {
    "huge int as a key": {7**9000: {"x": 1}},
    "tuples as keys": {((1, 2.5), None, b"x", frozenset({1})): 0},
    "numpy scalar as a key": {numpy.int64(3): numpy.float32(1)},
    "true, one and 1.5": {True: 1, 2: True, 1.5: "1.5", None: 3},
    "surrogates": {"\ud800": "\udfff", "a\udc80b": [{"\ud83d": ""}]},
    "every tag as a key": {"!tensor": "a", "!dict": [], "!": 1, "metadata": {"!sparse": 2}},
    "tags in an ordered dict": collections.OrderedDict([("!size", 1), ("metadata", 2)]),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was(name, round_trip):
    """`==` takes 1 for True, and 0.0 for -0.0; the representation does not."""
    found = round_trip(VALUES[name])
    assert found == VALUES[name]
    assert repr(found) == repr(VALUES[name]) if "huge" not in name else True


def test_tensors_below_odd_keys_are_kept_and_their_names_can_be_read_by_others(round_trip, store):
    """A lone surrogate is no UTF-8: safetensors could not open the file at all."""
    from safetensors.torch import load_file

    state = {
        "\ud800": torch.ones(1),
        "?": torch.zeros(1),
        7**9000: torch.ones(2),
        "": torch.ones(3),
    }
    found = round_trip(state)
    assert list(found) == list(state)
    assert all(torch.equal(found[key], state[key]) for key in state)
    file = store.directory / "step_1" / "tensors_rank00000.safetensors"
    assert len(load_file(file)) == 4


def nested(depth, kind):
    value = torch.ones(1)
    for _ in range(depth):
        value = {list: [value], tuple: (value,), dict: {"k": value}, int: {1: value}}[kind]
    return value


@pytest.mark.parametrize("kind", [list, tuple, dict, int])
def test_what_is_nested_as_deep_as_allowed_comes_back(kind, round_trip):
    """The state that a store is given has a level of its own."""
    found = round_trip(nested(MAX_DEPTH - 1, kind))
    for _ in range(MAX_DEPTH - 1):
        found = next(iter(found.values())) if isinstance(found, dict) else found[0]
    assert found.tolist() == [1]


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 100_000])
@pytest.mark.parametrize("kind", [list, tuple, dict, int])
def test_what_is_nested_deeper_is_refused_at_the_start(kind, depth):
    """Not by a RecursionError, at a depth that depends on who calls."""
    with pytest.raises(
        CheckpointError, match=r"^deep.{1,70}: cannot be saved, since it is nested in more than 100"
    ):
        Store.check_savable({"deep": nested(depth, kind)})


def test_a_stack_that_is_almost_full_is_an_error_that_says_so():
    """A caller deep inside its own recursion must not see ours."""
    raised = []

    def deep(left):
        if left:
            deep(left - 1)
        else:
            try:
                Store.check_savable({"deep": nested(90, tuple)})
            except CheckpointError as error:
                raised.append(str(error))

    thread = threading.Thread(target=deep, args=(sys.getrecursionlimit() - 100,))
    thread.start()
    thread.join()
    assert "since Python's recursion limit was reached" in raised[0]
