"""`deepspeed.ops`: optimizers that scripts make themselves and the engine takes over."""

from . import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
