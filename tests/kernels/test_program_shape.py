"""The shape of Triton's programs: what is chosen, kept and read again. What measures is a stand-in, as is the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from launcher.kernels import program_shape
from launcher.kernels.api import Sgd
from launcher.kernels.check import SpanTypes
from launcher.kernels.program_shape import CANDIDATES, DEFAULT_SHAPE, ProgramShape, choose_shape, fastest, key_of

WIDE = ProgramShape(4096, 8)
assert WIDE in CANDIDATES


class Cache:
    """Triton's manager of the files of one key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get_file(self, name: str) -> str | None:
        return str(self.folder / name) if (self.folder / name).exists() else None

    def put(self, text: str, name: str, *, binary: bool) -> None:
        assert not binary
        (self.folder / name).write_text(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(program_shape, "_cache_manager", lambda _key: Cache(tmp_path))
    return tmp_path


def measuring(seconds: dict[ProgramShape, float | Exception], asked: list[ProgramShape]) -> Callable[..., float]:
    def measure(shape: ProgramShape) -> float:
        asked.append(shape)
        found = seconds.get(shape, 1.0)
        if isinstance(found, Exception):
            raise found
        return found

    return measure


def test_the_fastest_is_taken_and_the_default_where_the_gain_is_noise() -> None:
    assert fastest({DEFAULT_SHAPE: 1.0, WIDE: 0.9}) == WIDE
    assert fastest({DEFAULT_SHAPE: 1.0, WIDE: 0.985}) == DEFAULT_SHAPE
    assert fastest({WIDE: 5.0}) == WIDE
    assert fastest({}) == DEFAULT_SHAPE


def test_a_choice_is_measured_once_and_then_read(folder: Path) -> None:
    asked: list[ProgramShape] = []
    assert choose_shape("a1", measuring({WIDE: 0.5}, asked)) == WIDE
    assert asked == list(CANDIDATES)
    assert choose_shape("a1", measuring({}, asked)) == WIDE
    assert len(asked) == len(CANDIDATES)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"block_numel": 7, "num_warps": 4}', '{"block_numel": 1024}'])
def test_a_file_that_is_none_of_ours_is_measured_over(folder: Path, text: str) -> None:
    (folder / program_shape._FILE_NAME).write_text(text)
    asked: list[ProgramShape] = []
    for _ in range(2):
        assert choose_shape("a1", measuring({WIDE: 0.5}, asked)) == WIDE
    assert len(asked) == len(CANDIDATES)


def test_shapes_that_cannot_run_are_left_out(folder: Path) -> None:
    errors: dict[ProgramShape, float | Exception] = {shape: MemoryError() for shape in CANDIDATES[:-1]}
    assert choose_shape("a1", measuring(errors, [])) == CANDIDATES[-1]


def test_where_none_can_run_the_default_is_taken_and_nothing_kept(folder: Path) -> None:
    assert choose_shape("a1", measuring(dict.fromkeys(CANDIDATES, RuntimeError("no memory")), [])) == DEFAULT_SHAPE
    assert list(folder.iterdir()) == []


class _BrokenCache(Cache):
    """A manager of TRITON_CACHE_MANAGER, with errors of its own class."""

    class Error(Exception):
        pass

    def get_file(self, name: str) -> str | None:
        raise self.Error(name)

    def put(self, text: str, name: str, *, binary: bool) -> None:
        raise self.Error(name)


def test_the_key_tells_rules_with_and_without_states_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
    rule = Sgd(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, is_nesterov=False, is_first=False)
    keys = {key_of(rule, num_states, SpanTypes(), torch.device("cuda")) for num_states in (0, 1)}
    assert len(keys) == 2


def test_without_a_cache_a_choice_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for manager in (lambda _key: None, lambda _key: Cache(tmp_path / "missing"), lambda _key: _BrokenCache(tmp_path)):
        monkeypatch.setattr(program_shape, "_cache_manager", manager)
        assert choose_shape("a1", measuring({WIDE: 0.5}, [])) == WIDE
