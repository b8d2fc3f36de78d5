"""What a checkpoint says about itself, without reading what it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from launcher.base.errors import CheckpointError
from launcher.checkpoint_files.manifest import Manifest, read_json, read_manifest
from launcher.checkpoint_files.place import Place


@dataclass(frozen=True)
class ParamFacts:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_trainable: bool
    unit: int  # number of the set of parameters that was sharded together
    states: tuple[str, ...]  # of the optimizer

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Summary:
    """What the manifest and the state of one checkpoint say."""

    path: Place
    manifest: Manifest
    state: Mapping[str, Any]

    @cached_property
    def params(self) -> list[ParamFacts]:
        """Its parameters, in the order of the model. Raises: CheckpointError."""
        known = self.state.get("params", {})
        try:
            return [
                ParamFacts(
                    str(param["name"]),
                    tuple(int(size) for size in (param.get("split") or param)["shape"]),
                    str(param["dtype"]),
                    bool(param["is_trainable"]),
                    number,
                    _states(known.get(param["name"], {})),
                )
                for number, unit in enumerate(self.state["units"])
                for param in unit["params"]
                if not (param.get("split") or {}).get("index")  # of parts the first one is listed, as the whole
            ]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self._unreadable("its parameters") from None

    @property
    def num_bytes(self) -> int:
        """The size of all its files."""
        return sum(record.num_bytes for record in self.manifest.files.values())

    @property
    def numel(self) -> int:
        """The elements of all its parameters."""
        return sum(param.numel for param in self.params)

    @property
    def stage(self) -> int | None:
        """The ZeRO stage of the run."""
        stage = self.state.get("stage", _inner(self._run, "config", "zero_optimization").get("stage", 0))
        return stage if isinstance(stage, int) else None

    @property
    def precision(self) -> str:
        """The type that the forward computes in; where nothing says it, the types of the parameters."""
        said = self.state.get("precision")
        if isinstance(said, str):
            return said
        return "+".join(sorted({param.dtype for param in self.params})) or "none"

    @property
    def optimizer(self) -> str | None:
        """The class of the optimizer, None where nothing was trained."""
        name = self._run.get("optimizer")
        return None if name is None else str(name)

    @property
    def counters(self) -> dict[str, int]:
        """Steps and samples."""
        names = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
        return {name: self._run[name] for name in names if isinstance(self._run.get(name), int)}

    @property
    def versions(self) -> dict[str, str]:
        """Releases of what saved it."""
        return {str(name): str(version) for name, version in _inner(self._run, "versions").items()}

    @property
    def _run(self) -> Mapping[str, Any]:
        return _inner(self.state, "run")

    def _unreadable(self, what: str) -> CheckpointError:
        return CheckpointError(f"{what} cannot be read", where=str(self.path / self.manifest.state))


def summary_of(path: Place) -> Summary:
    """Return what a checkpoint says about itself. Raises: CheckpointError where it is missing or damaged."""
    manifest = read_manifest(path)
    return Summary(path, manifest, read_json(path, manifest.state, manifest))


def _states(facts: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted({str(name) for kind in ("states", "whole", "scalars") for name in facts.get(kind, ())}))


def _inner(plain: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return an object within objects; an empty one where there is none."""
    found: Any = plain
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
