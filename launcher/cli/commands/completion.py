"""`launch completion`: the lines that teach a shell to complete `launch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMPLETE_VARIABLE = "_LAUNCH_COMPLETE"  # the name click derives from "launch"; the shell sets it for one call
_EPILOG = """\b
put this into your shell's start-up file:
  bash  eval "$(launch completion bash)"
  zsh   eval "$(launch completion zsh)"
  fish  launch completion fish | source
"""


def files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the names of files: for arguments that are another program's."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


@click.command("completion", epilog=_EPILOG, short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes options, commands and job ids in SHELL."""
    from click.shell_completion import get_completion_class

    from launcher.cli.main import cli  # it knows this command, so that the import must wait

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click has no completion for {shell}")
    click.echo(kind(cli, {}, "launch", COMPLETE_VARIABLE).source())
