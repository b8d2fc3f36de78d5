"""`deepspeed.runtime.sequence_parallel.ulysses_sp`: what accelerate and transformers use of it."""

from __future__ import annotations

from typing import NoReturn

from launcher.compat.ulysses import SequenceLoader as UlyssesSPDataLoaderAdapter
from launcher.compat.ulysses import register_with_transformers

__all__ = ["UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"]


class UlyssesSPAttentionHF:
    """Attention of transformers on parts of sequences; the engine puts it into the model."""

    register_with_transformers = staticmethod(register_with_transformers)


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(
        f"the built-in engine has no {name}: it has UlyssesSPAttentionHF and UlyssesSPDataLoaderAdapter; for memory,"
        " recompute activations, or install DeepSpeed",
        name=__name__,
    )
