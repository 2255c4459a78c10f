"""What cannot be kept is refused by its path; what no encoder writes is damage, no more."""

import collections
import dataclasses
import typing

import numpy
import pytest
import torch

from forge.checkpoint.format.decoding import decode
from forge.checkpoint.store import Store
from forge.config.schema import OnPendingSave
from forge.errors import CheckpointError, DamagedCheckpoint

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*beta state:UserWarning",
    "ignore:.*[Qq]uantiz",
    "ignore:.*nested tensors:UserWarning",
    "ignore:Sparse invariant checks:UserWarning",
)


class Pair(typing.NamedTuple):
    left: object
    right: object


@dataclasses.dataclass
class Record:
    a: int = 1


def ring(kind):
    if kind is list:
        value = []
        value.append({"x": value})
    else:
        value = {}
        value["x"] = [value]
    return value


def with_attribute():
    ordered = collections.OrderedDict(a=1)
    ordered.note = "x"
    return ordered


class Keyed(dict):
    pass


class Text(str):
    pass


REFUSED = {
    "list that holds itself": lambda: ring(list),
    "dict that holds itself": lambda: ring(dict),
    "dataclass": Record,
    "dataclass's class": lambda: Record,
    "namedtuple": lambda: Pair(1, 2),
    "enum": lambda: OnPendingSave.wait,
    "subclass of dict": Keyed,
    "subclass of str": lambda: Text("x"),
    "key of a subclass of str": lambda: {Text("x"): 1},
    "key that is a tensor": lambda: {torch.ones(1): 1},
    "ordered dict with attributes": with_attribute,
    "object in a tuple": lambda: (1, object()),
    "torch's named tuple": lambda: torch.ones(2, 2).max(0),
    "array of objects": lambda: numpy.array([None]),
    "structure with objects": lambda: numpy.zeros(1, dtype=[("a", "O")]),
    "structure": lambda: numpy.zeros(1, dtype=[("a", "i4"), ("b", "f8")]),
    "raw": lambda: numpy.zeros(1, dtype="V2"),
    "structure with gaps": lambda: numpy.zeros(1, dtype=numpy.dtype("u1,f8", align=True)),
    "records": lambda: numpy.rec.array([(1, 2.0)]),
    "matrix": lambda: numpy.zeros((1, 1)).view(type("Own", (numpy.ndarray,), {})),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "mkldnn": lambda: torch.ones(2, 2).to_mkldnn(),
    "sparse and meta": lambda: torch.eye(2).to_sparse().to("meta"),
    "shell dtype": lambda: torch.zeros(2, dtype=torch.uint8).view(torch.uint3),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "complex32": lambda: torch.zeros(2, dtype=torch.int32).view(torch.complex32),
    "float8 of AMD": lambda: torch.zeros(2, dtype=torch.float8_e4m3fnuz),
    "bits": lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8
    ),
    "memory format": lambda: torch.channels_last,
    "slice": lambda: slice(1),
    "range": lambda: range(3),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_kept_exactly_is_refused_by_its_path(kind):
    """At the start, with the leaf's path, and never by another error than CheckpointError."""
    state = {"model": [0, {"it": REFUSED[kind]()}]}
    with pytest.raises(CheckpointError, match=r"^model\[1\]\.it[^:]*: .*cannot (be saved|save)"):
        Store.check_savable(state)


# -- what no encoder writes ------------------------------------------------------------------------

HOSTILE = {
    "indices outside": {
        "!sparse": [[1], False],
        "parts": {"indices": {"!tensor": "far"}, "values": {"!tensor": "one"}},
    },
    "no parts": {"!sparse": [[1], False], "parts": {}},
    "strides that ask for memory": {"!tensor": "two", "stride": [1 << 45]},
    "strides that overlap": {"!tensor": "two", "stride": [0]},
    "an array of objects": {"!ndarray": ["|O", [1]], "bytes": {"!tensor": "eight"}},
    "an array larger than its bytes": {
        "!ndarray": ["<f8", [1 << 40]],
        "bytes": {"!tensor": "eight"},
    },
    "a scalar that is an object": {"!numpy_scalar": ["|O", "AAAAAAAAAAA="]},
    "a lazy module": {"!dtype": "_dynamo"},
    "unhashable": {"!set": [[]]},
    "deep": None,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_no_encoder_writes_is_damage(kind):
    """Whoever can write to the directory must gain nothing by it: no memory, no code, no crash."""
    tensors = {
        "far": torch.tensor([[9]]),
        "one": torch.ones(1),
        "two": torch.zeros(2, dtype=torch.uint8),
        "eight": torch.zeros(8, dtype=torch.uint8),
    }
    value = HOSTILE[kind] if kind != "deep" else jsonlike(3000)
    with pytest.raises(DamagedCheckpoint):
        decode(value, tensors)


def jsonlike(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value
