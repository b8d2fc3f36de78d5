"""The `launch` command: which subcommand a line means, and the one place where errors become exit codes."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from launcher import __version__
from launcher.base.errors import LauncherError, UsageError, did_you_mean
from launcher.base.exit_codes import ExitCode
from launcher.base.signals import raise_at_interrupt
from launcher.base.units import printable
from launcher.cli.console import streams
from launcher.cli.options.command import spelled
from launcher.cli.options.hosts import DEBUGGING

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class _Lazy(NamedTuple):
    """A subcommand that is loaded when it is used, so that none pays for another's imports."""

    module: str
    attribute: str
    short_help: str  # here, so that `launch --help` loads none of them
    group: str


_JOBS, _ENGINE, _INSTALLATION = "Jobs and hosts", "Engine", "This installation"
_PACKAGE = "launcher.cli.commands"
COMMANDS = {
    "run": _Lazy(f"{_PACKAGE}.run", "run", "Run SCRIPT on every rank: what `launch SCRIPT` means.", _JOBS),
    "sbatch": _Lazy(f"{_PACKAGE}.sbatch", "sbatch", "Write, check or submit a batch script for Slurm.", _JOBS),
    "check": _Lazy(f"{_PACKAGE}.check", "check", "Check whether a job could run on the hosts.", _JOBS),
    "probe": _Lazy(f"{_PACKAGE}.probe", "probe", "Measure devices, links, collectives and disks of the hosts.", _JOBS),
    "tune": _Lazy(f"{_PACKAGE}.tune", "tune", "Try settings of a script in short runs; which is quickest.", _JOBS),
    "exec": _Lazy(f"{_PACKAGE}.exec", "exec_command", "Run a command on all hosts.", _JOBS),
    "top": _Lazy(f"{_PACKAGE}.top", "top", "Watch jobs on the terminal: ranks, curves, phases, logs.", _JOBS),
    "ps": _Lazy(f"{_PACKAGE}.jobs", "ps", "List running jobs, and those that ended today.", _JOBS),
    "logs": _Lazy(f"{_PACKAGE}.jobs", "logs", "Show what the ranks of a job wrote.", _JOBS),
    "show": _Lazy(f"{_PACKAGE}.show", "show", "Show what a job did, in figures.", _JOBS),
    "stacks": _Lazy(f"{_PACKAGE}.jobs", "stacks", "Print the Python stack traces of all ranks of a job.", _JOBS),
    "trace": _Lazy(f"{_PACKAGE}.trace", "trace", "Record steps of a running job, for Perfetto.", _JOBS),
    "kill": _Lazy(f"{_PACKAGE}.jobs", "kill", "Stop a job on all its hosts.", _JOBS),
    "config": _Lazy(f"{_PACKAGE}.config", "config_group", "Check an engine config, or explain a key.", _ENGINE),
    "estimate": _Lazy(
        f"{_PACKAGE}.estimate", "estimate", "Show what memory a model needs, and which setting fits.", _ENGINE
    ),
    "rehearse": _Lazy(f"{_PACKAGE}.rehearse", "rehearse", "Run SCRIPT as ranks of a world that is not there.", _ENGINE),
    "plan": _Lazy(f"{_PACKAGE}.plan", "plan", "Rank all ways to train a model on machines you name.", _ENGINE),
    "checkpoint": _Lazy(
        f"{_PACKAGE}.checkpoint", "checkpoint_group", "List, verify, remove or convert checkpoints.", _ENGINE
    ),
    "io": _Lazy(f"{_PACKAGE}.io", "io", "Measure a disk, and print the best aio section.", _ENGINE),
    "report": _Lazy(f"{_PACKAGE}.report", "report", "Write what jobs did as a page; without JOB: versions.", _JOBS),
    "deepspeed-command": _Lazy(
        f"{_PACKAGE}.deepspeed_command",
        "deepspeed_command",
        "Add a command named deepspeed to this environment.",
        _INSTALLATION,
    ),
    "completion": _Lazy(
        f"{_PACKAGE}.completion", "completion", "Print the completion script of a shell.", _INSTALLATION
    ),
}

# What other programs call it.
_OTHER_NAMES = {
    "help": "launch --help",
    "version": "launch --version",
    "stop": 'did you mean "kill"?',
    "cancel": 'did you mean "kill"?',
    "list": 'did you mean "ps"?',
    "jobs": 'did you mean "ps"?',
    "status": 'did you mean "ps"?',
    "submit": "launch sbatch --submit SCRIPT",
    "doctor": 'did you mean "check"?',
    "env": "launch report",
}

SUMMARY = "Run SCRIPT on every rank (GPU) of this machine or a cluster."
EXAMPLES = """\
  launch --num-gpus 2 train.py --deepspeed ds_config.json
  launch --hostfile hosts --include node-a@node-b:0,2 train.py
  launch --hostfile hosts --dry-run train.py
  launch check --hostfile hosts
  launch sbatch --nodes 2 --gpus-per-node 8 --time 20:00:00 --submit train.py
  launch config check ds_config.json
"""
EXIT_CODES = """\
exit codes: the first failing rank's own (128 + signal when killed) · 2 wrong options, hostfile or config
            69 a host could not be reached or was lost · 75 saved, to be started again · 130 Ctrl-C
"""
EPILOG = f"examples:\n{EXAMPLES}\n{EXIT_CODES}"


# What click raises for `launch` alone; older versions raise nothing and exit.
_HELP_INSTEAD: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())


class _ReaderGone(Exception):
    """The reader of our output has gone (`launch ps | head -1`)."""


class LaunchGroup(click.Group):
    """`launch SCRIPT` is `launch run SCRIPT`; a subcommand's name wins over a script of the same name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _refuse_mistyped(args)
        if args and args[0] not in COMMANDS and args[0] not in ("--help", "-h", "--version", "-V"):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise _ReaderGone from None  # click would end with 1
        except LauncherError:
            if DEBUGGING in ctx.meta:
                import traceback

                streams.say(printable(traceback.format_exc().rstrip()))
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = COMMANDS.get(cmd_name)
        if known is None:
            return None
        command: Any = getattr(importlib.import_module(known.module), known.attribute)
        if cmd_name != "run":  # that one has its own way, see `fleet.signals`
            raise_at_interrupt()
        if not isinstance(command, click.Command):
            return None
        command.short_help = known.short_help
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer commands, and what may follow `launch` because it may follow `launch run`."""
        from click.shell_completion import CompletionItem

        found = [CompletionItem(name, help=known.short_help) for name, known in COMMANDS.items()]
        found = [item for item in found if item.value.startswith(incomplete)]
        found += click.Command.shell_complete(self, ctx, incomplete)
        run = self.get_command(ctx, "run")
        if run is not None:
            run_context = click.Context(run, info_name="run", parent=ctx)
            found += [item for item in run.shell_complete(run_context, incomplete) if item.value != "--help"]
        return found if incomplete.startswith("-") else [*found, CompletionItem(incomplete, type="file")]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show what `launch` can do, on one screen; the options of a run are shown by `launch run --help`."""
        formatter.write_usage("launch", "[OPTIONS] SCRIPT [ARGS]...")
        formatter.write_usage("launch", "COMMAND [OPTIONS] ...", prefix=" " * len("Usage: "))
        formatter.write(f"\n  {SUMMARY}\n\nExamples:\n{EXAMPLES}")
        for group in dict.fromkeys(command.group for command in COMMANDS.values()):
            with formatter.section(group):
                formatter.write_dl(
                    [(name, command.short_help) for name, command in COMMANDS.items() if command.group == group]
                )
        with formatter.section("Options"):
            formatter.write_dl(
                [
                    ("-h, --help", "Show this. More: launch run --help, launch COMMAND --help."),
                    ("-V, --version", "Show the version."),
                ]
            )
        formatter.write("\n" + EXIT_CODES)


@click.group(
    cls=LaunchGroup,
    no_args_is_help=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "token_normalize_func": spelled,
    },
)
@click.version_option(__version__, "-V", "--version", prog_name="launch", message="%(prog)s %(version)s")
def cli() -> None:
    """Run PyTorch jobs on one machine or on many."""


def _refuse_mistyped(args: list[str]) -> None:
    """Name the command that is meant by a first word that is like one and is not a script. Raises: UsageError."""
    word = args[0] if args else ""
    if word in _OTHER_NAMES and not os.path.exists(word):
        raise UsageError(f"there is no command {word}, and no script of that name", hint=_OTHER_NAMES[word])
    if word in COMMANDS or word.startswith("-") or not word.replace("-", "").isalpha() or os.path.exists(word):
        return
    near = did_you_mean(word, [name for name in COMMANDS if name != "run"])
    if near is not None:
        raise UsageError(f"there is no command {word}, and no script of that name", hint=near)


def _show_error(error: LauncherError) -> None:
    from launcher.cli.console import render

    render.show_error(error)


def main() -> None:
    """Run the command line and exit. Every error a user can cause ends here as text, without a traceback."""
    streams.open_missing()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # with PYTHONIOENCODING=latin-1 not every sign has a code
    try:
        # Without colours for whoever does not want them (no-color.org); None: on terminals only.
        color = False if os.environ.get("NO_COLOR") else None
        code = cli.main(prog_name="launch", standalone_mode=False, color=color)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        code = error.exit_code
    except _HELP_INSTEAD as error:
        error.show()
        code = error.exit_code
    except click.ClickException as error:
        from launcher.cli.usage import as_usage_error

        _show_error(as_usage_error(error))
        code = error.exit_code
    except click.Abort:
        code = ExitCode.INTERRUPTED
    except LauncherError as error:
        _show_error(error)
        code = error.exit_code
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except (_ReaderGone, BrokenPipeError):
        streams.silence_all()
        code = 128 + 13
    except OSError as error:
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None
        _show_error(LauncherError(error.strerror or str(error), where=where))
        streams.silence_all()  # it may be standard output that failed
        code = ExitCode.FAILURE
    sys.exit(int(code) if isinstance(code, int) else 0)
