"""`deepspeed.pipe`: models as lists of layers for pipeline parallelism."""

from launcher.parallel.pipeline.module import PipelineModule
from launcher.parallel.pipeline.specs import LayerSpec, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
