"""What is saved comes back, bit by bit and type by type; what cannot is refused by its path."""

import collections
import enum
import math
import random
import struct
import sys

import numpy
import pytest
import safetensors.torch
import torch

from forge.checkpoint.format.decoding import decode
from forge.checkpoint.format.encoding import Encoder
from forge.checkpoint.store import Store
from forge.errors import CheckpointError, DamagedCheckpoint


class Colour(enum.Enum):
    RED = "red"


class Subclass(torch.Tensor):
    pass


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert bits(found) == bits(expected)
    elif isinstance(expected, numpy.ndarray | numpy.generic):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        for (key, value), (found_key, found_value) in zip(
            expected.items(), found.items(), strict=True
        ):
            assert_same(found_key, key)
            assert_same(found_value, value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert math.isnan(found) if math.isnan(expected) else pack(found) == pack(expected)
    elif isinstance(expected, complex):
        assert_same([found.real, found.imag], [expected.real, expected.imag])
    else:
        assert found == expected


def pack(value):
    return struct.pack("<d", value)


def bits(tensor):
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


@pytest.fixture
def round_trip(store):
    def through_disk(state):
        store.commit(store.snapshot(1, {"state": state}, copy=False))
        return store.newest().state["state"]

    return through_disk


PLAIN = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**63, -(2**255), 2**256, -(2**257) - 1],
    "an int beyond Python's limit for digits": 7**9000,
    "floats": [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 0.1, 1.7976931348623157e308],
    "complex": [complex(-0.0, math.inf), complex(math.nan, -0.0), 1j],
    "strings": ["", "é", "\x00", "\ud800", "!tuple", "𝄞"],
    "bytes": [b"", b"\x00\xff", bytearray(b"abc")],
    "tuples": ((), (1, (2, [3, ()]))),
    "sets": [set(), {1, "a", (2, 3)}, frozenset({None, 1.5})],
    "keys": {1: "int", (1, 2): "tuple", None: "none", 2.5: "float", False: "bool", "s": "str"},
    "keys like tags": {"!tensor": 1, "!": {"!dict": []}},
    "key order": {"b": 1, "a": 2},
    "ordered": collections.OrderedDict([("b", 1), ("a", collections.OrderedDict())]),
    "counter": collections.Counter({3: 1, 7: 2}),
    "torch": [torch.Size([2, 0, 3]), torch.bfloat16, torch.device("cuda:3"), torch.device("cpu")],
    "numpy scalars": [numpy.float32(0.1), numpy.int64(-1), numpy.bool_(True), numpy.complex64(1j)],
    "numpy NaN": numpy.float64("nan"),
    "arrays": [numpy.arange(6.0).reshape(2, 3), numpy.array(3), numpy.zeros((0, 3))],
    "array in the other byte order": numpy.arange(3, dtype=">i4"),
    "array that is a view": numpy.arange(12).reshape(3, 4).T[::2],
    "array of bools": numpy.array([True, False]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_value_comes_back_as_it_was(name, round_trip):
    """JSON alone would turn tuples into lists, 1 into "1", and lose -0.0's type and NaN."""
    assert_same(round_trip(PLAIN[name]), PLAIN[name])


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
]


def some(dtype, *shape):
    generator = torch.Generator().manual_seed(1)
    count = math.prod(shape) * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 3), (150, 101)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_bits_comes_back(dtype, shape, round_trip):
    """Random bytes hold NaNs with payloads, infinities and denormals; large tensors are views."""
    tensor = some(dtype, *shape)
    # Beside neighbours of other sizes, so that alignment within the file is put to the test.
    state = {"odd": some(torch.uint8, 3), "it": tensor, "half": some(torch.float16, 7)}
    assert_same(round_trip(state), state)


@pytest.mark.parametrize("length", range(1, 18))
def test_large_complex_tensors_load_whatever_the_length_of_the_header(length, round_trip):
    """Their memory has to be aligned to 16 bytes, and names of any length lie in front of it."""
    state = {"n" * length: torch.randn(5000, dtype=torch.complex128)}
    assert_same(round_trip(state), state)


@pytest.mark.parametrize(
    "make",
    {
        "transposed": lambda t: t.permute(2, 0, 3, 1),
        "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
        "with gaps": lambda t: t[::2, :, 1:],
        "expanded": lambda t: t[:1].expand(5, -1, -1, -1),
        "overlapping": lambda t: t.as_strided((3, 3), (1, 1)),
        "size-1 dimension": lambda t: t[:, :1].transpose(0, 1),
    }.items(),
    ids=lambda item: item[0],
)
def test_values_come_back_from_any_strides_and_dense_strides_too(make, round_trip):
    """Channels-last weights must stay so: kernels and their rounding depend on it."""
    tensor = make[1](torch.randn(2, 3, 4, 5))
    found = round_trip(tensor)
    assert torch.equal(found, tensor)
    if make[0] in ("transposed", "channels last"):
        assert found.stride() == tensor.stride()


def test_conjugate_and_negative_views_of_one_memory_are_kept_apart(round_trip):
    """They share address, shape and strides with what they are views of, but not the values."""
    t = torch.randn(4, dtype=torch.complex64)
    state = {"t": t, "conj": t.conj(), "imag": t.imag, "neg": t.conj().imag}
    found = round_trip(state)
    for name, expected in state.items():
        assert torch.equal(found[name], expected), name


def test_a_tied_tensor_is_stored_once_and_tied_again(round_trip):
    """Embedding and head are often one; two copies would cost twice the disk."""
    t = torch.randn(10)
    encoder = Encoder()
    encoder.encode({"a": t, "b": t, "c": torch.nn.Parameter(t)})
    assert list(encoder.tensors) == ["a"]
    found = round_trip({"a": t, "b": t})
    assert found["a"].data_ptr() == found["b"].data_ptr()


def test_aliased_parts_of_one_memory_come_back_as_their_own_values(round_trip):
    """A view that begins where its base begins is not its base."""
    base = torch.arange(12.0)
    state = {
        "base": base,
        "head": base[:4],
        "square": base.view(3, 4),
        "as_int": base.view(torch.int32),
    }
    assert_same(round_trip(state), state)


def test_names_that_would_collide_stay_apart(round_trip):
    """A key with a dot reads like a path; `__metadata__` is safetensors' own."""
    one, two, three = torch.ones(1), torch.zeros(1), torch.full((1,), 2.0)
    state = {"a.b": one, "a": {"b": two}, "__metadata__": three}
    encoder = Encoder()
    tree = encoder.encode({"__metadata__": three})
    assert "__metadata__" not in encoder.tensors
    assert_same(decode(tree, encoder.tensors), {"__metadata__": three})
    assert_same(round_trip(state), state)


def test_a_modules_metadata_is_kept(round_trip):
    """`load_state_dict` reads layers' format versions there, and converts what is old."""
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    state = module.state_dict()
    found = round_trip(state)
    assert_same(found, state)
    assert found._metadata == state._metadata
    assert found._metadata["0"] == {"version": 2}


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop", "Adafactor", "LBFGS", "NAdam"])
def test_an_optimizers_state_comes_back(name, round_trip):
    """Integer keys, tensors of no dimension, None and booleans beside each other."""
    layer = torch.nn.Linear(3, 2)
    optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.1)
    optimizer.step(lambda: layer(torch.ones(1, 3)).sum().backward() or torch.ones(()))
    assert_same(round_trip(optimizer.state_dict()), optimizer.state_dict())


def random_tree(rng, depth=0):
    leaves = [
        lambda: rng.choice([None, True, False]),
        lambda: rng.getrandbits(rng.choice([1, 8, 64, 300])) * rng.choice([1, -1]),
        lambda: rng.choice([0.0, -0.0, math.inf, rng.uniform(-1e300, 1e300)]),
        lambda: "".join(chr(rng.choice([33, 65, 233, 0x1D11E])) for _ in range(rng.randrange(4))),
        lambda: rng.randbytes(rng.randrange(5)),
        lambda: some(rng.choice(DTYPES), *(rng.randrange(1, 4) for _ in range(rng.randrange(3)))),
    ]
    kinds = [
        lambda: [random_tree(rng, depth + 1) for _ in range(rng.randrange(4))],
        lambda: tuple(random_tree(rng, depth + 1) for _ in range(rng.randrange(4))),
        lambda: {
            rng.choice(
                [rng.randrange(9), str(rng.randrange(9)), f"!{rng.randrange(9)}", (1, "x")]
            ): random_tree(rng, depth + 1)
            for _ in range(rng.randrange(4))
        },
        lambda: collections.OrderedDict(
            (i, random_tree(rng, depth + 1)) for i in range(rng.randrange(3))
        ),
    ]
    return rng.choice(leaves if depth > 4 or rng.random() < 0.3 else kinds)()


@pytest.mark.parametrize("seed", range(60))
def test_random_trees_come_back(seed, round_trip):
    """Combinations that nobody thought of."""
    tree = [random_tree(random.Random(seed)) for _ in range(3)]
    assert_same(round_trip(tree), tree)


class Local:
    pass


REFUSED = {
    "quantized": lambda: torch._empty_affine_quantized(
        [2], scale=1, zero_point=0, dtype=torch.qint8
    ),
    "subclass": lambda: torch.ones(2).as_subclass(Subclass),
    "meta": lambda: torch.ones(2, device="meta"),
    "uninitialized": torch.nn.UninitializedParameter,
    "object": Local,
    "class": lambda: Local,
    "function": lambda: round_trip,
    "lambda": lambda: lambda: 0,
    "generator": lambda: torch.Generator(),
    "dict subclass": lambda: collections.defaultdict(list),
    "namedtuple": lambda: collections.namedtuple("Pair", "a b")(1, 2),
    "array of objects": lambda: numpy.array([object()]),
    "masked array": lambda: numpy.ma.array([1, 2], mask=[0, 1]),
    "enum": lambda: Colour.RED,
}


@pytest.mark.filterwarnings("ignore:.*beta state:UserWarning", "ignore:.*[Qq]uantiz")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_kept_exactly_is_refused_by_its_path(kind):
    """Found at start, by name: not at the first save, and never at the first resume."""
    state = {"model": {"layers": [0, {"it": REFUSED[kind]()}]}}
    with pytest.raises(CheckpointError, match=r"^model\.layers\[1\]\.it: "):
        Store.check_savable(state)


def test_safetensors_reads_the_tensor_file(store):
    """Weights must be usable without forge."""
    state = {
        "w": torch.randn(3, 4),
        "b": torch.randn(2).bfloat16(),
        "i": torch.arange(5),
        "e": torch.empty(0, 2),
    }
    path = store.commit(store.snapshot(1, state, copy=False))
    (file,) = path.glob("*.safetensors")
    found = safetensors.torch.load_file(file)
    assert found.keys() == state.keys()
    for name in state:
        assert torch.equal(found[name], state[name])


def test_a_copied_snapshot_does_not_follow_training(store):
    """An asynchronous save must be the state of its own step, views and conjugates included."""
    weights, z = torch.zeros(3), torch.ones(2, dtype=torch.complex64)
    array, numbers = numpy.zeros(2), [1]
    state = {"w": weights, "t": torch.zeros(2, 2).t(), "z": z.conj(), "array": array, "n": numbers}
    snapshot = store.snapshot(1, state, copy=True)
    weights += 1
    z *= 1j
    array += 1
    numbers.append(2)
    store.commit(snapshot)
    found = store.newest().state
    assert found["w"].tolist() == [0, 0, 0]
    assert found["z"].tolist() == [1, 1]
    assert found["array"].tolist() == [0, 0]
    assert found["n"] == [1]


@pytest.mark.parametrize(
    "value",
    [
        {"!newer": 1},
        {"!tensor": "missing"},
        {"!dtype": "load"},
        {"!dtype": "no_such_dtype"},
        {"!enum": ["os", "system"], "name": "x"},
        {"!bytes": 3},
        {"!tuple": None},
        {"!ndarray": ["<f8", [2]], "bytes": {"!tensor": "t"}},
        {"!tensor": "t", "stride": [1, 1, 1]},
        {"!float": "abc"},
    ],
    ids=str,
)
def test_what_no_encoder_writes_is_damage(value):
    """It must be passed over as damaged, not crash the resume, and execute nothing."""
    with pytest.raises(DamagedCheckpoint):
        decode({"it": [value]}, {"t": torch.zeros(2, dtype=torch.uint8)})


@pytest.mark.parametrize(
    "value",
    [
        {"!numpy_scalar": ["<f8", ""]},
        {"!ndarray": ["<f8", [1 << 70]], "bytes": {"!tensor": "w"}},
        {"!tensor": "w", "stride": [1 << 40]},
        {"!tensor": "w", "stride": [0]},
        {"!dtype": "onnx"},
    ],
    ids=str,
)
def test_a_value_that_no_encoder_writes_is_damage(value):
    """Not an IndexError, nor a terabyte of memory, nor an import of something."""
    before = set(sys.modules)
    with pytest.raises(DamagedCheckpoint):
        decode([value], {"w": torch.zeros(3)})
    assert set(sys.modules) == before


@pytest.mark.parametrize("device", ["xpu", "mps", "meta", "cuda:99"])
def test_a_tensor_of_a_device_that_is_not_here_is_read_onto_the_cpu(device):
    """A checkpoint of another machine is no damage; whoever loads it moves it to its parameters."""
    if device != "meta" and getattr(getattr(torch, device, None), "is_available", bool)():
        pytest.skip(f"this machine has {device}")
    found = decode({"!tensor": "w", "device": device}, {"w": torch.ones(3)})
    assert found.device.type == "cpu"
