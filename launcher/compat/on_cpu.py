"""Lets accelerate use the engine on a machine without accelerators.

accelerate chooses a backend of `torch.distributed` only where it finds an accelerator. For DeepSpeed on CPUs it has
none then, takes itself for a single process, and the Trainer refuses its configuration. Here it gets gloo in that case.
"""

from __future__ import annotations

import os
from typing import Any


def change(module: Any) -> None:
    """Have `PartialState` of the module `accelerate.state` use gloo without an accelerator."""
    partial_state = module.PartialState
    prepare_backend = partial_state._prepare_backend

    def with_gloo(self: Any, *arguments: Any, **options: Any) -> tuple[str | None, Any]:
        backend, distributed_type = prepare_backend(self, *arguments, **options)
        is_rank = os.environ.get("LOCAL_RANK", "-1") != "-1"
        if backend is None and is_rank and os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
            backend = "gloo"
        return backend, distributed_type

    partial_state._prepare_backend = with_gloo
