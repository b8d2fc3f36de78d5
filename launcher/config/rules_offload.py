"""Rules between the keys of offload and the rest."""

from __future__ import annotations

from launcher.config.fields import AUTO, shown
from launcher.config.positions import Path
from launcher.config.rules import Problem
from launcher.config.schema import Config
from launcher.config.schema_zero import OffloadOptimizer, OffloadParam

# Types whose step the engine's own kernels take, range by range as a disk delivers them.
KERNEL_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "SGD")


def offload_problems(config: Config) -> list[Problem]:
    """Return what cannot be offloaded as asked for."""
    zero = config.zero_optimization
    problems: list[Problem] = []
    for name, old, stages in (
        ("offload_optimizer", zero.cpu_offload, (1, 2, 3)),
        ("offload_param", zero.cpu_offload_param, (3,)),
    ):
        section: OffloadOptimizer | OffloadParam = getattr(zero, name)
        if section.device == "none" and not old:
            continue
        path: Path = ("zero_optimization", name, "device")
        if zero.stage not in (*stages, AUTO):
            needed = "stage 3" if stages == (3,) else "stage 1, 2 or 3"
            message = f"{name} {shown(section.device)} needs {needed}, not {zero.stage}"
            problems.append((path, message, f'set "stage": {stages[-1]}, or remove {name}'))
        if section.device == "nvme" and not section.nvme_path:
            hint = f'add "nvme_path" to {name}: a folder on the fast disk of each host'
            problems.append((path, f'{name} "nvme" needs a folder', hint))
    kind = config.optimizer.type if config.optimizer is not None else None
    if zero.offload_optimizer.device == "nvme" and kind is not None and kind not in KERNEL_OPTIMIZERS:
        message = f"optimizer type {kind} cannot be updated from disk"
        problems.append((("optimizer", "type"), message, f"use one of {', '.join(KERNEL_OPTIMIZERS)}"))
    return problems
