"""Files of `torch.save` with objects of classes that need not be installed here."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import torch
import xxhash


@dataclass(frozen=True)
class Foreign:
    """An object of a class that is only known by name. Whoever reads the file imports the class."""

    module: str
    name: str
    fields: Mapping[str, Any]


class _Pickler(pickle._Pickler):  # the one in C looks a class up where it writes its name
    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)

    def save_foreign(self, value: Foreign) -> None:
        write, save = self.write, self.save  # type: ignore[attr-defined]  # typeshed leaves them out
        write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        save(dict(value.fields))
        write(pickle.BUILD)

    dispatch[Foreign] = save_foreign


_MODULE = SimpleNamespace(__name__="pickle", Pickler=_Pickler)


class _Summed:
    """A file that is written front to back, and its checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self.num_bytes = 0

    def write(self, data: bytes) -> int:
        """Write some bytes; return how many."""
        self._hash.update(data)
        num_bytes = self._file.write(data)
        self.num_bytes += num_bytes
        return num_bytes

    def flush(self) -> None:
        """Hand over to the kernel what has been written."""
        self._file.flush()

    @property
    def checksum(self) -> str:
        """As `digest_of` has it."""
        return self._hash.hexdigest()


def write_torch_file(path: Path, content: object) -> tuple[int, str]:
    """Write a new file and wait until it is on the disk; return its bytes and checksum. Raises: OSError."""
    with path.open("xb") as file:
        summed = _Summed(file)
        torch.save(content, summed, pickle_module=_MODULE)  # type: ignore[arg-type]  # it needs no more of a file
        file.flush()
        os.fsync(file.fileno())
        return summed.num_bytes, summed.checksum
