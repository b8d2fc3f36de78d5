"""What scripts ask about kernels, by DeepSpeed's names. The engine's are built with its package."""

from __future__ import annotations

from typing import NoReturn

from launcher.base.errors import EngineError
from launcher.comm.accelerator import accelerator_type


class OpBuilder:
    """Says whether what a kernel of DeepSpeed does works on this machine; without one, torch's own code serves."""

    NAME = ""
    NEEDS_ACCELERATOR = False

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether it works here. verbose: part of DeepSpeed's signature."""
        return not self.NEEDS_ACCELERATOR or accelerator_type() is not None

    def load(self, verbose: bool = True) -> NoReturn:
        """Refuse. Raises: EngineError."""
        raise EngineError(
            f'{type(self).__name__}().load(): the kernel "{self.NAME}" is part of the engine and has no module',
            hint="give the optimizer to deepspeed.initialize(), which uses it",
        )


class AsyncIOBuilder(OpBuilder):
    """Disk access beside computing."""

    NAME = "async_io"


class CPUAdamBuilder(OpBuilder):
    """Adam on the CPU."""

    NAME = "cpu_adam"


class CPUAdagradBuilder(OpBuilder):
    """Adagrad on the CPU."""

    NAME = "cpu_adagrad"


class CPULionBuilder(OpBuilder):
    """Lion on the CPU."""

    NAME = "cpu_lion"


class FusedAdamBuilder(OpBuilder):
    """Adam on the GPU."""

    NAME, NEEDS_ACCELERATOR = "fused_adam", True


class FusedLambBuilder(OpBuilder):
    """LAMB on the GPU."""

    NAME, NEEDS_ACCELERATOR = "fused_lamb", True


class FusedLionBuilder(OpBuilder):
    """Lion on the GPU."""

    NAME, NEEDS_ACCELERATOR = "fused_lion", True


_BUILDERS = (
    AsyncIOBuilder,
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    FusedAdamBuilder,
    FusedLambBuilder,
    FusedLionBuilder,
)
ALL_OPS: dict[str, OpBuilder] = {builder.NAME: builder() for builder in _BUILDERS}
# Of each kernel whether the engine has it here: `deepspeed.ops.__compatible_ops__`.
COMPATIBLE_OPS: dict[str, bool] = {op: builder.is_compatible() for op, builder in ALL_OPS.items()}
