"""Rules between the keys of `checkpoint`."""

from __future__ import annotations

from launcher.config.rules import Problem
from launcher.config.schema import Config


def checkpoint_problems(config: Config) -> list[Problem]:
    """Return which keys about checkpoints lack another one that they need."""
    section = config.checkpoint
    problems: list[Problem] = []
    save_every, keep_last = _number(section.save_every), _number(section.keep_last)
    if save_every is not None and not section.folder:
        message = f"save_every {save_every} needs a folder to save into"
        problems.append((("checkpoint", "save_every"), message, 'add "folder" to checkpoint'))
    if keep_last is not None and section.save_every is None:
        message = f"keep_last {keep_last} needs save_every: only the engine's own saves remove checkpoints"
        hint = 'add "save_every", or call `launch checkpoint prune` yourself'
        problems.append((("checkpoint", "keep_last"), message, hint))
    if section.format == "deepspeed" and section.use_node_local_storage is True:
        message = "DeepSpeed's files are made of those of all ranks, which use_node_local_storage keeps on their hosts"
        hint = "remove format, and use `launch checkpoint export --format deepspeed` on the files in one folder"
        problems.append((("checkpoint", "format"), message, hint))
    return problems + _kept_steps(config)


def _kept_steps(config: Config) -> list[Problem]:
    section, path = config.checkpoint, ("checkpoint", "keep_every")
    keep_every, save_every = _number(section.keep_every), _number(section.save_every)
    if keep_every is None:
        return []
    if section.keep_last is None:
        message = f"keep_every {keep_every} has nothing to protect: without keep_last all checkpoints are kept"
        return [(path, message, 'add "keep_last", or remove keep_every')]
    if save_every is not None and keep_every % save_every:
        message = f"keep_every {keep_every} is not a multiple of save_every {save_every}: many steps are never saved"
        return [(path, message, f"use a multiple of {save_every}")]
    return []


def _number(value: object) -> int | None:
    """Return the value of a key; None where it has none, or "auto"."""
    return value if isinstance(value, int) else None
