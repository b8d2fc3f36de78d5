"""Measure what a host costs the launching machine, and say from that what 10,000 hosts would take: docs/scale.md.

    python benchmarks/scale_model.py [--rounds 3] [--many 250] [--output FILE]

Everything measured is the difference between few and many hosts of one throwaway sshd on 127.0.0.*; CPU seconds, not
wall time, because the far side runs on the same cores here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, Section, argument_parser, median, rounds_text, table, write_page
from harness.launch.sshd import LoopbackSshd

from launcher.base.processes import FILES_A_HOST
from launcher.cluster.cluster import Host
from launcher.fleet.host_link import MAX_PARALLEL
from launcher.transport.ssh.options import SshOptions
from launcher.transport.ssh.transport import SshTransport

FEW = 25
SIZES = (8, 64, 250, 1_000, 2_500, 10_000)
BRANCHES = 32
# Runs the command line and leaves behind what it used.
WRAPPED = """
import atexit, json, resource, sys
def tell():
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open(usage, "w") as stream:
        json.dump([used.ru_utime + used.ru_stime, used.ru_maxrss], stream)
atexit.register(tell)
usage = sys.argv.pop(1)
from launcher.cli.main import main
main()
"""


@dataclass(frozen=True)
class Cost:
    """What a run costs: so much at all, and so much for each host. CPU in seconds, memory in KiB."""

    start_s: float
    host_s: float
    start_kib: float
    host_kib: float


@dataclass(frozen=True)
class Bench:
    """One sshd and a folder to work in."""

    sshd: LoopbackSshd
    folder: Path
    rounds: int
    many: int  # hosts of the larger runs

    def cost(self, kind: str) -> Cost:
        """Measure one kind of run ("exec" or "ranks") with few hosts and with many."""
        few, many = (self._usage(kind, count) for count in (FEW, self.many))
        host_s, host_kib = ((many[i] - few[i]) / (self.many - FEW) for i in range(2))
        return Cost(few[0] - host_s * FEW, host_s, few[1] - host_kib * FEW, host_kib)

    def _usage(self, kind: str, count: int) -> list[float]:
        hostfile, script, usage = (self.folder / name for name in ("hosts", "rank.py", "usage"))
        hostfile.write_text(f"127.0.0.[1-{count}] slots=1\n")
        script.write_text("pass\n")
        hosts = ["--hostfile", str(hostfile), "--ssh_config", str(self.sshd.ssh_config)]
        words = ["exec", *hosts, "true"]
        if kind == "ranks":
            words = ["run", "--quiet", "--log-dir", str(self.folder / "runs"), *hosts, str(script)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
        samples = []
        for number in range(-1, self.rounds):
            subprocess.run([sys.executable, "-c", WRAPPED, str(usage), *words], env=environment, check=True)
            if number >= 0:  # the first one fills caches
                samples.append(json.loads(usage.read_text()))
        return [median([sample[i] for sample in samples]) for i in range(2)]

    def connect_s(self) -> float:
        """Measure how long one host takes to be connected while nothing else runs."""
        transport = SshTransport(SshOptions(ssh_config=self.sshd.ssh_config, shell_only=True))
        samples = []
        for number in range(1, 21):
            start_s = time.perf_counter()
            transport.open(Host(f"127.0.0.{number}", (0,))).close()
            samples.append(time.perf_counter() - start_s)
        transport.close()
        return median(samples)


@dataclass(frozen=True)
class Model:
    """Seconds until a command has run on all of `num_hosts`."""

    command: Cost
    connect_s: float

    def flat_s(self, num_hosts: int) -> float:
        """Flat fan-out: the slower of our own process, and waiting for those being connected."""
        waiting_s = num_hosts * self.connect_s / MAX_PARALLEL
        return self.command.start_s + max(num_hosts * self.command.host_s, waiting_s) + self.connect_s

    def tree_s(self, num_hosts: int) -> float:
        """A tree: each level starts a launcher on every inner host, which connects to 32 more."""
        levels = 1
        while BRANCHES**levels < num_hosts:
            levels += 1
        return levels * (self.command.start_s + BRANCHES * self.command.host_s + self.connect_s)


def seconds(value: float) -> str:
    """Return a time for a table."""
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def page(model: Model, ranks: Cost, provenance: str) -> str:
    """Return docs/scale.md."""
    rows = [
        [name, f"{cost.start_s:.2f} s", f"{1e3 * cost.host_s:.1f} ms", *memory]
        for name, cost, memory in (
            ("a command", model.command, _memory(model.command)),
            ("an agent and its rank", ranks, _memory(ranks)),
        )
    ]
    header = ["hosts", "flat", f"tree of {BRANCHES}"]
    times = [[f"{n:,}", seconds(model.flat_s(n)), seconds(model.tree_s(n))] for n in SIZES]
    is_quicker = {n: model.tree_s(n) < model.flat_s(n) for n in range(BRANCHES, SIZES[-1] + 1)}
    pays = next((n for n in sorted(is_quicker) if all(is_quicker[m] for m in range(n, SIZES[-1] + 1))), None)
    sentence = f"would not be quicker up to {SIZES[-1]:,} hosts"
    if pays is not None:
        sentence = f"would be quicker from {pays:,} hosts on, on paper"
    memory_mib = (ranks.start_kib + SIZES[-1] * ranks.host_kib) / 1024
    ranks_s = ranks.start_s + SIZES[-1] * ranks.host_s
    return TEXT.format(
        provenance=provenance,
        costs=table(["on the launching machine", "CPU to start", "CPU a host", "memory", "memory a host"], rows),
        connect_ms=1e3 * model.connect_s,
        parallel=MAX_PARALLEL,
        files_a_host=FILES_A_HOST,
        times=table(header, times),
        tree=sentence,
        branches=BRANCHES,
        memory_mib=memory_mib,
        ranks_s=ranks_s,
    )


def _memory(cost: Cost) -> list[str]:
    return [f"{cost.start_kib / 1024:.0f} MiB", f"{cost.host_kib:.0f} KiB"]


TEXT = """\
# Many hosts

How `launch` reaches them, what one costs, and what that makes of 10,000. `make bench SECTION=scale` measures and writes
this page. Times of whole commands beside other tools are in [benchmarks](benchmarks.md).

## How

Fan-out is flat: this machine connects to every host itself, up to {parallel} at a time. paramiko's work shares one
interpreter lock, and so one core; with many hosts and cores to spare, `--ssh openssh` spreads it over one process a
host, see [hostfiles](hostfiles.md). Each host takes up to {files_a_host} open files (1 with paramiko), and each
rank's log one. The soft limit is raised as far as the hard one (`ulimit -Hn`) allows; ranks get the limit back that
`launch` was started with. Where the hard limit is too low for all logs, each is opened anew for every write. An agent
needs 3 files for each rank of its host, 24 besides: 333 ranks under a hard limit of 1024. It says so before any rank
starts.

## What a host costs

{provenance}

The hosts' own CPU is not in these figures.

{costs}

One connection alone, from TCP to a started shell: {connect_ms:.0f} ms, most of it the server's.

## Up to 10,000 hosts

A command on all hosts, by this model with the figures above; `n` hosts:

```
flat   start + max(n · CPU a host, n · connection / {parallel}) + connection
tree   levels · (start + {branches} · CPU a host + connection),  {branches} ^ levels >= n
```

{times}

It is a model: network delay, a slow host and a key agent that signs for all come on top. A job's
agents and ranks on 10,000 hosts would take {ranks_s:.0f} s
of one core and {memory_mib:,.0f} MiB here, in one process.

## Why no tree

A tree {tree}: each level costs the start of a launcher and a round of connections. For that it would need keys of
every host on the inner ones and Python there, and it loses a whole branch with one inner host, so that a failure could
no longer be told from its victims. The seconds that it would save on 1,000 hosts are few beside the start of a job.
"""


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--many", type=int, default=250, help=f"hosts of the larger runs, beside {FEW}; default: 250")
    options = parser.parse_args()
    section = Section("Many hosts", "paramiko")
    with tempfile.TemporaryDirectory() as folder, LoopbackSshd() as sshd:
        bench = Bench(sshd, Path(folder), options.rounds, options.many)
        model = Model(bench.cost("exec"), bench.connect_s())
        ranks = bench.cost("ranks")
    samples = rounds_text(options.rounds, f"differences between {FEW} and {options.many} hosts on 127.0.0.*")
    write_page(page(model, ranks, section.provenance(samples)), options.output)


if __name__ == "__main__":
    main()
