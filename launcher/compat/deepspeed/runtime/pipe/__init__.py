"""`deepspeed.runtime.pipe`."""

from . import engine, module, topology
from .engine import PipelineEngine
from .module import LayerSpec, PipelineModule, TiedLayerSpec
from .topology import ProcessTopology

__all__ = [
    "LayerSpec",
    "PipelineEngine",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
    "engine",
    "module",
    "topology",
]
