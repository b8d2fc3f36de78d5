"""Layer 4: activation checkpointing, what scripts call through `launcher.checkpointing`.

`checkpoint` runs a function and keeps its inputs alone; how they are kept is configured here or by the config's
`activation_checkpointing` section. The work is done by `torch.utils.checkpoint` and by hooks on what it saves.
"""

from launcher.activation.checkpointing import checkpoint, non_reentrant_checkpoint, reset
from launcher.activation.rng import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from launcher.activation.settings import configure, is_configured

__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
]
