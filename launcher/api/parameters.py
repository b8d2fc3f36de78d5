"""The parameters of `launcher.run` as data, and the request of a run that they mean here and now."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.api.pickling import pack_call
from launcher.base import env as variables
from launcher.base.errors import UsageError
from launcher.base.fields import filled, named, naming, option_of
from launcher.base.folders import working_folder
from launcher.cluster.cluster import Cluster
from launcher.compat import ENGINES
from launcher.plan.plan import ON_OOM, Command, Settings
from launcher.plan.planning import Here
from launcher.plan.request import Request, check_fields, node_range, resume_from
from launcher.transport.local import is_local
from launcher.transport.ssh.options import WAYS, SshOptions

StrPath = str | os.PathLike[str]

_RANK_MODULE = "launcher.api.rank"
_LINES = "hosts"  # what errors call the lines of `hosts`


@contextlib.contextmanager
def in_python_words(name_of: Callable[[str], str] | None = None) -> Iterator[None]:
    """Let errors of the block name parameters, not options of `launch`. name_of: other names than `launcher.run`'s."""
    token = naming.set(name_of or _parameter)
    try:
        yield
    finally:
        naming.reset(token)


def _parameter(name: str) -> str:
    """Return what `launcher.run` calls a field; the option of `launch` where it has none."""
    if name in Parameters.__dataclass_fields__:
        return "ranks=" if name == "num_gpus" else f"{name}="
    return f"Options({name}=)" if name in Options.__dataclass_fields__ else option_of(name)


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What `launcher.run` seldom needs to be told. Each means what the option of `launch` of that name means."""

    num_nodes: int | str | None = None  # the first hosts only; others may take a lost one's place; "MIN:MAX": a range
    min_nodes: int | None = None  # continue with fewer hosts at a restart, but not with fewer than these
    master_addr: str | None = None
    master_port: int | None = None
    pass_local_rank: bool = False  # give a script --local_rank=N, too
    env_files: Sequence[StrPath] = ()
    ssh: str = "auto"  # or "paramiko", or "openssh" for the system's ssh
    ssh_config: StrPath | None = None
    ssh_port: int | None = None
    force_multi: bool = False  # reach this machine over SSH as well
    accept_new_host_keys: bool = False
    remote_python: str | None = None
    setup: str = ""  # shell text that runs on every host first
    verbose: bool = False  # show on stderr what SSH does

    def __post_init__(self) -> None:
        with in_python_words():
            check_fields(self)
            for name, known in (("engine", ENGINES), ("ssh", WAYS), ("on_oom", ON_OOM)):
                if getattr(self, name) not in known:
                    expected = f"expected one of {', '.join(known)}"
                    raise UsageError(f"{expected}, got {getattr(self, name)!r:.80}", where=named(name))
            self.values()

    def values(self) -> dict[str, Any]:
        """Return these values as fields of `Request` and `SshOptions`. Raises: UsageError."""
        return {
            **vars(self),
            "num_nodes": None if self.num_nodes is None else node_range(str(self.num_nodes)),
            "resume": resume_from(os.fspath(self.resume)) if self.resume else "",
            "env_files": tuple(map(Path, self.env_files)),
            "ssh_config": None if self.ssh_config is None else Path(self.ssh_config),
        }


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """One job as the caller asks for it; `launcher.run` says what each means."""

    command: Command
    num_gpus: int | str | None = None  # `ranks`
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
        """Raises: UsageError."""
        for name, kind, example in (
            ("options", Options, "launcher.Options(grace_s=1)"),
            ("env", Mapping, '{"NCCL_DEBUG": "INFO"}'),
            ("include", str, '"node-a@node-b:0,2"'),
            ("exclude", str, '"node-a@node-b:0,2"'),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise UsageError(f"{name} is a {type(value).__name__}", hint=f"such as {name}={example}")
        is_list = not isinstance(self.hosts, str) and all(isinstance(host, str) for host in self.hosts or ())
        if self.hosts is not None and (self.hostfile is not None or not is_list):
            raise UsageError(
                "hosts is a list of host names, and takes the place of hostfile",
                hint='such as hosts=["node-a", "node-b"] or hostfile="hosts.txt"',
            )
        check_fields(self)
        is_time = isinstance(self.timeout_s, (int, float)) and self.timeout_s > 0
        if self.timeout_s is not None and not is_time:
            raise UsageError(f"expected seconds, more than 0, got {self.timeout_s!r}", where=named("timeout_s"))
        for name, value in self.env.items():
            if not isinstance(name, str) or not isinstance(value, str) or "=" in name:
                raise UsageError("names and values are texts, and a name has no =", where=f"env: {name}")
            if "\0" in name + value:
                raise UsageError("it holds a NUL byte, which no variable can", where=f"env: {name}")
        if self.is_call and self.options.pass_local_rank:
            raise UsageError(f"{named('pass_local_rank')} is for scripts", hint="a function reads LOCAL_RANK")

    @property
    def is_call(self) -> bool:
        """Whether ranks make a function call; else they run a script."""
        return bool(self.command.call)

    @property
    def ssh_options(self) -> SshOptions:
        """How hosts are reached over SSH. Raises: UsageError."""
        return filled(SshOptions, self.options.values())

    def request(self, here: Here) -> Request:
        """Return the request of a run, in the allocation that this process is in or not. Raises: UsageError."""
        hostfile = _LINES if self.hosts is not None else None if self.hostfile is None else os.fspath(self.hostfile)
        log_dir = self.log_dir or os.environ.get(variables.LOG_DIR.name) or "runs"
        changed = {
            "command": dataclasses.replace(self.command, passes_local_rank=self.options.pass_local_rank),
            "hostfile": hostfile,
            "in_slurm": hostfile is None and here.in_allocation,
            "num_gpus": self.num_gpus if self.hosts is None else None,  # else the lines have their slots
            "env": tuple(f"{name}={value}" for name, value in self.env.items()),
            "log_dir": Path(here.cwd, log_dir),
            "max_restarts": self.max_restarts or self.options.max_restarts,
        }
        return filled(Request, {**self.options.values(), **vars(self), **changed})

    def given_hosts(self, here: Here) -> Cluster | None:
        """Return the hosts of `hosts`, None where the request names them. Raises: HostfileError, UsageError."""
        if self.hosts is None:
            return None
        from launcher.cluster.hostfile import has_slots, parse_hostfile

        lines = [
            line if has_slots(line) else _with_slots(line.partition("#")[0], self.num_gpus, len(here.device_tokens))
            for line in self.hosts
        ]
        return parse_hostfile("\n".join(lines), _LINES)


def _with_slots(line: str, ranks: int | str | None, num_devices: int) -> str:
    """Return a line of `hosts` with the slots that it leaves out. num_devices: of this machine."""
    num_slots = num_devices if ranks is None and is_local(line.strip()) else ranks
    if not isinstance(num_slots, int) or not num_slots:
        raise UsageError(
            f'"{line}" does not say how many ranks it gets', where=_LINES, hint='give ranks=8, or "node-a slots=8"'
        )
    return f"{line} slots={num_slots}"


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
