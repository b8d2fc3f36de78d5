"""`deepspeed.runtime.pipe.module`."""

from launcher.base.errors import EngineError as PipelineError
from launcher.parallel.pipeline.module import PipelineModule
from launcher.parallel.pipeline.specs import LayerSpec, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]
