"""`deepspeed.runtime.zero.config`: the stages by their names."""

from enum import IntEnum

from launcher.config.schema_zero import ZeroOptimization as DeepSpeedZeroConfig

__all__ = ["DeepSpeedZeroConfig", "ZeroStageEnum"]


class ZeroStageEnum(IntEnum):
    """What is sharded."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
