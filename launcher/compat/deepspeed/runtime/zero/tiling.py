"""`deepspeed.runtime.zero.tiling`: linear layers in pieces."""

from launcher.zero import TiledLinear

__all__ = ["TiledLinear"]
