"""What a user may say about SSH. Imports little: it is read before it is known whether any host is reached that way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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

    @property
    def remote_command(self) -> str:
        """What starts the agent, or a plain shell, on a host, as its login shell gets it."""
        if self.shell_only:
            return with_setup(self.setup, list(SHELL_ARGV)) if self.setup else SHELL_COMMAND
        return agent_shell_command(self.remote_python, self.agent_module or AGENT_MODULE, self.root, self.setup)

    def openssh_words(self, host: Host) -> list[str]:
        """Return the words behind `ssh` with which OpenSSH goes where the command line and the hostfile say."""
        port = host.port or self.ssh_port
        words = [] if self.ssh_config is None else ["-F", str(self.ssh_config)]
        words += [] if self.known_hosts is None else ["-o", f"UserKnownHostsFile={self.known_hosts}"]
        return words + ([] if port is None else ["-p", str(port)])
