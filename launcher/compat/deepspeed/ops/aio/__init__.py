"""`deepspeed.ops.aio`: disk access is the engine's, by the section "aio" of the config."""

from launcher.compat.op_builders import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
