"""Lets accelerate use the engine on a machine without accelerators.

accelerate chooses a backend of `torch.distributed` only where it finds an accelerator. For DeepSpeed on CPUs it has none
then, takes itself for a single process, and the Trainer refuses its configuration. Here it gets gloo in that case. No
other part of another library is changed by this package.
"""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

STATE_MODULE = "accelerate.state"


def spec_of_state(path: Any) -> ModuleSpec | None:
    """Return the spec of `accelerate.state` that is on the package's `path`, with a loader that adds the backend."""
    spec = PathFinder.find_spec(STATE_MODULE, path)
    if spec is not None and isinstance(spec.loader, SourceFileLoader):
        spec.loader = _StateLoader(spec.loader.name, spec.loader.path)
    return spec


class _StateLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _use_gloo_without_accelerator(module.PartialState)


def _use_gloo_without_accelerator(partial_state: Any) -> None:
    prepare_backend = partial_state._prepare_backend

    def with_gloo(self: Any, *arguments: Any, **options: Any) -> tuple[str | None, Any]:
        backend, distributed_type = prepare_backend(self, *arguments, **options)
        is_rank = os.environ.get("LOCAL_RANK", "-1") != "-1"
        if backend is None and is_rank and os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
            backend = "gloo"
        return backend, distributed_type

    partial_state._prepare_backend = with_gloo
