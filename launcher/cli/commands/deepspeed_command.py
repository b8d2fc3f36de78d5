"""`launch deepspeed-command`: have a command named `deepspeed` in this environment, for scripts and `accelerate`."""

from __future__ import annotations

import click

from launcher.compat import command

_EPILOG = """\b
examples:
  launch deepspeed-command install
  accelerate launch --use_deepspeed --num_processes 8 train.py
"""


@click.command("deepspeed-command", epilog=_EPILOG)
@click.argument("action", type=click.Choice(["install", "remove"]))
def deepspeed_command(action: str) -> None:
    """Install or remove a command named deepspeed, which is launch by another name.

    With it, import deepspeed finds the built-in engine in every script of this Python environment, also under
    torchrun and accelerate launch. Each node needs it in its own environment.
    """
    if action == "remove":
        removed = command.remove_command()
        click.echo("\n".join(f"removed {path}" for path in removed) or "there is none in this environment")
        return
    files = command.install_command()
    for path in files:
        click.echo(f"wrote {path}")
