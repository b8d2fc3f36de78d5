"""`deepspeed.runtime.zero.stage3`: its estimators of memory, and the class of the optimizer."""

from launcher.engine.optimizer import ZeroOptimizer as DeepSpeedZeroOptimizer_Stage3
from launcher.planner import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]
