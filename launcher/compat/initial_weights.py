"""Lets transformers initialise weights that are sharded.

transformers 4 initialises modules where only shards are left: a model from a config keeps the values that torch gave
it, a head that a checkpoint does not have keeps what was in memory, and an embedding with a padding index ends in an
IndexError. transformers 5 gathers what a checkpoint does not have, and also initialises modules that were loaded, whose
values it keeps: where that reads a shape, as in a ResNet, it ends in a ValueError. Here parameters are gathered for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any


def change(module: Any) -> None:
    """Have `PreTrainedModel` of the module `transformers.modeling_utils` gather what it initialises."""
    from transformers.integrations import deepspeed

    # Then rank 0 alone may initialise, of what is gathered already, and its values are sent by the caller.
    gathers_itself = hasattr(deepspeed, "initialize_weights_zero3")
    pretrained_model = module.PreTrainedModel
    initialize = pretrained_model._initialize_weights

    @functools.wraps(initialize)
    def initialize_gathered(self: Any, part: Any, *arguments: Any) -> None:
        # A model may initialise parameters of the modules in `part`, such as `part.q_proj.weight`.
        inner = [child for child in part.children() if not isinstance(child, pretrained_model)]
        params = [param for owner in (part, *inner) for param in owner.parameters(recurse=False)]
        sharded = [param for param in params if _is_sharded(param)]
        if sharded and _are_initialized((*params, *part.buffers(recurse=False))):
            part._is_hf_initialized = True
        if getattr(part, "_is_hf_initialized", False) or not sharded:
            initialize(self, part, *arguments)
            return
        from launcher.zero import GatheredParameters  # seldom needed

        with GatheredParameters(sharded, modifier_rank=None if gathers_itself else 0):
            initialize(self, part, *arguments)

    pretrained_model._initialize_weights = initialize_gathered


def _is_sharded(param: Any) -> bool:
    status = getattr(param, "ds_status", None)
    return status is not None and status.name == "NOT_AVAILABLE"


def _are_initialized(values: Iterable[Any]) -> bool:
    return all(getattr(value, "_is_hf_initialized", False) for value in values)
