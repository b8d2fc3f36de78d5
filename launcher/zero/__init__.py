"""ZeRO: models that are sharded as they are built, access to sharded parameters, leaf modules, tiled layers.

Names are loaded when they are touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Public name -> module that defines it.
_NAMES = {
    "GatheredParameters": "gathered",
    "Init": "construct",
    "TiledLinear": "tiling",
    "ZeroParamStatus": "parameters",
    "tile_large_layers": "tiling",
    **dict.fromkeys(
        (
            "get_z3_leaf_modules",
            "register_external_parameter",
            "set_z3_leaf_module",
            "set_z3_leaf_modules",
            "unregister_external_parameter",
            "unset_z3_leaf_modules",
            "z3_leaf_module",
        ),
        "leaves",
    ),
    **{
        f"safe_{verb}_{extent}_{what}": "access"
        for verb in ("get", "set")
        for extent in ("full", "local")
        for what in ("fp32_param", "grad", "optimizer_state")
    },
}
__all__ = sorted(_NAMES)

if TYPE_CHECKING:
    from launcher.zero.access import safe_get_full_fp32_param as safe_get_full_fp32_param
    from launcher.zero.access import safe_get_full_grad as safe_get_full_grad
    from launcher.zero.access import safe_get_full_optimizer_state as safe_get_full_optimizer_state
    from launcher.zero.access import safe_get_local_fp32_param as safe_get_local_fp32_param
    from launcher.zero.access import safe_get_local_grad as safe_get_local_grad
    from launcher.zero.access import safe_get_local_optimizer_state as safe_get_local_optimizer_state
    from launcher.zero.access import safe_set_full_fp32_param as safe_set_full_fp32_param
    from launcher.zero.access import safe_set_full_grad as safe_set_full_grad
    from launcher.zero.access import safe_set_full_optimizer_state as safe_set_full_optimizer_state
    from launcher.zero.access import safe_set_local_fp32_param as safe_set_local_fp32_param
    from launcher.zero.access import safe_set_local_grad as safe_set_local_grad
    from launcher.zero.access import safe_set_local_optimizer_state as safe_set_local_optimizer_state
    from launcher.zero.construct import Init as Init
    from launcher.zero.gathered import GatheredParameters as GatheredParameters
    from launcher.zero.leaves import get_z3_leaf_modules as get_z3_leaf_modules
    from launcher.zero.leaves import register_external_parameter as register_external_parameter
    from launcher.zero.leaves import set_z3_leaf_module as set_z3_leaf_module
    from launcher.zero.leaves import set_z3_leaf_modules as set_z3_leaf_modules
    from launcher.zero.leaves import unregister_external_parameter as unregister_external_parameter
    from launcher.zero.leaves import unset_z3_leaf_modules as unset_z3_leaf_modules
    from launcher.zero.leaves import z3_leaf_module as z3_leaf_module
    from launcher.zero.parameters import ZeroParamStatus as ZeroParamStatus
    from launcher.zero.tiling import TiledLinear as TiledLinear
    from launcher.zero.tiling import tile_large_layers as tile_large_layers


def __getattr__(name: str) -> Any:
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'launcher.zero' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"launcher.zero.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_NAMES))
