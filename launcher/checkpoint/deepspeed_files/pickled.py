"""Files of `torch.save` with objects of classes that need not be installed here."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch


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


def write_torch_file(path: Path, content: object) -> int:
    """Write a new file and wait until it is on the disk; return its bytes. Raises: OSError."""
    with path.open("xb") as file:
        torch.save(content, file, pickle_module=_MODULE)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()
