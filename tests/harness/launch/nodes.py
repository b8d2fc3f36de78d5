"""Nodes that can die: network namespaces on a bridge, each with its own processes, host name and sshd.

Killing a node ends everything in it at once, as a crash does; cutting its cable is a network partition. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from harness.launch.command import slowness
from harness.launch.sshd import SETTINGS, LoopbackSshd
from harness.ports import free_port

_START_TIMEOUT_S = 10.0
_NETS = range(1, 251)
# Deletes the namespaces and the bridge once its stdin has ended: after us too, should we be killed.
_TIDY = 'read _; for name; do ip netns del "$name"; done; ip link del "$BRIDGE"'


def available() -> str | None:
    """Return why no nodes can be made here, None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (apt-get install iproute2 util-linux)"
    probe = f"lprobe{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if done.returncode != 0:
        return f"no network namespace can be made: {done.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


@dataclass
class MortalNode:
    """One node; `address` is where its sshd listens."""

    name: str
    address: str
    cable: str  # the bridge's end of its network cable
    process: subprocess.Popen[bytes]

    @property
    def enter(self) -> list[str]:
        """What to put before a command that shall run inside the node, and die with it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return ["nsenter", "--target", children[0], "--net", "--uts", "--mount", "--pid"]

    def crash(self) -> None:
        """End every process of the node at once."""
        self.process.kill()
        self.process.wait()

    def cut(self) -> None:
        """Let no packet in or out from now on; its processes live on."""
        _ip("link", "set", self.cable, "down")

    def mend(self) -> None:
        """Undo `cut`."""
        _ip("link", "set", self.cable, "up")


class MortalNodes:
    """Some nodes and the bridge between them; a context manager. `ssh_config` and `hostfile` reach all of them."""

    def __init__(self, folder: Path, count: int, clock_offsets_s: Sequence[int] = ()) -> None:
        """clock_offsets_s: how far each node's monotonic clock is ahead of ours."""
        self.folder = folder
        self._clock_offsets_s = clock_offsets_s
        self.keys = LoopbackSshd(folder / "keys")  # its keys only: it is never started
        self.hostfile = folder / "hosts"
        self.ssh_config = folder / "ssh_config"
        self._number = 0  # of our net; `__enter__` takes one that nobody has
        self._count = count
        self._port = free_port()
        self.nodes: list[MortalNode] = []

    def __enter__(self) -> MortalNodes:
        self._take_net()
        self._janitor = subprocess.Popen(
            ["sh", "-c", _TIDY, "sh", *map(self._namespace, range(self._count))],
            env={**os.environ, "BRIDGE": self._bridge},
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _ip("addr", "add", f"{self._net}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for number in range(self._count):
            self.nodes.append(self._start(number))
        for node in self.nodes:
            self._wait_for(node)
        self.hostfile.write_text("".join(f"{node.address} slots=2\n" for node in self.nodes))
        known = self.folder / "known_hosts"
        known.write_text(f"[{self._net}.*]:{self._port} {self.keys.host_key_line}\n")
        self.ssh_config.write_text(
            f"Host {self._net}.*\n  Port {self._port}\n  User root\n  IdentityFile {self.keys.user_key}\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {known}\n  GlobalKnownHostsFile none\n"
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for node in self.nodes:
            node.process.kill()
            node.process.wait()
        self._janitor.communicate()

    @property
    def address(self) -> str:
        """Where the nodes reach this machine."""
        return f"{self._net}.1"

    @property
    def _net(self) -> str:
        return f"10.211.{self._number}"

    @property
    def _bridge(self) -> str:
        return f"lb{self._number}"

    def _namespace(self, number: int) -> str:
        return f"ln{self._number}n{number}"

    def _take_net(self) -> None:
        """Make a bridge under a name that no other test has: the kernel lets only one of us have it."""
        for self._number in random.sample(_NETS, len(_NETS)):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("link", "add", self._bridge, "type", "bridge")
                return
        raise RuntimeError("no bridge can be made: all names are taken")

    def _start(self, number: int) -> MortalNode:
        namespace, cable, address = self._namespace(number), f"lv{self._number}n{number}", f"{self._net}.{10 + number}"
        with contextlib.suppress(subprocess.CalledProcessError):  # of a namespace whose end the kernel is not done with
            _ip("link", "del", cable)
        _ip("netns", "add", namespace)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", cable, "master", self._bridge, "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", namespace, "link", "set", device, "up")
        config = self.folder / f"sshd_{number}"
        config.write_text(
            SETTINGS.format(
                port=self._port,
                host_key=self.keys.host_key,
                folder=self.keys.folder,
                more_env=" GLOO_SOCKET_IFNAME=eth0",
            )
        )
        inside = f"hostname node-{number}; mount -t tmpfs tmpfs /dev/shm; exec /usr/sbin/sshd -D -f {config}"
        isolate = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        if self._clock_offsets_s:
            isolate += ["--time", "--monotonic", str(self._clock_offsets_s[number])]
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", namespace, *isolate, "sh", "-c", inside],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return MortalNode(f"node-{number}", address, cable, process)

    def _wait_for(self, node: MortalNode) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S * slowness()
        while True:
            try:
                socket.create_connection((node.address, self._port), 1).close()
                return
            except OSError:
                if time.monotonic() > deadline or node.process.poll() is not None:
                    raise RuntimeError(f"{node.name} did not start") from None
                time.sleep(0.05)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdin=subprocess.DEVNULL, capture_output=True)
