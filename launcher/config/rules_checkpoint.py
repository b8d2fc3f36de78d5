"""Rules between the keys of `checkpoint`."""

from __future__ import annotations

from launcher.config.fields import AUTO
from launcher.config.rules import Problem
from launcher.config.schema import Config


def checkpoint_problems(config: Config) -> list[Problem]:
    """Return which keys about checkpoints lack another one that they need."""
    section = config.checkpoint
    problems: list[Problem] = []
    if section.save_every not in (None, AUTO) and not section.folder:
        message = f"save_every {section.save_every} needs a folder to save into"
        problems.append((("checkpoint", "save_every"), message, 'add "folder" to checkpoint'))
    if section.keep_last not in (None, AUTO) and section.save_every is None:
        message = f"keep_last {section.keep_last} needs save_every: only the engine's own saves remove checkpoints"
        hint = 'add "save_every", or call `launch checkpoint prune` yourself'
        problems.append((("checkpoint", "keep_last"), message, hint))
    return problems + _kept_steps(config)


def _kept_steps(config: Config) -> list[Problem]:
    section, path = config.checkpoint, ("checkpoint", "keep_every")
    every = section.keep_every
    if every is None or every == AUTO:
        return []
    if section.keep_last is None:
        message = f"keep_every {every} has nothing to protect: without keep_last all checkpoints are kept"
        return [(path, message, 'add "keep_last", or remove keep_every')]
    saves = section.save_every
    if saves not in (None, AUTO) and every % int(saves):
        message = f"keep_every {every} is not a multiple of save_every {saves}: many of its steps are never saved"
        return [(path, message, f"use a multiple of {saves}")]
    return []
