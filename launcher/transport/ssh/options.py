"""What a user may say about SSH. Imports little: it is read before it is known whether any host is reached that way."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.errors import UsageError
from launcher.transport.command import AGENT_MODULE, SHELL_ARGV, SHELL_COMMAND, agent_shell_command, with_setup

if TYPE_CHECKING:
    from launcher.cluster.cluster import Host

WAYS = ("auto", "paramiko", "openssh")  # what speaks SSH; "auto": as the SSH config needs


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    """How hosts are reached over SSH; None leaves it to the OpenSSH configuration. Options have the fields' names."""

    ssh: str = "auto"  # one of WAYS
    ssh_port: int | None = None
    ssh_config: Path | None = None  # used instead of ~/.ssh/config and /etc/ssh/ssh_config, as `ssh -F`
    known_hosts: Path | None = None  # used instead of every other known_hosts file
    connect_timeout_s: float | None = None
    remote_python: str | None = None  # path of python on the hosts; None = this interpreter's path
    agent_module: str | None = None  # started there in place of the agent
    shell_only: bool = False  # start /bin/sh there instead of python and a module
    root: Path | None = None  # folder of that module's package; None = this checkout or installation
    setup: str = ""  # shell text that runs first, such as `module load cuda`
    accept_new_host_keys: bool = False  # keys of hosts never seen before are recorded instead of refused
    verbose: bool = False  # what SSH does is shown on stderr

    def __post_init__(self) -> None:
        """Raises: UsageError for a config that cannot be read."""
        path = self.ssh_config
        if path is None or str(path) == "none":
            return
        if not path.exists() or path.is_dir() or not os.access(path, os.R_OK):
            problem = "may not be read" if path.is_file() else "is a folder" if path.is_dir() else "does not exist"
            raise UsageError(f"the SSH config {problem}", where=f"-F {path}", hint="check the path behind -F")
        _readable_by_many(path)  # now, while one thread asks: a second one would wait at the empty pipe

    @property
    def remote_command(self) -> str:
        """What starts the agent, or a plain shell, on a host, as its login shell gets it."""
        if self.shell_only:
            return with_setup(self.setup, list(SHELL_ARGV)) if self.setup else SHELL_COMMAND
        return agent_shell_command(self.remote_python, self.agent_module or AGENT_MODULE, self.root, self.setup)

    def openssh_words(self, host: Host) -> list[str]:
        """Return the words behind `ssh` with which OpenSSH goes where the command line and the hostfile say."""
        port = host.port or self.ssh_port
        words = [] if self.ssh_config is None else ["-F", _readable_by_many(self.ssh_config)]
        words += [] if self.known_hosts is None else ["-o", f"UserKnownHostsFile={self.known_hosts}"]
        return words + ([] if port is None else ["-p", str(port)])


@functools.lru_cache(maxsize=8)
def _readable_by_many(path: Path) -> str:
    """Return a path by which each `ssh` can read a config. A pipe (`-F <(...)`) gives its text only once: it is copied
    into memory, for as long as this process lives."""
    if not path.is_fifo():
        return str(path)
    copy = os.memfd_create("ssh_config")
    with open(copy, "wb", closefd=False) as file:
        file.write(path.read_bytes())
    return f"/proc/{os.getpid()}/fd/{copy}"
