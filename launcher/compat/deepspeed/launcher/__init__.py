"""`deepspeed.launcher`: what `accelerate launch` reads of it. `launch` is the launcher."""

from . import runner

__all__ = ["runner"]
