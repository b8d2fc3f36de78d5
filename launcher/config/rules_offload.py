"""Rules between the keys of offload and the rest."""

from __future__ import annotations

from launcher.config.fields import AUTO, shown
from launcher.config.positions import Path
from launcher.config.rules import Problem
from launcher.config.schema import Config
from launcher.config.schema_zero import OffloadOptimizer, OffloadParam

# Types whose step the engine's own kernels take, range by range as a disk delivers them.
KERNEL_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "MuAdam", "MuAdamW", "MuSGD", "Muon", "SGD")
# Those of them whose steps ranks take together.
_COLLECTIVE = ("Lamb", "Muon")


def offload_problems(config: Config) -> list[Problem]:
    """Return what cannot be offloaded as asked for."""
    zero = config.zero_optimization
    problems: list[Problem] = []
    for name in ("offload_optimizer", "offload_param"):
        section: OffloadOptimizer | OffloadParam = getattr(zero, name)
        if section.device in ("none", AUTO) or (name == "offload_param" and zero.stage not in (3, AUTO)):
            continue
        path: Path = ("zero_optimization", name, "device")
        if zero.stage == 0:
            message = f"{name} {shown(section.device)} needs stage 1, 2 or 3, not 0"
            problems.append((path, message, f'set "stage": 3, or remove {name}'))
        if section.device == "nvme" and not section.nvme_path:
            hint = f'add "nvme_path" to {name}: a folder on the fast disk of each host'
            problems.append((path, f'{name} "nvme" needs a folder', hint))
    kind = config.optimizer.type if config.optimizer is not None else None
    problems += _delay_problems(zero.offload_optimizer, kind)
    if zero.offload_optimizer.device == "nvme" and kind is not None and kind not in KERNEL_OPTIMIZERS:
        message = f"optimizer type {kind} cannot be updated from disk"
        problems.append((("optimizer", "type"), message, f"use one of {', '.join(KERNEL_OPTIMIZERS)}"))
    return problems


def unused_offload(config: Config) -> list[tuple[Path, str]]:
    """Return what is asked for without effect, together with what is offloaded or is not."""
    zero, optimizer = config.zero_optimization, config.optimizer
    found: list[tuple[Path, str]] = []
    if zero.offload_param.device not in ("none", AUTO) and zero.stage not in (3, AUTO):
        place = shown(zero.offload_param.device)
        message = f"offload_param {place} has no effect: at stage {zero.stage} every rank keeps whole parameters"
        found.append((("zero_optimization", "offload_param"), message))
    params = {} if optimizer is None or not isinstance(optimizer.params, dict) else optimizer.params  # may be "auto"
    if params.get("torch_adam") is True and updates_in_parts(config):
        message = (
            "torch_adam true has no effect: states on disk, and delayed updates, are updated in parts, which the"
            " engine's kernel does"
        )
        found.append((("optimizer", "params", "torch_adam"), message))
    return found


def updates_in_parts(config: Config) -> bool:
    """Whether optimizer states are updated as they come from a disk, or beside the next step."""
    section = config.zero_optimization.offload_optimizer
    return section.device == "nvme" or (section.device == "cpu" and section.delayed_update is True)


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
