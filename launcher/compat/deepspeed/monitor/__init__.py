"""`deepspeed.monitor`: training curves of the script's own."""

from . import config, monitor

__all__ = ["config", "monitor"]
