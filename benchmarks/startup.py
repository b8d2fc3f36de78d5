"""How long a command line takes, and how long until all ranks run: beside torchrun, DeepSpeed, mpirun and a shell loop.

python benchmarks/startup.py [--rounds 10] [--ranks 2 4] [--launchers launch torchrun] [--output FILE]
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import (
    BIN,
    NOT_INSTALLED,
    ROOT,
    TORCHRUN,
    Samples,
    Section,
    argument_parser,
    measure_in_turns,
    median,
    rounds_text,
    spread,
    table,
)

CONFIG = ROOT / "examples" / "configs" / "zero2.json"

# A rank writes when its process was made (the kernel's own record, 10 ms steps) and when its first line ran.
MARK_START = """
import json, os, sys, time
ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
boot_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
marks = {"process": boot_s + ticks / os.sysconf("SC_CLK_TCK"), "script": time.time()}
"""
# ... and when all ranks had come through a first barrier.
MARK_BARRIER = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
marks["barrier"] = time.time()
"""
MARK_END = """
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(marks, file)
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wall_s(command: list[str]) -> Callable[[], float]:
    def run() -> float:
        start_s = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return time.perf_counter() - start_s

    return run


def measure_commands(rounds: int, chosen: list[str]) -> Samples:
    """Time commands that start nothing, beside the bare import of their argument parser."""
    commands = {
        'python -c "import click"': [sys.executable, "-c", "import click"],
        "launch --help": [str(BIN / "launch"), "--help"],
        "launch config check": [str(BIN / "launch"), "config", "check", str(CONFIG)],
    }
    if "torchrun" in chosen:
        commands["torchrun --help"] = [*TORCHRUN, "--help"]
    return measure_in_turns({name: _wall_s(command) for name, command in commands.items()}, rounds)


def _launch(script: Path, marks: Path, ranks: int) -> list[str]:
    runs = str(marks.parent / "runs")
    return [str(BIN / "launch"), "--quiet", "--log-dir", runs, "--num_gpus", str(ranks), str(script), str(marks)]


def _torchrun(script: Path, marks: Path, ranks: int) -> list[str]:
    return [*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", str(script), str(marks)]


def _shell_loop(script: Path, marks: Path, ranks: int) -> list[str]:
    loop = (
        f"export MASTER_ADDR=127.0.0.1 MASTER_PORT={_free_port()} WORLD_SIZE={ranks};"
        f"for r in $(seq 0 {ranks - 1}); do RANK=$r LOCAL_RANK=$r '{sys.executable}' '{script}' '{marks}' & done; wait"
    )
    return ["bash", "-c", loop]


def _deepspeed(script: Path, marks: Path, ranks: int) -> list[str]:
    return [str(BIN / "deepspeed"), "--no_local_rank", f"--num_gpus={ranks}", str(script), str(marks)]


def _mpirun(script: Path, marks: Path, ranks: int) -> list[str]:
    rank = (
        "RANK=$OMPI_COMM_WORLD_RANK LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE"
        f" exec '{sys.executable}' '{script}' '{marks}'"
    )
    shared = ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={_free_port()}"]
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), *shared, "sh", "-c", rank]


LAUNCHERS: dict[str, Callable[[Path, Path, int], list[str]]] = {
    "launch": _launch,
    "torchrun": _torchrun,
    "DeepSpeed": _deepspeed,
    "mpirun": _mpirun,
    "shell loop": _shell_loop,
}


def installed(chosen: list[str]) -> list[str]:
    """Return those of `chosen` that are installed."""
    is_there = {"DeepSpeed": (BIN / "deepspeed").exists(), "mpirun": shutil.which("mpirun") is not None}
    return [name for name in chosen if is_there.get(name, True)]


def measure_launchers(chosen: list[str], ranks: int, rounds: int, *, with_barrier: bool) -> dict[str, Samples]:
    """Return, for each mark of a rank, the seconds from the command until the last rank reached it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    collected: dict[str, Samples] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "rank.py")
        script.write_text(MARK_START + (MARK_BARRIER if with_barrier else "") + MARK_END)
        marks = Path(folder, "marks")
        marks.mkdir()

        def run(name: str) -> float:
            command = LAUNCHERS[name](script, marks, ranks)
            start_s = time.time()
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            end_s = time.time()
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode != 0:
                raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}")
            collected.setdefault("CPU", {}).setdefault(name, []).append(usage.ru_utime + usage.ru_stime)
            rank_marks = [json.loads((marks / str(rank)).read_text()) for rank in range(ranks)]
            for mark in rank_marks[0]:
                after_s = max(m[mark] for m in rank_marks) - start_s
                collected.setdefault(mark, {}).setdefault(name, []).append(after_s)
            return end_s - start_s

        candidates = {name: (lambda name=name: run(name)) for name in installed(chosen)}
        collected["command ends"] = measure_in_turns(candidates, rounds)
    # The marks of the round that is not counted come first.
    return {mark: {name: values[-rounds:] for name, values in samples.items()} for mark, samples in collected.items()}


def _rows(samples: Samples, base: str) -> list[list[str]]:
    reference = median(samples[base])
    return [
        [name, f"{median(values):.3f} s", spread(values), f"{median(values) / reference:.2f}"]
        for name, values in samples.items()
    ]


TITLES = {
    "process": "the last rank's process exists",
    "script": "the last rank runs the first line of its script",
    "command ends": "the command has ended, ranks that do nothing else",
    "CPU": "CPU seconds of the command and all it waited for",
    "CPU over the loop": "the same, less the shell loop's median",
    "barrier": "all ranks are past their first barrier (torch imported, gloo)",
}


def launchers_table(chosen: list[str], num_ranks: int, rounds: int) -> str:
    """Measure the chosen launchers; return the table of their marks."""
    marks = measure_launchers(chosen, num_ranks, rounds, with_barrier=False)
    base = median(marks["CPU"]["shell loop"])
    marks["CPU over the loop"] = {name: [value - base for value in values] for name, values in marks["CPU"].items()}
    marks["barrier"] = measure_launchers(chosen, num_ranks, rounds, with_barrier=True)["barrier"]
    rows = [[title, *(_cell(marks[mark].get(name)) for name in chosen)] for mark, title in TITLES.items()]
    cores = len(os.sched_getaffinity(0))
    more = f", {num_ranks / cores:.3g} times as many as cores" if num_ranks > cores else ""
    return f"From the command until ..., {num_ranks} ranks on this machine{more}:\n\n{table(['until', *chosen], rows)}"


def _cell(values: list[float] | None) -> str:
    return NOT_INSTALLED if values is None else f"{median(values):.3f} s ({spread(values)})"


def main() -> None:
    """Measure and write the section."""
    parser = argument_parser(__doc__, rounds=10)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS), help="beside the shell loop"
    )
    options = parser.parse_args()
    chosen = [name for name in LAUNCHERS if name in (*options.launchers, "shell loop")]
    page = Section("Start-up", "torch", "click", "deepspeed")
    samples = measure_commands(options.rounds, chosen)
    commands = table(["command", "median", "quartiles", "ratio"], _rows(samples, 'python -c "import click"'))
    parts = [launchers_table(chosen, num_ranks, options.rounds) for num_ranks in options.ranks]
    text = "\n\n".join(["Commands that start no rank:", commands, *parts])
    page.write(rounds_text(options.rounds) + "; ratios of medians", text, options.output)


if __name__ == "__main__":
    main()
