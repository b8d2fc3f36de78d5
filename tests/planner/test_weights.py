"""Checkpoints: headers are read, tensors are not, and code in a file is never run."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.base.errors import UsageError
from launcher.planner.weights import safetensors_parameters, weight_files


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write a header as the format defines it; the tensors' bytes are a hole in the file."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        numel = 1
        for size in shape:
            numel *= size
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + 4 * numel]}  # type: ignore[dict-item]
        offset += 4 * numel
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


def test_headers_of_several_files(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"x.weight": [1000, 1000], "x.bias": [1000]})
    write_safetensors(tmp_path / "b.safetensors", {"scale": []})
    index = {"metadata": {}, "weight_map": {"x.weight": "a.safetensors", "scale": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = weight_files(tmp_path)
    assert [path.name for path in files] == ["a.safetensors", "b.safetensors"]
    found = {param.name: param.numel for param in safetensors_parameters(files)}
    assert found == {"x.weight": 10**6, "x.bias": 1000, "scale": 1}


def test_safetensors_come_before_pytorch_files(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "optimizer.pt", "model.safetensors"):
        (tmp_path / name).touch()
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    assert [path.name for path in weight_files(tmp_path)] == ["pytorch_model.bin"]
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "scheduler.pt").touch()
    assert weight_files(tmp_path) == []  # which of two is the model, nobody knows


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"x": 3}}', "no weight_map"),
        ('{"weight_map": {"x": "gone.safetensors"}}', "1 of 1 files are missing: gone.safetensors"),
        ('{"weight_map": {"x": "../other.safetensors"}}', "not beside its index"),
    ],
)
def test_a_damaged_index_is_an_error(tmp_path: Path, index: str, expected: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UsageError, match=expected) as caught:
        weight_files(tmp_path)
    assert caught.value.diagnostics[0].hint


@given(st.binary(max_size=64))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_file_or_one_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    for text in (data, len(data).to_bytes(8, "little") + data):
        path.write_bytes(text)
        with contextlib.suppress(UsageError):  # any other exception fails
            safetensors_parameters([path])


@pytest.mark.parametrize("header", ["[]", "3", '{"x": 1}', '{"x": {"shape": [-1]}}', '{"x": {"shape": 3}}'])
def test_headers_that_mean_nothing(tmp_path: Path, header: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(UsageError, match="no safetensors file"):
        safetensors_parameters([path])
