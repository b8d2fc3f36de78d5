"""`deepspeed.runtime.pipe.engine`."""

from launcher.engine.pipeline import PipelineEngine

__all__ = ["PipelineEngine"]
