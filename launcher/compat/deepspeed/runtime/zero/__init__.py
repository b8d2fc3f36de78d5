"""`deepspeed.zero`, which is `deepspeed.runtime.zero`."""

from launcher.zero import (
    GatheredParameters,
    Init,
    TiledLinear,
    register_external_parameter,
    unregister_external_parameter,
)

from . import config, partition_parameters, stage3, stage_1_and_2, tiling

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "config",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "tiling",
    "unregister_external_parameter",
]
