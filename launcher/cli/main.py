"""The `launch` command: which subcommand a line means, and the one place where errors become exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

from launcher import __version__
from launcher.base.errors import ExitCode, LauncherError
from launcher.cli import streams

# Subcommand -> where it is defined. Loaded when used, so that none pays for another's imports.
_COMMANDS = {
    "run": "launcher.cli.run:run",
    "stacks": "launcher.cli.stacks:stacks",
    "config": "launcher.cli.config:config_group",
    "sbatch": "launcher.cli.sbatch:sbatch",
    "check": "launcher.cli.check:check",
    "exec": "launcher.cli.exec:exec_command",
    "ps": "launcher.cli.jobs:ps",
    "logs": "launcher.cli.jobs:logs",
    "kill": "launcher.cli.jobs:kill",
    "report": "launcher.cli.report:report",
    "completion": "launcher.cli.completion:completion",
}

_EPILOG = """\
examples:
  launch --num_gpus 2 train.py --deepspeed ds_config.json
  launch --hostfile hosts --include node-a@node-b:0,2 train.py
  launch --hostfile hosts --dry-run train.py
  launch config check ds_config.json
  launch sbatch --nodes 2 --gpus-per-node 8 --time 20:00:00 --submit train.py
  launch check --hostfile hosts

exit codes: the first failing rank's own (128 + signal when killed) · 2 wrong options, hostfile or config
            69 a host could not be reached or was lost · 75 saved, to be started again · 130 Ctrl-C
"""


class LaunchGroup(click.Group):
    """`launch SCRIPT` is `launch run SCRIPT`; a subcommand's name wins over a script of the same name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in _COMMANDS and args[0] not in ("--help", "-h", "--version"):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = _COMMANDS.get(cmd_name)
        if target is None:
            return None
        module_name, _, attribute = target.partition(":")
        command: Any = getattr(importlib.import_module(module_name), attribute)
        return command if isinstance(command, click.Command) else None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer commands, and what may stand behind `launch` because it may stand behind `launch run`."""
        found = super().shell_complete(ctx, incomplete)
        run = self.get_command(ctx, "run")
        if run is not None:
            run_context = click.Context(run, info_name="run", parent=ctx)
            found += [item for item in run.shell_complete(run_context, incomplete) if item.value != "--help"]
        return found if incomplete.startswith("-") else [*found, CompletionItem(incomplete, type="file")]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the options of `run`, which is what a user types, then the other commands."""
        run = self.get_command(ctx, "run")
        formatter.write_usage("launch", "[OPTIONS] SCRIPT [ARGS]...")
        if run is not None:
            run_context = click.Context(run, info_name="run", parent=ctx)
            run.format_help_text(run_context, formatter)
            run.format_options(run_context, formatter)
        self.format_commands(ctx, formatter)
        formatter.write("\n" + _EPILOG)


@click.group(
    cls=LaunchGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="launch", message="%(prog)s %(version)s")
def cli() -> None:
    """Start PyTorch jobs on one machine or on many."""


def _show(error: LauncherError) -> None:
    from launcher.cli import render  # costs what a command that ends well should not pay

    render.show_error(error)


def main() -> None:
    """Run the command line and exit. Every error a user can cause ends here as text, without a traceback."""
    streams.open_missing()
    try:
        code = cli.main(prog_name="launch", standalone_mode=False)
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        code = ExitCode.INTERRUPTED
    except LauncherError as error:
        _show(error)
        code = error.exit_code
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:
        streams.silence_all()  # the reader of our output has gone (`launch ... | head`)
        code = 128 + 13
    except OSError as error:
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None
        _show(LauncherError(error.strerror or str(error), where=where))
        streams.silence_all()  # it may be standard output that failed
        code = ExitCode.FAILURE
    sys.exit(int(code) if isinstance(code, int) else 0)
