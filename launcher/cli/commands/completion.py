"""`launch completion`: the lines that teach a shell to complete `launch`."""

from __future__ import annotations

import click

COMPLETE_VARIABLE = "_LAUNCH_COMPLETE"  # the name click derives from "launch"; the shell sets it for one call
_EPILOG = """\b
put this into your shell's start-up file:
  bash  eval "$(launch completion bash)"
  zsh   eval "$(launch completion zsh)"
  fish  launch completion fish | source
"""


@click.command("completion", epilog=_EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, /, shell: str) -> None:
    """Print the script that completes options, commands and job ids in SHELL."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click has no completion for {shell}")
    click.echo(kind(ctx.find_root().command, {}, "launch", COMPLETE_VARIABLE).source())
