"""`deepspeed.runtime.engine`: the class of what `initialize()` returns."""

from launcher.engine.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
