"""Reach many hosts: a bare command on all, and agents with a rank each, beside pdsh, OpenSSH, clush and asyncssh.

    python benchmarks/fanout.py [--hosts 1,8,64,250] [--only REGEX] [--rounds 3] [--output FILE]

`launch` does it with paramiko and with the system's `ssh`; on one host that is its start-up through each.

The hosts are addresses 127.0.0.1 to 127.0.0.250 of one throwaway sshd, so the servers' work is in every figure.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import (
    NOT_INSTALLED,
    ROOT,
    Section,
    argument_parser,
    is_installed,
    measure_in_turns,
    median,
    rounds_text,
    table,
)
from harness.launch.sshd import LoopbackSshd

PEERS = ("OpenSSH", "OpenSSH, curve25519", "pdsh", "pdsh, curve25519", "clush", "asyncssh")
KEX = "KexAlgorithms=curve25519-sha256"
CURVE = f"-o{KEX}"
FANOUT = 64
ASYNCSSH = """
import asyncio, sys
import asyncssh
config, hosts = sys.argv[1], sys.argv[2:]
limit = asyncio.Semaphore(64)
async def one(host):
    async with limit, asyncssh.connect(host, config=[config]) as connection:
        await connection.run("true", check=True)
async def main():
    await asyncio.gather(*map(one, hosts))
asyncio.run(main())
"""


def _hosts(count: int) -> list[str]:
    return [f"127.0.0.{number}" for number in range(1, count + 1)]


def _launch(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "launcher", *arguments]


def commands(sshd: LoopbackSshd, folder: Path, count: int) -> dict[str, list[str]]:
    """Return what runs `true` on every host, by tool."""
    names, hostfile = _hosts(count), folder / "hosts"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in names))
    config = str(sshd.ssh_config)
    quick = folder / "quick_config"
    quick.write_text(f"{sshd.ssh_config.read_text()}  {KEX}\n")
    script = folder / "rank.py"
    script.write_text("pass\n")
    found: dict[str, list[str]] = {}
    for name, *words in (
        ("paramiko", "-F", config, "--ssh", "paramiko"),
        ("openssh", "-F", config, "--ssh", "openssh"),
        ("openssh, curve25519", "-F", str(quick), "--ssh", "openssh"),
    ):
        ours = ["--hostfile", str(hostfile), *words]
        found[f"launch exec, {name}"] = _launch("exec", *ours, "--", "true")
        found[f"launch, one rank a host, {name}"] = _launch(
            "run", "--quiet", "--log-dir", str(folder / "runs"), *ours, str(script)
        )
    parallel_ssh = f"printf '%s\\n' {' '.join(names)} | xargs -P {FANOUT} -I@ ssh -F {config}"
    found["OpenSSH"] = ["sh", "-c", f"{parallel_ssh} @ true"]
    found["OpenSSH, curve25519"] = ["sh", "-c", f"{parallel_ssh} {CURVE} @ true"]
    if shutil.which("pdsh"):
        pdsh = [
            "env",
            f"PDSH_SSH_ARGS_APPEND=-F {config}",
            "pdsh",
            "-R",
            "ssh",
            "-f",
            str(FANOUT),
            "-w",
            ",".join(names),
        ]
        found["pdsh"] = [*pdsh, "true"]
        found["pdsh, curve25519"] = ["env", f"PDSH_SSH_ARGS_APPEND=-F {config} {CURVE}", *pdsh[2:], "true"]
    if shutil.which("clush"):
        found["clush"] = ["clush", "-f", str(FANOUT), "-o", f"-F {config}", "-w", ",".join(names), "true"]
    if is_installed("asyncssh"):
        found["asyncssh"] = [sys.executable, "-c", ASYNCSSH, config, *names]
    return found


def timed(command: list[str], usage: list[tuple[float, int]]) -> Callable[[], float]:
    """Return a call that runs `command` and notes the CPU seconds and peak memory of the head."""

    def run() -> float:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
        start_s = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"exit code {process.returncode}: {' '.join(command)[:300]}")
        usage.append((used.ru_utime + used.ru_stime, used.ru_maxrss))
        return time.perf_counter() - start_s

    return run


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--hosts", default="1,8,64,250", help="numbers of hosts; default: %(default)s")
    parser.add_argument("--only", default="", metavar="REGEX", help="measure the tools whose names this fits")
    options = parser.parse_args()
    title = f"Fan-out to {options.hosts} hosts" if options.hosts.isdigit() else "Fan-out"
    page = Section(title, "paramiko", "asyncssh")
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    counts = [int(count) for count in options.hosts.split(",")]
    rows: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder, LoopbackSshd() as sshd:
        for count in counts:
            usage: dict[str, list[tuple[float, int]]] = {}
            calls = {
                name: timed(command, usage.setdefault(name, []))
                for name, command in commands(sshd, Path(folder), count).items()
                if re.search(options.only, name)
            }
            for name, seconds in measure_in_turns(calls, options.rounds).items():
                cpu_ms = 1e3 * median([cpu for cpu, _ in usage[name]]) / count
                memory_mib = median([float(kib) for _, kib in usage[name]]) / 1024
                rows.setdefault(name, [name]).append(f"{median(seconds):.2f} s, {cpu_ms:.0f} ms, {memory_mib:.0f} MiB")
    missing = [name for name in PEERS if name not in rows and re.search(options.only, name)]
    rows |= {name: [name, *[NOT_INSTALLED] * len(counts)] for name in missing}
    text = (
        f"Wall time, CPU of the head for each host, peak memory of its largest process; at most {FANOUT} connections"
        " at a time where a tool\nhas such a limit.\n\n"
        f"{table(['one command on ... hosts', *map(str, counts)], list(rows.values()))}"
    )
    page.write(rounds_text(options.rounds, "tools in turns"), text, options.output)


if __name__ == "__main__":
    main()
