"""Files of torch.save: read by ranges, refused where they are damaged or ask for code to run."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import random
import re
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.base.errors import CheckpointError
from launcher.checkpoint.formats.torch_file import CHUNK_BYTES, FileTensor, open_torch_file, plain


def bytes_read() -> int:
    """Return how many bytes this process has asked the kernel for, from files or elsewhere."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]


DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.uint16, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_is_read_whole_and_by_ranges(tmp_path: Path, dtype: torch.dtype) -> None:
    values = (torch.arange(60) % 2 if dtype == torch.bool else torch.arange(60)).to(dtype).view(5, 12)
    torch.save({"tensor": values}, tmp_path / "file.pt")

    found = open_torch_file(tmp_path / "file.pt")["tensor"]

    assert isinstance(found, FileTensor)
    assert found.load().equal(values)
    part = torch.empty(7, dtype=dtype)
    found.read(11, part)
    assert part.equal(values.view(-1)[11:18])


def test_views_of_one_memory_stay_views_and_other_orders_are_put_right(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    matrix = base.view(4, 6)
    saved = {"part": base[5:9], "turned": matrix.t(), "column": matrix[:, 2], "copy": base[5:9], "empty": base[:0]}
    torch.save(saved, tmp_path / "file.pt")

    found = open_torch_file(tmp_path / "file.pt")

    for name, value in saved.items():
        assert found[name].load().equal(value), name
    column = torch.empty(2, dtype=torch.float64)
    found["column"].read(1, column)
    assert column.tolist() == [8.0, 14.0]
    assert found["part"].shares(found["copy"])
    assert not found["part"].shares(found["column"])


def test_a_range_of_a_large_tensor_reads_little_more_than_its_bytes(tmp_path: Path) -> None:
    numel = 50_000_000  # 200 MB
    path = tmp_path / "large.pt"
    torch.save({"flat": torch.arange(numel, dtype=torch.int32), "other": torch.ones(1000)}, path)
    out = torch.empty(3 * CHUNK_BYTES // 4 + 5, dtype=torch.int32)

    before = bytes_read()
    open_torch_file(path)["flat"].read(numel - out.numel(), out)
    num_bytes = bytes_read() - before

    assert out.equal(torch.arange(numel - out.numel(), numel, dtype=torch.int32))
    assert out.nbytes <= num_bytes < out.nbytes + 100_000, num_bytes


def test_reading_converts(tmp_path: Path) -> None:
    torch.save(torch.tensor([1.5, 2.25, -3.0]), tmp_path / "file.pt")
    out = torch.empty(2, dtype=torch.bfloat16)
    open_torch_file(tmp_path / "file.pt").read(1, out)
    assert out.tolist() == [2.25, -3.0]


def test_plain_values_come_back(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    saved: dict[str, Any] = {
        "plain": [1, 2.5, "text", None, True, (1, (2,)), {3}, b"\x00\xff", complex(1, 2), 2**80],
        "ordered": OrderedDict(a=1),
        "counted": defaultdict(list, a=[1]),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "path": Path("/a/b"),
        "options": argparse.Namespace(width=3, inner=argparse.Namespace(depth=1)),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "number": numpy.float64(0.25),
        "whole": numpy.int64(-3),
        "array": numpy.arange(6, dtype=numpy.uint32).reshape(2, 3),
        "random": random.getstate(),
    }
    torch.save(saved, tmp_path / "file.pt")

    found = plain(open_torch_file(tmp_path / "file.pt"))

    assert found["plain"] == saved["plain"]
    assert found["ordered"] == {"a": 1}
    assert found["counted"] == {"a": [1]}
    assert found["size"] == (2, 3)
    assert found["dtype"] is torch.bfloat16
    assert found["device"] == "cuda:1"
    assert found["path"] == "/a/b"
    assert found["options"] == {"width": 3, "inner": {"depth": 1}}
    assert found["parameter"].equal(torch.ones(2))
    assert found["number"] == 0.25
    assert found["whole"] == -3
    assert found["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["random"] == saved["random"]


class Asks:
    """Pickles as a call."""

    def __init__(self, call: Callable[..., Any], *args: Any, state: Any = None) -> None:
        self.made = (call, args) if state is None else (call, args, state)

    def __reduce__(self) -> Any:
        return self.made


def _write(path: Path, pickled: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        for name, content in members.items():
            file.writestr(f"archive/{name}", content)
    return path


_HOSTILE = {
    "os.system": lambda mark: Asks(os.system, f"touch {mark}"),
    "builtins.eval": lambda mark: Asks(eval, f"open({mark!r}, 'w')"),
    "builtins.exec": lambda mark: [1, {"a": Asks(exec, f"open({mark!r}, 'w')")}],
    "builtins.getattr": lambda mark: Asks(getattr, os, "system"),
    "io.open": lambda mark: Asks(io.open, mark, "w"),
    "torch.serialization.load": lambda mark: Asks(torch.load, mark),
    "torch.save": lambda mark: Asks(torch.serialization.save, 1, mark),
    "pathlib.Path.touch": lambda mark: Asks(Path.touch, Path(mark)),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_a_pickle_that_asks_for_code_is_named_and_nothing_runs(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "executed"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        try:
            pickled = pickle.dumps(_HOSTILE[name](str(mark)), protocol)
        except (pickle.PicklingError, TypeError):
            continue  # older protocols cannot say this
        path = _write(tmp_path / f"file-{protocol}.pt", pickled)
        with pytest.raises(CheckpointError) as caught:
            open_torch_file(path)
        assert str(path) in str(caught.value)
        assert "nothing was executed" in str(caught.value)
    assert not mark.exists()


def test_the_error_tells_which_function_was_asked_for(tmp_path: Path) -> None:
    path = _write(tmp_path / "file.pt", b"cposix\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match=r"file\.pt: the file asks for posix\.system"):
        open_torch_file(path)


@pytest.mark.parametrize(
    "opcodes",
    [
        b"ccollections\nOrderedDict\n}S'__call__'\nNsb.",  # state for a function
        b"cargparse\nNamespace\nN}S'fields'\nNs\x86b.",  # attributes for a class
        b"ctorch\nfloat32\n(tR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n((I1\ntI0\n(I2\nt(I1\nttR.",  # a storage that is none
        b"(S'storage'\nctorch\nFloatStorage\nS'../../data'\nS'cpu'\nI4\ntQ.",
        b"\x82\x01.",  # from the registry of extensions
        b"r\xff\xff\xff\xff.",
        b"(((",
        b"",
    ],
)
def test_pickles_that_misuse_what_they_may_ask_for_are_refused(tmp_path: Path, opcodes: bytes) -> None:
    path = _write(tmp_path / "file.pt", opcodes)
    with pytest.raises(CheckpointError, match=r"file\.pt"):
        open_torch_file(path)


def test_a_tensor_beyond_its_memory_is_refused_when_read(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    tensor = b"(((S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI2\ntQI0\n(I%d\nt(I1\ntI00\nNt"
    for size in (3, 10**15):
        _write(path, b"ctorch._utils\n_rebuild_tensor_v2\n" + tensor[1:] % size + b"R.", **{"data/0": b"\0" * 8})
        found = open_torch_file(path)
        with pytest.raises(CheckpointError, match=r"file\.pt: a tensor is larger than its data"):
            found.read(size - 1, torch.empty(1))
        with pytest.raises(CheckpointError, match=r"file\.pt: a tensor is larger than its data"):
            found.load()
    repeated = b"((S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI2\ntQI0\n(I999999999999\nt(I0\ntI00\nNt"
    _write(path, b"ctorch._utils\n_rebuild_tensor_v2\n" + repeated + b"R.", **{"data/0": b"\0" * 8})
    with pytest.raises(CheckpointError, match=r"file\.pt: a tensor is larger than its data"):
        open_torch_file(path).load()


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = io.BytesIO()
    torch.save({"a": torch.arange(1000), "b": torch.ones(3)}, whole)
    content = whole.getvalue()
    for length in sorted({0, 1, 4, *range(2, len(content), 61), len(content) - 1}):
        path = tmp_path / f"{length}.pt"
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=rf"{length}\.pt: .*(missing|not one of torch\.save)"):
            open_torch_file(path)


def test_bits_that_flipped_are_refused_or_change_numbers_only(tmp_path: Path) -> None:
    whole = io.BytesIO()
    torch.save({"a": torch.arange(50), "options": argparse.Namespace(width=1), "b": [1, "x", 2.5]}, whole)
    content, path, chance = whole.getvalue(), tmp_path / "file.pt", random.Random(3)
    for _ in range(600):
        damaged = bytearray(content)
        damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        said = _refusal(path)
        assert said is None or str(path) in said


def _refusal(path: Path) -> str | None:
    try:
        plain(open_torch_file(path))
    except CheckpointError as error:
        return str(error)
    return None


def test_other_files_are_named_for_what_they_are(tmp_path: Path) -> None:
    old, compressed, foreign = (tmp_path / name for name in ("old.pt", "compressed.pt", "foreign.pt"))
    torch.save({"a": torch.ones(2)}, old, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickle.dumps([0] * 100_000))
    with zipfile.ZipFile(foreign, "w") as file:
        file.writestr("readme.txt", "hello")
    (tmp_path / "text.pt").write_text("hello")
    for name, said in {
        "old.pt": "torch's old format",
        "compressed.pt": "compressed",
        "foreign.pt": "a zip file, but not one of torch.save",
        "text.pt": "not one of torch.save",
        "none.pt": "cannot be read: No such file",
    }.items():
        with pytest.raises(CheckpointError, match=f"{re.escape(name)}: .*{said}"):
            open_torch_file(tmp_path / name)
