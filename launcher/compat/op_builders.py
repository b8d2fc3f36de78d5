"""What scripts ask about kernels, by DeepSpeed's names. The engine's are built with its package."""

from __future__ import annotations

from typing import NoReturn

import torch

from launcher.base.errors import EngineError
from launcher.comm.device import accelerator_type


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
    """Adam of one kernel; on the CPU the CPU's."""

    NAME = "fused_adam"


class FusedLambBuilder(OpBuilder):
    """LAMB on the GPU."""

    NAME, NEEDS_ACCELERATOR = "fused_lamb", True


class FusedLionBuilder(OpBuilder):
    """Lion on the GPU."""

    NAME, NEEDS_ACCELERATOR = "fused_lion", True


class NotImplementedBuilder(OpBuilder):
    """A kernel that the engine has nowhere."""

    NAME = "deepspeed_not_implemented"

    def is_compatible(self, verbose: bool = False) -> bool:
        """It works nowhere. verbose: part of DeepSpeed's signature."""
        return False

    def load(self, verbose: bool = True) -> NoReturn:
        """Refuse. Raises: EngineError."""
        raise EngineError("the built-in engine has no such kernel", hint="use torch's own functions")


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
COMPATIBLE_OPS: dict[str, bool] = {
    builder.NAME: builder.is_compatible() for builder in (*ALL_OPS.values(), NotImplementedBuilder())
}


def _built_for(version: str | None) -> str:
    return ".".join((version or "0.0").split(".")[:2])


# Which torch this is, and what it was built for: `deepspeed.git_version_info.torch_info`. No device is asked.
TORCH_INFO: dict[str, str | bool] = {
    "version": _built_for(torch.__version__),
    "cuda_version": _built_for(torch.version.cuda),
    "hip_version": _built_for(torch.version.hip),
    "nccl_version": "0.0" if torch.version.cuda is None else ".".join(map(str, torch.cuda.nccl.version()[:2])),
    "bf16_support": int(_built_for(torch.version.cuda).split(".")[0]) >= 11,
}
