"""The parameters of `launcher.run` as data, and the request of a run that they mean here and now."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.api.pickling import pack_call
from launcher.base import env as variables
from launcher.base.errors import Diagnostic, JobError, LauncherError, UsageError
from launcher.base.fields import filled
from launcher.base.folders import working_folder
from launcher.cluster.cluster import Cluster, NodeRange
from launcher.cluster.nodeset import MAX_PORT
from launcher.compat import ENGINES
from launcher.plan.plan import DEFAULT_GRACE_S, DEFAULT_LEASE_S, LONGEST_S, Command
from launcher.plan.planning import Here
from launcher.plan.request import Request
from launcher.transport.local import is_local
from launcher.transport.ssh.options import WAYS, SshOptions

StrPath = str | os.PathLike[str]

_RANK_MODULE = "launcher.api.rank"
_WORDS = ("gpu", "cpu", "auto")
_OPTION = re.compile(r"--([a-z]+(?:[-_][a-z]+)*)")
# The limits that the options of `launch` have.
_WHOLE = {"num_nodes": 65_536, "min_nodes": 65_536, "master_port": MAX_PORT, "ssh_port": MAX_PORT}  # the most
_SECONDS = {"grace_s": 0.0, "lease_s": 2.0, "hang_timeout_s": 0.001}  # the least
_LINES = "hosts"  # what errors call the lines of `hosts`


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `launcher.run` seldom needs to be told. Each means what the option of `launch` of that name means."""

    num_nodes: int | None = None  # the first hosts only; others may take a lost one's place at a restart
    min_nodes: int | None = None  # continue with fewer hosts at a restart, but not with fewer than these
    master_addr: str | None = None
    master_port: int | None = None
    grace_s: float = DEFAULT_GRACE_S
    lease_s: float = DEFAULT_LEASE_S
    hang_timeout_s: float | None = None
    engine: str = "auto"
    ssh: str = "auto"  # or "paramiko", or "openssh" for the system's ssh
    ssh_config: StrPath | None = None
    ssh_port: int | None = None
    accept_new_host_keys: bool = False
    remote_python: str | None = None
    setup: str = ""  # shell text that runs on every host first

    def __post_init__(self) -> None:
        for name, value, known in (("engine", self.engine, ENGINES), ("ssh", self.ssh, WAYS)):
            if value not in known:
                raise UsageError(f'Options({name}=) is "{value}"', hint=f"give one of {', '.join(known)}")
        self._check_numbers()

    def _check_numbers(self) -> None:
        """Raises: UsageError for what would end an agent, or the job at once, without a word about its cause."""
        for name, most in _WHOLE.items():
            number = getattr(self, name)
            if number is not None and not (isinstance(number, int) and 1 <= number <= most):
                raise UsageError(f"Options({name}=) is {number!r}", hint=f"give a whole number from 1 to {most}")
        for name, least in _SECONDS.items():
            seconds = getattr(self, name)
            if seconds is None and name == "hang_timeout_s":
                continue
            if not (isinstance(seconds, (int, float)) and least <= seconds <= LONGEST_S):
                raise UsageError(
                    f"Options({name}=) is {seconds!r}", hint=f"give seconds from {least:g} to {LONGEST_S:.0f}"
                )

    @property
    def ssh_options(self) -> SshOptions:
        """How hosts are reached over SSH."""
        ssh_config = None if self.ssh_config is None else Path(self.ssh_config)
        return filled(SshOptions, {**vars(self), "ssh_config": ssh_config})


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """One job as the caller asks for it; `launcher.run` says what each means."""

    command: Command
    ranks: int | str | None = None
    hosts: Sequence[str] | None = None
    hostfile: StrPath | None = None
    include: str = ""
    exclude: str = ""
    env: Mapping[str, str] = field(repr=False, default_factory=dict)
    max_restarts: int = 0
    log_dir: StrPath | None = None
    timeout_s: float | None = None
    options: Options = Options()

    def __post_init__(self) -> None:
        for name, value, kind, example in (
            ("options", self.options, Options, "launcher.Options(grace_s=1)"),
            ("env", self.env, Mapping, '{"NCCL_DEBUG": "INFO"}'),
            ("include", self.include, str, '"node-a@node-b:0,2"'),
            ("exclude", self.exclude, str, '"node-a@node-b:0,2"'),
        ):
            if not isinstance(value, kind):
                raise UsageError(f"{name} is a {type(value).__name__}", hint=f"such as {name}={example}")
        is_list = not isinstance(self.hosts, str) and all(isinstance(host, str) for host in self.hosts or ())
        if self.hosts is not None and (self.hostfile is not None or not is_list):
            raise UsageError(
                "hosts is a list of host names, and takes the place of hostfile",
                hint='such as hosts=["node-a", "node-b"] or hostfile="hosts.txt"',
            )
        if self.ranks not in (None, *_WORDS) and not (isinstance(self.ranks, int) and self.ranks > 0):
            raise UsageError(f"ranks is {self.ranks!r}", hint=f"give 1 or more, or one of {', '.join(_WORDS)}")
        if not (isinstance(self.max_restarts, int) and self.max_restarts >= 0):
            raise UsageError(f"max_restarts is {self.max_restarts!r}", hint="give 0 or more")
        is_time = isinstance(self.timeout_s, (int, float)) and self.timeout_s > 0
        if self.timeout_s is not None and not is_time:
            raise UsageError(f"timeout_s is {self.timeout_s!r}", hint="give seconds above 0, or None")
        for name, value in self.env.items():
            if not isinstance(name, str) or not isinstance(value, str) or "=" in name:
                raise UsageError("names and values are texts, and a name has no =", where=f"env: {name}")
            if "\0" in name + value:
                raise UsageError("it holds a NUL byte, which no variable can", where=f"env: {name}")

    @property
    def is_call(self) -> bool:
        """Whether ranks make a function call; else they run a script."""
        return bool(self.command.call)

    def request(self, here: Here) -> Request:
        """Return the request of a run, in the allocation that this process is in or not. Raises: UsageError."""
        num_nodes = self.options.num_nodes
        hostfile = _LINES if self.hosts is not None else None if self.hostfile is None else os.fspath(self.hostfile)
        log_dir = self.log_dir or os.environ.get(variables.LOG_DIR.name) or "runs"
        changed = {
            "hostfile": hostfile,
            "in_slurm": hostfile is None and here.in_allocation,
            "num_nodes": None if num_nodes is None else NodeRange(num_nodes, num_nodes),
            "num_gpus": self.ranks if self.hosts is None else None,  # else the lines have their slots
            "env": tuple(f"{name}={value}" for name, value in self.env.items()),
            "log_dir": Path(here.cwd, log_dir),
        }
        return filled(Request, {**vars(self.options), **vars(self), **changed})

    def given_hosts(self, here: Here) -> Cluster | None:
        """Return the hosts of `hosts`, None where the request names them. Raises: HostfileError, UsageError."""
        if self.hosts is None:
            return None
        from launcher.cluster.hostfile import parse_hostfile

        lines = [_with_slots(line, self.ranks, len(here.device_tokens)) for line in self.hosts]
        return parse_hostfile("\n".join(lines), _LINES)


def _with_slots(line: str, ranks: int | str | None, num_devices: int) -> str:
    """Return a line of `hosts` with the slots that it leaves out. num_devices: of this machine."""
    if "slots" in line:
        return line
    num_slots = num_devices if ranks is None and is_local(line.strip()) else ranks
    if not isinstance(num_slots, int) or not num_slots:
        raise UsageError(
            f'"{line}" does not say how many ranks it gets', where=_LINES, hint='give ranks=8, or "node-a slots=8"'
        )
    return f"{line} slots={num_slots}"


@contextlib.contextmanager
def in_python_words() -> Iterator[None]:
    """Name the parameter where an error of the block names the option of `launch` that means the same."""
    try:
        yield
    except JobError:
        raise
    except LauncherError as error:
        found = [
            Diagnostic(str(_said(each.message)), _said(each.where), _said(each.hint)) for each in error.diagnostics
        ]
        raise type(error).from_diagnostics(found) from error.__cause__


def _said(text: str | None) -> str | None:
    return None if text is None else _OPTION.sub(_parameter, text)


def _parameter(match: re.Match[str]) -> str:
    name = match[1].replace("-", "_")
    own = {field.name for field in dataclasses.fields(Parameters)}
    options = {field.name for field in dataclasses.fields(Options)}
    for spelled in ("ranks" if name == "num_gpus" else name, f"{name}_s"):  # seconds are in the names of parameters
        if spelled in own:
            return f"{spelled}="
        if spelled in options:
            return f"Options({spelled}=)"
    return match[0]


def command_for(
    target: Callable[..., Any] | StrPath, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Command:
    """Return the command that calls a function, or runs a script.

    Raises: UsageError when the target cannot be run, or the call cannot be pickled.
    """
    if callable(target):
        return Command("internal", _RANK_MODULE, (), call=pack_call(target, args, kwargs or {}))
    if not isinstance(target, (str, os.PathLike)):
        raise UsageError(f"{target!r} is neither a function nor the path of a script")
    script = os.fspath(target)
    if not os.path.exists(script):
        raise UsageError(f"script {script} does not exist", where=working_folder(), hint="check the path")
    return Command("script", script, tuple(_word(value) for value in args))


def _word(value: Any) -> str:
    """Return an argument of a script. Raises: UsageError for what has no obvious text."""
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise UsageError(
        f"{value!r} cannot be an argument of a script", hint="give texts, paths and numbers, as on a command line"
    )
