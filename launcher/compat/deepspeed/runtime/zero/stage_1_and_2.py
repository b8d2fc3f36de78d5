"""`deepspeed.runtime.zero.stage_1_and_2`: its estimators of memory, and the class of the optimizer."""

from launcher.engine.optimizer import ZeroOptimizer as DeepSpeedZeroOptimizer
from launcher.planner import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]
