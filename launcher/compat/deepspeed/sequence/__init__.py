"""`deepspeed.sequence`: attention and losses of models whose ranks have parts of sequences."""

from . import cross_entropy, layer

__all__ = ["cross_entropy", "layer"]
