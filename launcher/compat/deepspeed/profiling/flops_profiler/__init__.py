"""`deepspeed.profiling.flops_profiler`: the operations of a model by module."""

from . import profiler
from .profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile", "profiler"]
