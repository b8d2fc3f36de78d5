"""`deepspeed.zero`, which is `deepspeed.runtime.zero`."""

from launcher.zero import (
    GatheredParameters,
    Init,
    TiledLinear,
    register_external_parameter,
    unregister_external_parameter,
)

from . import partition_parameters

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "partition_parameters",
    "register_external_parameter",
    "unregister_external_parameter",
]
