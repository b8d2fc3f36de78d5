"""`deepspeed.ops`: optimizers that scripts make themselves and the engine takes over."""

from __future__ import annotations

from . import adagrad, adam, aio, lamb, lion, op_builder

__all__ = ["__compatible_ops__", "adagrad", "adam", "aio", "lamb", "lion", "op_builder"]

__compatible_ops__: dict[str, bool]  # of each kernel whether the engine has it here; see `__getattr__`


def __getattr__(name: str) -> dict[str, bool]:
    if name != "__compatible_ops__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return {op: builder.is_compatible() for op, builder in op_builder.ALL_OPS.items()}
