"""`deepspeed.runtime.zero.partition_parameters`: what libraries read there, and what they replace for a while."""

from __future__ import annotations

from collections.abc import Callable

import torch

from launcher.compat.accelerator import get_accelerator
from launcher.zero import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "get_accelerator",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    constructor: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype
) -> Callable[..., torch.Tensor]:
    """Return `constructor`: `Init` converts parameters once they are built, and replaces no constructor of torch.

    transformers replaces this function while it builds a model, so that `torch.arange` keeps its type; it does here.
    """
    del target_fp_dtype
    return constructor
