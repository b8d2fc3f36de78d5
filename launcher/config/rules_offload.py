"""Rules between the keys of offload and the rest."""

from __future__ import annotations

from launcher.config.fields import AUTO, shown
from launcher.config.positions import Path
from launcher.config.rules import Problem
from launcher.config.schema import Config
from launcher.config.schema_zero import OffloadOptimizer, OffloadParam

# Types whose step the engine's own kernels take, range by range as a disk delivers them.
KERNEL_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "SGD")
# Those of them whose steps ranks take together.
_COLLECTIVE = ("Lamb", "Muon")


def offload_problems(config: Config) -> list[Problem]:
    """Return what cannot be offloaded as asked for."""
    zero = config.zero_optimization
    problems: list[Problem] = []
    for name, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
        section: OffloadOptimizer | OffloadParam = getattr(zero, name)
        if section.device in ("none", AUTO):
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
    problems += _delay_problems(zero.offload_optimizer, kind)
    if zero.offload_optimizer.device == "nvme" and kind is not None and kind not in KERNEL_OPTIMIZERS:
        message = f"optimizer type {kind} cannot be updated from disk"
        problems.append((("optimizer", "type"), message, f"use one of {', '.join(KERNEL_OPTIMIZERS)}"))
    return problems


def _delay_problems(section: OffloadOptimizer, kind: str | None) -> list[Problem]:
    """Return why an update cannot be delayed. kind: the optimizer's type, None where a script brings its own."""
    if section.delayed_update is not True:
        return []
    path: Path = ("zero_optimization", "offload_optimizer", "delayed_update")
    problems: list[Problem] = []
    if section.device not in ("cpu", AUTO):
        message = f"delayed_update needs the optimizer in host memory, not {shown(section.device)}"
        problems.append((path, message, 'set "device": "cpu", or remove delayed_update'))
    if section.ratio not in (1.0, AUTO):
        message = f"delayed_update needs all of the optimizer in host memory, not {shown(section.ratio)} of it"
        problems.append((path, message, "remove ratio or delayed_update"))
    if kind is not None and (kind not in KERNEL_OPTIMIZERS or kind in _COLLECTIVE):
        possible = ", ".join(name for name in KERNEL_OPTIMIZERS if name not in _COLLECTIVE)
        problems.append((path, f"delayed_update is not possible with {kind}", f"remove it, or use {possible}"))
    return problems
