"""Files of torch.save: read by ranges, refused where they are damaged or ask for code to run."""

from __future__ import annotations

import argparse
import gc
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
from unittest import mock

import pytest
import torch

from launcher.base.errors import CheckpointError
from launcher.checkpoint.formats import torch_file
from launcher.checkpoint.formats.torch_file import CHUNK_BYTES, load, open_torch_file, plain, read


def mapped_bytes() -> int:
    """Return how much of files is in this process's memory."""
    return 1024 * int(re.search(r"RssFile:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.uint16, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_is_read_whole_and_by_ranges(tmp_path: Path, dtype: torch.dtype) -> None:
    values = (torch.arange(60) % 2 if dtype == torch.bool else torch.arange(60)).to(dtype).view(5, 12)
    torch.save({"tensor": values}, tmp_path / "file.pt")

    found = open_torch_file(tmp_path / "file.pt")["tensor"]

    assert load(found).equal(values)
    part = torch.empty(7, dtype=dtype)
    read(found, 11, part)
    assert part.equal(values.view(-1)[11:18])


def test_views_of_one_memory_stay_views_and_other_orders_are_put_right(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    matrix = base.view(4, 6)
    saved = {"part": base[5:9], "turned": matrix.t(), "column": matrix[:, 2], "copy": base[5:9], "empty": base[:0]}
    torch.save(saved, tmp_path / "file.pt")

    found = open_torch_file(tmp_path / "file.pt")

    for name, value in saved.items():
        assert load(found[name]).equal(value), name
    column = torch.empty(2, dtype=torch.float64)
    read(found["column"], 1, column)
    assert column.tolist() == [8.0, 14.0]
    assert found["part"].data_ptr() == found["copy"].data_ptr()
    assert found["part"].data_ptr() != found["column"].data_ptr()


def test_a_range_of_a_large_tensor_reads_little_more_than_its_bytes_and_keeps_none(tmp_path: Path) -> None:
    numel = 50_000_000  # 200 MB
    path = tmp_path / "large.pt"
    torch.save({"flat": torch.arange(numel, dtype=torch.int32), "other": torch.ones(1000)}, path)
    expected = torch.arange(numel - 3 * CHUNK_BYTES // 4 - 5, numel, dtype=torch.int32)
    out = torch.empty_like(expected)
    read(open_torch_file(path)["other"], 0, torch.empty(1000))  # what reading takes beside the file is in memory
    gc.collect()

    before = mapped_bytes()
    found = open_torch_file(path)["flat"]
    with mock.patch.object(torch_file, "_give_back"):
        read(found, numel - out.numel(), out)
    num_bytes = mapped_bytes() - before

    assert out.equal(expected)
    assert out.nbytes - 2**20 < num_bytes < out.nbytes + 2**20, num_bytes
    read(found, numel - out.numel(), out.zero_())
    assert out.equal(expected)
    assert mapped_bytes() - before < 2**20


def test_memory_that_is_no_files_is_never_given_back(tmp_path: Path) -> None:
    values = torch.arange(3 * CHUNK_BYTES, dtype=torch.int32)
    torch.save(values.view(2, -1).t(), tmp_path / "file.pt")
    for tensor in (values, open_torch_file(tmp_path / "file.pt")):
        expected = tensor.clone()
        assert load(tensor).equal(load(tensor))
        assert tensor.equal(expected)


def test_reading_converts(tmp_path: Path) -> None:
    torch.save(torch.tensor([1.5, 2.25, -3.0]), tmp_path / "file.pt")
    out = torch.empty(2, dtype=torch.bfloat16)
    read(open_torch_file(tmp_path / "file.pt"), 1, out)
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
    assert found["device"] == torch.device("cuda", 1)
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
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")
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


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
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


def _text(value: str) -> bytes:
    """Return the opcode of a str."""
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def _tensor(shape: bytes, stride: bytes, key: str = "0") -> bytes:
    """Return the opcodes of a 1-D fp32 tensor of a storage of 8 bytes. shape, stride: opcodes of numbers."""
    storage = b"(" + _text("storage") + b"ctorch\nFloatStorage\n" + _text(key) + _text("cpu") + b"K\x02tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape + b"\x85" + stride + b"\x85\x89NtR"


ZERO, ONE, TWO, THREE, HUGE = (
    *(b"K" + bytes([number]) for number in range(4)),
    b"\x8a\x08" + (10**15).to_bytes(8, "little"),
)


@pytest.mark.parametrize(
    ("opcodes", "said"),
    [
        (b"ccollections\nOrderedDict\n}" + _text("__call__") + b"Nsb.", "Can only build"),  # state for a function
        (b"cargparse\nNamespace\nN}" + _text("fields") + b"Ns\x86b.", "Can only build"),  # attributes for a class
        (b"ctorch\nfloat32\n)R.", "not callable"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x00K\x02\x85K\x01\x85\x89NtR.", "int"),  # a storage that is none
        (_tensor(TWO, ONE, "../../data") + b".", r"data/\.\./"),
        (b"\x82\x01.", "operand 130"),  # from the registry of extensions
        (b"r\xff\xff\xff\xff.", "IndexError"),
        (b"(((", "EOFError"),
        (b"", "EOFError"),
    ],
)
def test_pickles_that_misuse_what_they_may_ask_for_are_refused(tmp_path: Path, opcodes: bytes, said: str) -> None:
    path = _write(tmp_path / "file.pt", opcodes)
    with pytest.raises(CheckpointError, match=rf"file\.pt: .*nothing was executed.*{said}"):
        open_torch_file(path)


def test_a_tensor_beyond_its_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    for size in (THREE, HUGE):
        _write(path, _tensor(size, ONE) + b".", **{"data/0": b"\0" * 8})
        with pytest.raises(CheckpointError, match=r"file\.pt: .*a tensor is larger than its data"):
            open_torch_file(path)
    repeated = open_torch_file(_write(path, _tensor(HUGE, ZERO) + b".", **{"data/0": b"\0" * 8}))
    with pytest.raises(ValueError, match="larger than its data"):
        load(repeated)
    with pytest.raises(ValueError, match="elements 1 to 3 are wanted of a tensor of 2"):
        read(open_torch_file(_write(path, _tensor(TWO, ONE) + b".", **{"data/0": b"\0" * 8})), 1, torch.empty(2))


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
