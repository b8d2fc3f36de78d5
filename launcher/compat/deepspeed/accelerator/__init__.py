"""`deepspeed.accelerator`: the device that ranks train on."""

from launcher.compat.accelerator import Accelerator, get_accelerator

__all__ = ["Accelerator", "get_accelerator"]
