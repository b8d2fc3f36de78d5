"""Whether verdicts are right: injected faults are named with rank and cause, healthy runs have none.

    python tests/soak/verdicts.py [--places local,ssh,srun] [--only KIND] [--healthy N] [--seconds S] [--output FILE]

Each fault of `launch --fault` in jobs with the engine and with plain DDP; then N healthy runs of ten kinds in turn. A
fault is named where `report.json` and the terminal have it with the right rank, and no other verdict beside it. Exit
code 1 when any is not.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # what writes sections of pages
from common import Section, argument_parser, table
from harness.launch.command import Launch
from harness.launch.slurm import LoopbackSlurm
from harness.launch.sshd import LoopbackSshd

FAULT_STEP = 40
LIMIT_S = 400.0

SCRIPT = r"""
import os, sys, time, json, tempfile
import torch, torch.distributed as dist
import launcher
kind, seconds = sys.argv[1], float(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
model = torch.nn.Sequential(*(m for _ in range(4) for m in (torch.nn.Linear(384, 384), torch.nn.GELU())))
data = torch.utils.data.TensorDataset(torch.randn(64, 128, 384))  # of whole batches: they cost nothing
workers = 2 if "workers" in kind else 0
is_engine = kind.startswith("zero")
folder = os.path.join(tempfile.gettempdir(), "verdicts_" + os.environ["LAUNCH_JOB_ID"])
os.makedirs(folder, exist_ok=True)
if is_engine:
    config = {"train_micro_batch_size_per_gpu": 128, "zero_optimization": {"stage": int(kind[4])},
              "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}
    if "accumulation" in kind:
        config["gradient_accumulation_steps"] = 2
    if "bf16" in kind:
        config["bf16"] = {"enabled": True}
    engine, optimizer, *_ = launcher.initialize(model=model, config=config)
else:
    dist.init_process_group("gloo")
    engine = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
sampler = torch.utils.data.distributed.DistributedSampler(data)
options = {"num_workers": workers, "persistent_workers": bool(workers)}
loader = torch.utils.data.DataLoader(data, batch_size=1, sampler=sampler, **options)
flags, step, end_s = torch.zeros(2), 0, None
dtype = torch.bfloat16 if "bf16" in kind else torch.float32
while True:
    for (x,) in loader:
        x = x[0].to(dtype)
        loss = (engine(x) - x).float().square().mean()
        if is_engine:
            engine.backward(loss)
            engine.step()
        else:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            launcher.heartbeat()
        step += 1
        end_s = end_s or time.monotonic() + seconds
        flags[0], flags[1] = time.monotonic() > end_s, launcher.preempted()
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        if "saves" in kind and step % 30 == 0:
            if is_engine:
                engine.save_checkpoint(folder)
            elif rank in (0, world - 1):  # the last one, too: there a fault is rehearsed
                torch.save(model.state_dict(), os.path.join(folder, f"{rank}.pt"))
        if "evaluates" in kind and step % 60 == 0 and rank == 0:
            with torch.no_grad():
                for _ in range(10):
                    model(x)
        if flags[1]:
            sys.exit(launcher.EXIT_REQUEUE)
        if flags[0]:
            break
    if flags[0]:
        break
print("done", step, flush=True)
dist.barrier()
"""

HEALTHY = (
    "zero0", "zero1", "zero2", "zero3", "zero2 accumulation", "zero1 bf16", "zero2 saves",
    "plain", "plain workers", "plain evaluates",
)  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """What a fault must come to."""

    rules: tuple[str, ...]  # one of them is the verdict
    words: str  # on the terminal, {rank} in it
    code: int = 0
    options: tuple[str, ...] = ()


EXPECTED = {
    "kill": Expected(("failure",), r"✗ rank {rank} .*killed by SIGKILL", 137),
    "hang": Expected(("hang", "silent"), r"✗ rank {rank} .*no progress for", 124, ("--hang-timeout", "40")),
    "slow": Expected(("straggler",), r"! rank {rank}\b.* is slow"),
    "diskfull": Expected(("failure",), r"✗ rank {rank} .* failed", 1),
    "preempt": Expected((), r"about to be preempted", 75),
    "input": Expected(("input",), r"! rank {rank}\b.* waits .* for the next batch"),
    "gc": Expected(("gc",), r"! garbage collection of rank {rank}\b"),
    "nan": Expected(("bad_data",), r"! the loss of rank {rank}\b.* is not finite"),
}


@contextlib.contextmanager
def place(name: str, folder: Path) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Yield the options and the environment of jobs with two ranks or more at a place."""
    with contextlib.ExitStack() as stack:
        if name == "ssh":
            sshd = stack.enter_context(LoopbackSshd())
            hosts = folder / "hosts"
            hosts.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
            yield ("--hostfile", str(hosts), "--ssh_config", str(sshd.ssh_config), "--force_multi"), {}
        elif name == "srun":
            slurm = stack.enter_context(LoopbackSlurm(folder / "slurm"))
            # No resolver knows the names of its nodes, which are all this machine.
            yield ("--master_addr", "127.0.0.1"), stack.enter_context(slurm.allocation("--gres=gpu:1"))
        else:
            yield ("--num_gpus", "2"), {}


@dataclass(frozen=True)
class Run:
    """A job that has ended."""

    code: int
    err: str
    report: dict[str, Any]
    num_steps: int

    @property
    def verdicts(self) -> list[tuple[str, int | None]]:
        """Name and rank of each verdict."""
        return [(each["name"], each["rank"]) for each in self.report.get("verdicts", [])]


def run(folder: Path, kind: str, seconds: float, options: tuple[str, ...], env: dict[str, str]) -> Run:
    """Run a job of a kind to its end."""
    folder.mkdir(parents=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    job = Launch(folder, "--plain", *options, script, kind, str(seconds), env={**env, "TMPDIR": str(folder)})
    code = job.wait(LIMIT_S).code
    (path,) = folder.glob("runs/*/report.json")
    report = json.loads(path.read_text())
    return Run(code, job.err, report, (report.get("training") or {}).get("num_steps", 0))


def problem_of(fault: str, done: Run) -> str:
    """Say what is wrong about the end of a job with a fault on its last rank; "" when nothing is."""
    expected, rank = EXPECTED[fault], done.report["world_size"] - 1
    if done.code != expected.code:
        return f"exit code {done.code} instead of {expected.code}"
    if not re.search(expected.words.replace("{rank}", str(rank)), done.err):
        return f"the terminal does not say it; verdicts: {done.verdicts}"
    wanted = [(name, rank) for name in expected.rules]
    if expected.rules and not any(each in wanted for each in done.verdicts):
        return f"verdicts: {done.verdicts}"
    others = [each for each in done.verdicts if each not in wanted]
    return f"others beside it: {others}" if others else ""


def main() -> None:
    """Run the matrix and the healthy runs, and write what they came to."""
    parser = argument_parser(__doc__)
    parser.add_argument("--places", default="local,ssh,srun")
    parser.add_argument("--only", default="", help="faults whose name contains this; none: no fault")
    parser.add_argument("--kinds", default="zero2,plain")
    parser.add_argument("--healthy", type=int, default=50, help="runs without a fault")
    parser.add_argument("--seconds", type=float, default=40.0, help="of training, at least, in each run")
    options = parser.parse_args()
    page, rows, num_wrong = Section("Verdicts"), [], 0
    with tempfile.TemporaryDirectory() as text:
        root = Path(text)
        for name in options.places.split(","):
            with place(name, root) as (given, env):
                for kind in options.kinds.split(","):
                    for fault in [each for each in EXPECTED if options.only in each]:
                        wanted = f"{kind} saves" if fault == "diskfull" else kind
                        more = (*given, "--fault", f"{fault}@{FAULT_STEP}", *EXPECTED[fault].options)
                        done = run(root / f"{name}_{kind}_{fault}", wanted, options.seconds, more, env)
                        problem = problem_of(fault, done)
                        num_wrong += bool(problem)
                        rows.append([fault, name, kind, problem or "named"])
                        _say(rows[-1], done)
        num_clean = 0
        for number in range(options.healthy):
            kind = HEALTHY[number % len(HEALTHY)]
            done = run(root / f"healthy_{number}", kind, options.seconds, ("--num_gpus", "2"), {})
            num_clean += not done.verdicts and done.code == 0
            _say(["healthy", "local", kind, str(done.verdicts)], done)
    num_wrong += options.healthy - num_clean
    named = sum(row[-1] == "named" for row in rows)
    text = f"{named} of {len(rows)} faults named; {num_clean} of {options.healthy} healthy runs without a verdict.\n\n"
    if options.healthy == 0:
        text = text.replace("; 0 of 0 healthy runs without a verdict", "")
    page.write("Each cell is one run", text + table(["fault", "place", "ranks run", "result"], rows), options.output)
    sys.exit(num_wrong > 0)


def _say(row: list[str], done: Run) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {' · '.join(row)} ({done.num_steps} steps, code {done.code})\n")
    sys.stderr.write("".join(f"    {line}\n" for line in done.err.splitlines() if line.startswith("! ")))


if __name__ == "__main__":
    main()
