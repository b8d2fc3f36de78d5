"""Python values survive a checkpoint with their types, and what is not data is refused at its place."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import datetime
import enum
import json
import logging
import math
import pathlib
import pickle
import random
import re
import struct
import sys
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from launcher.base.errors import CheckpointError
from launcher.checkpoint.values.tree import _MAPPINGS, _READERS, _SEQUENCES, MAX_DEPTH, Pickled, decode, encode


def round_trip(value: Any) -> Any:
    plain, tensors = encode(value, "it")
    # Written as strict JSON in UTF-8, as a file would be.
    text = json.dumps(plain, allow_nan=False, ensure_ascii=False).encode()
    return decode(json.loads(text), tensors)


def is_same(one: Any, other: Any) -> bool:
    """Tell whether two values are equal bit by bit and of the same types, dicts in the same order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return is_same(one.real, other.real) and is_same(one.imag, other.imag)
    if isinstance(one, Tensor):
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if isinstance(one, numpy.ndarray | numpy.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, set | frozenset):
        return len(one) == len(other) and all(any(is_same(item, twin) for twin in other) for item in one)
    if isinstance(one, Mapping):
        return is_same(list(one.items()), list(other.items()))
    if isinstance(one, argparse.Namespace | SimpleNamespace):
        return is_same(vars(one), vars(other))
    if isinstance(one, datetime.datetime):
        return (one, one.fold, one.tzname()) == (other, other.fold, other.tzname())
    return bool(one == other)


SIZES = st.lists(st.integers(0, 4), max_size=3)
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.uint32,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
RARE = (torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16)
ARRAYS = ("|b1", "<i4", ">u2", "<f8", ">f4", "<c16", "<U3", "|S5", "<M8[ns]", "<m8[s]")


@st.composite
def tensors_of_any_type(draw: st.DrawFn) -> Tensor:
    shape, dtype = draw(SIZES), draw(st.sampled_from(DTYPES + RARE))
    width = dtype.itemsize
    numel = math.prod(shape)
    raw = draw(st.binary(min_size=numel * width, max_size=numel * width))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    shape, dtype = draw(SIZES), numpy.dtype(draw(st.sampled_from(ARRAYS)))
    if dtype.kind == "U":
        return numpy.full(shape, draw(st.text(st.characters(codec="utf-8"), max_size=3)), dtype)
    numel = math.prod(shape)
    raw = draw(st.binary(min_size=numel * dtype.itemsize, max_size=numel * dtype.itemsize))
    if dtype.kind == "b":
        raw = bytes(byte & 1 for byte in raw)
    return numpy.ndarray(shape, dtype, bytearray(raw))


ZONES = st.one_of(
    st.none(),
    st.just(datetime.timezone.utc),
    st.builds(datetime.timezone, st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23))),
    st.builds(datetime.timezone, st.just(datetime.timedelta(hours=2)), st.just("CEST")),
)
HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**62, max_value=2**200).map(lambda value: -value),
    st.floats(),
    st.sampled_from([-0.0, 5e-324, math.inf, -math.inf]),
    st.complex_numbers(),
    st.text(st.characters(), max_size=5),  # lone surrogates as well
    st.sampled_from(["$", "of", "\ud800\udc00", "\x00"]),
    st.binary(max_size=300),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 0, 3])]
    ),
    st.sampled_from([pathlib.Path("/a/b"), pathlib.PureWindowsPath("c:/x"), pathlib.PurePosixPath("\udcff")]),
    st.dates(),
    st.timedeltas(),
    st.datetimes(timezones=ZONES),
    st.sampled_from([numpy.float64(0.1), numpy.int8(3), numpy.bool_(True), numpy.str_("a\0"), numpy.bytes_(b"")]),
)
NAMESPACES = st.sampled_from([argparse.Namespace, SimpleNamespace])


def with_fields(kind: type[Any], fields: dict[str, Any]) -> Any:
    value = kind()
    vars(value).update(fields)
    return value


KEYS = st.recursive(
    HASHABLE, lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=2)), max_leaves=3
)
VALUES = st.recursive(
    st.one_of(KEYS, tensors_of_any_type(), arrays()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(collections.Counter),
        st.builds(with_fields, NAMESPACES, st.dictionaries(st.text(max_size=3), inner, max_size=3)),
        st.sets(KEYS, max_size=3),
    ),
    max_leaves=12,
)


@given(VALUES)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_value_comes_back_as_it_was(value: Any) -> None:
    assert is_same(round_trip(value), value)


def test_a_not_a_number_keeps_its_bits() -> None:
    value = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    assert struct.pack(">d", round_trip(value)).hex() == "fff8000000000123"


def test_a_plain_dict_is_plain_json() -> None:
    value = {"epoch": 3, "loss": 0.25, "names": ["a", None, True]}
    assert encode(value, "client_state") == (value, {})


def test_large_integers_of_any_length_come_back() -> None:
    value = -(7**20_000)  # more digits than Python reads as a decimal number
    assert round_trip(value) == value


def test_views_are_saved_without_their_storage_and_parameters_as_tensors() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    back = round_trip({"view": whole.t()[1:], "param": nn.Parameter(whole), "conjugate": torch.tensor([1 + 2j]).conj()})
    assert torch.equal(back["view"], whole.t()[1:])
    assert type(back["param"]) is Tensor
    assert not back["param"].requires_grad
    assert torch.equal(back["conjugate"], torch.tensor([1 - 2j]))


def test_keys_of_two_trees_differ() -> None:
    _, one = encode(torch.ones(1), "client_state")
    _, other = encode(torch.ones(1), "lr_scheduler")
    assert not one.keys() & other.keys()


def schedules(optimizer: torch.optim.Optimizer) -> list[Any]:
    lr = torch.optim.lr_scheduler
    return [
        lr.StepLR(optimizer, 2),
        lr.MultiStepLR(optimizer, [1, 1, 4]),
        lr.OneCycleLR(optimizer, max_lr=0.1, total_steps=9),
        lr.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False),
        lr.CosineAnnealingWarmRestarts(optimizer, 3),
        lr.ReduceLROnPlateau(optimizer),
        lr.LambdaLR(optimizer, lambda step: 1.0 / (step + 1)),
        lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer), lr.PolynomialLR(optimizer)], [3]),
    ]


def test_state_dicts_of_torch_s_schedules_and_optimizers_come_back() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([param], lr=torch.tensor(0.1), betas=(0.9, 0.99))
    param.sum().backward()
    optimizer.step()
    assert is_same(round_trip(optimizer.state_dict()), optimizer.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedules warn of steps without an optimizer's
        for schedule in schedules(torch.optim.SGD([param], lr=0.1)):
            state = schedule.state_dict()
            assert is_same(round_trip(state), state), type(schedule)


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


class Point(NamedTuple):
    x: int


class Words(list[str]):
    pass


@pytest.mark.parametrize(
    ("value", "message", "hint"),
    [
        (Words, "type cannot be saved", "no code"),
        (logging.Logger("x"), r"a logging\.Logger cannot be saved", r"vars\(value\)"),
        (Colour.RED, "Colour cannot be saved", r"\.value"),
        (Settings(), "Settings cannot be saved", "asdict"),
        (Point(1), "Point cannot be saved", "_asdict"),
        (Words(), "Words cannot be saved", r"list\(value\)"),
        (collections.defaultdict(list), r"collections\.defaultdict cannot", r"dict\(value\)"),
        (bytearray(b"x"), "a bytearray cannot", r"bytes\(value\)"),
        (print, "builtin_function_or_method cannot", "no code"),
        (nn.Linear(1, 1), "Linear cannot", "state_dict"),
        (random.Random(1), "Random cannot", "save"),
        (numpy.array([None]), "dtype object cannot", "lists"),
        (numpy.zeros(1, [("a", "i4")]), "numpy array of dtype", "columns"),
        (torch.ones(2, 2).to_sparse(), "sparse", "to_dense"),
        (torch.ones(2, device="meta"), "meta", ""),
    ],
)
def test_what_is_no_data_is_refused_at_its_place(value: Any, message: str, hint: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        encode({"args": [0, {(1, 2): value}]}, "client_state")
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.where == 'client_state["args"][1][(1, 2)]'
    assert diagnostic.hint is not None
    assert re.search(hint, diagnostic.hint)


def test_what_is_no_data_is_pickled_where_that_was_asked_for_and_nowhere_read_unasked() -> None:
    value = {"args": [Settings(0.5), torch.ones(2)], "words": Words(["a"])}
    plain, tensors = encode(value, "it", pickles=True)
    again = decode(json.loads(json.dumps(plain)), tensors, unpickle=pickle.loads)
    assert (again["args"][0], again["words"], type(again["words"])) == (Settings(0.5), ["a"], Words)
    unread = decode(plain, tensors)
    assert is_same(unread["args"][1], torch.ones(2))
    assert type(unread["words"]) is type(copy.deepcopy(unread)["words"]) is Pickled
    assert pickle.loads(pickle.dumps(unread))["words"] == ["a"]  # as a file for DeepSpeed has it
    assert decode(*encode(unread, "it"), unpickle=pickle.loads)["words"] == ["a"]  # a tool writes what it has read
    with pytest.raises(CheckpointError, match="function cannot be pickled") as caught:
        encode({"hook": lambda: 0}, "it", pickles=True)
    assert caught.value.diagnostics[0].where == 'it["hook"]'


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = [1]
    value.append({"again": value})
    with pytest.raises(CheckpointError, match="contains itself") as caught:
        encode(value, "client_state")
    assert caught.value.diagnostics[0].where == 'client_state[1]["again"]'


def test_deep_values_work_up_to_the_limit_and_are_refused_beyond() -> None:
    value: Any = 1j
    for depth in range(MAX_DEPTH):
        value = {depth: value}
    assert round_trip(value) == value
    with pytest.raises(CheckpointError, match="nested deeper"):
        encode([value], "it")


def described(kind: Any, payload: Any) -> dict[str, Any]:
    return {"$": kind, "of": payload}


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


TENSOR = {"it/0": torch.arange(8, dtype=torch.uint8), "it/1": torch.zeros(2, 3)}


@pytest.mark.parametrize(
    "plain",
    [
        nested(5000),
        described("os.system", "true"),
        described(["tuple"], []),
        {"$": "tuple"},
        {"$": "tuple", "of": [], "more": 1},
        described("tuple", "abc"),
        described("set", [[1]]),
        described("dict", [[[1], 2]]),
        described("dict", [[1]]),
        described("Counter", [1]),
        described("int", 5),
        described("int", "0xzz"),
        described("float", "00"),
        described("complex", "00"),
        described("str", "!!"),
        described("bytes", "%%"),
        described("bytes", {"key": "none"}),
        described("bytes", {"key": "it/1"}),
        described("path", ["posix", 3]),
        described("path", ["exec", "x"]),
        described("date", [2020, 13, 1]),
        described("date", [10**40, 1, 1]),
        described("timedelta", [10**40, 0, 0]),
        described("datetime", [[2020, 1, 1], 7, None, None]),
        described("datetime", [[2020, 1, 1, 0, 0, 0, 0], 0, [5, 0, 0], None]),
        described("torch.dtype", "_dynamo"),
        described("torch.dtype", ["float32"]),
        described("torch.device", "printer:3"),
        described("torch.Size", ["1"]),
        described("tensor", {"key": "it/9", "dtype": "float32", "shape": [1]}),
        described("tensor", {"key": "it/1", "dtype": "float32", "shape": [3, 2]}),
        described("tensor", {"key": "it/1", "dtype": "float64", "shape": [2, 3]}),
        described("tensor", {"key": "it/1", "dtype": "float32", "shape": [10**12]}),
        described("tensor", {"key": "it/0", "dtype": "complex64", "shape": [10**18]}),
        described("tensor", {"key": "it/0", "dtype": "complex64", "shape": [-1]}),
        described("tensor", {"key": "it/0", "dtype": "complex128", "shape": [1]}),
        described("tensor", {"key": "it/0", "dtype": "complex64", "shape": [True]}),
        described("tensor", {"key": ["it/0"], "dtype": "complex64", "shape": [1]}),
        described("tensor", "it/0"),
        [described("bytes", {"key": "it/0"}), described("bytes", {"key": "it/0"})],
        described("numpy.ndarray", {"key": "it/0", "dtype": "|O", "shape": [1]}),
        described("numpy.ndarray", {"key": "it/0", "dtype": "O8", "shape": [1]}),
        described("numpy.ndarray", {"key": "it/0", "dtype": "<i8", "shape": [10**15]}),
        described("numpy.ndarray", {"key": "it/0", "dtype": "<i8", "shape": [0, 10**40]}),
        described("numpy.ndarray", {"key": "it/0", "dtype": "<U999999999", "shape": [1]}),
        described("numpy.ndarray", {"key": "it/0", "dtype": "<M8[zz]", "shape": [1]}),
        described("numpy.scalar", ["<f8", "00"]),
        described("numpy.scalar", ["<U999999999", "00"]),
        described("numpy.str", 3),
        object(),
    ],
    ids=lambda value: "deep" if isinstance(value, list) and len(value) == 1 else None,
)
def test_damaged_values_are_refused(plain: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^state\.json client_state"):
        decode(plain, TENSOR, "state.json client_state")


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=4),
        st.sampled_from(["it/0", "<f8", "00"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["$", "of", "key", "dtype", "shape", "a"]), inner, max_size=4),
        st.builds(
            described,
            st.sampled_from(
                [*_READERS, *_SEQUENCES, *_MAPPINGS],
            ),
            inner,
        ),
    ),
    max_leaves=10,
)


@given(JSON)
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_json_raises_anything_but_a_checkpoint_error(plain: Any) -> None:
    try:
        decode(plain, TENSOR)
    except CheckpointError:
        return


def test_without_numpy_an_array_is_refused_and_the_rest_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, tensors = encode([numpy.ones(2)], "it")
    long_bytes, their_tensors = encode(b"x" * 1000, "it")
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(CheckpointError, match="numpy is not installed"):
        decode(plain, tensors)
    assert decode(long_bytes, their_tensors) == b"x" * 1000
