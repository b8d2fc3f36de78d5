"""Kill a training while it saves, again and again: the newest checkpoint always loads, and the losses are the same.

    python tests/soak/checkpoint_kills.py [--count 300] [--seed 0] [--output FILE]

Each round starts 2 ranks, which load what `latest` names, train and save, step after step: under new tags or under one
that is there already, with or without `checkpoint.async`. At a random instant of a save a rank or all of them are
killed, or one rank's writes fail with ENOSPC or EIO; or `launch` has started the ranks on two nodes, and all processes
of one node are killed at once: its agent and its rank. Nodes are addresses of this machine that an sshd of our own
serves; without sshd they are left out. What the next round loads must be no older than the last save that was reported
as done, and every loss must be, bit by bit, that of a training that was never interrupted. Writes a section of
docs/benchmarks.md; exit code 1 when any round went wrong.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # what writes sections of pages
import torch
from common import ROOT, Section, argument_parser, median, table
from harness.launch import sshd
from harness.ports import free_port
from torch import Tensor, nn

import launcher
from launcher.base.errors import CheckpointError
from launcher.base.exit_codes import ExitCode
from launcher.base.processes import descendants, die_with_parent
from launcher.checkpoint_files.folder import committed_in, latest_tag

RANKS, WIDTH, BATCH = 2, 512, 8
NUM_STEPS = 400  # of the training that is not interrupted; others begin anew before its end
HANG_S = 60.0
KEPT = 3  # checkpoints; older ones are removed between rounds
# A round with nodes takes as long as several others.
VICTIMS = (*("rank 0", "rank 1", "all ranks", "ENOSPC", "EIO") * 2, "node 0", "node 1")
NODES = ("127.0.0.2", "127.0.0.3")
SAME_TAG = "same"


@dataclass(frozen=True)
class Round:
    """What happens to one start of the training."""

    victim: str
    is_async: bool
    is_same_tag: bool
    bad_rank: int  # whose writes fail, for ENOSPC and EIO
    bad_call: int  # of the writes of one save

    @property
    def name(self) -> str:
        return f"{self.victim}, {'async' if self.is_async else 'sync'}, {'same' if self.is_same_tag else 'new'} tag"


# ---- a rank ----


class Net(nn.Module):
    """Four layers: enough bytes for a save to take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, WIDTH] -> mean loss, fp32."""
        hidden = x
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return (hidden - x.roll(1, 1)).square().mean()


class Rank:
    """One process of the training. It says what it does as lines of JSON."""

    def __init__(self, rank: int, pipe: int, *, is_async: bool = False) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self._pipe = pipe
        launcher.init_distributed()
        torch.manual_seed(3)
        config = {
            "train_micro_batch_size_per_gpu": BATCH // RANKS,
            "steps_per_print": 0,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": WIDTH * WIDTH},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "checkpoint": {"async": is_async},
        }
        self.engine = launcher.initialize(model=Net(), config=config)[0]

    def say(self, **what: Any) -> None:
        """Write a line; one write of less than a page is not divided."""
        if self.rank == 0:
            os.write(self._pipe, json.dumps(what).encode() + b"\n")

    def train(self) -> None:
        """Take a step. Its data depends on its number alone."""
        number = self.engine.global_steps
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = self.engine(x[self.rank * BATCH // RANKS : (self.rank + 1) * BATCH // RANKS])
        self.engine.backward(loss)
        self.engine.step()
        total = loss.detach().double().reshape(1)
        torch.distributed.all_reduce(total)
        self.say(step=number, loss=total.item().hex())

    def save(self, root: Path, plan: Round) -> None:
        """Save, and say so before and after. With `checkpoint.async` a step is taken beside it."""
        step = self.engine.global_steps
        tag = SAME_TAG if plan.is_same_tag else None
        self.say(saving=step)
        try:
            self.engine.save_checkpoint(root, tag)
            if plan.is_async:
                self.train()
            self.engine.wait_for_checkpoint()
            self.say(saved=step)
        except CheckpointError as error:
            self.say(failed=step, error=str(error)[:500])


def interrupted(rank: int, pipe: int, root: Path, plan: Round) -> None:
    """Load, train and save until the process is killed."""
    run = Rank(rank, pipe, is_async=plan.is_async)
    path, _ = run.engine.load_checkpoint(root)
    run.say(loaded=run.engine.global_steps if path else None)
    run.train()
    if plan.victim in ("ENOSPC", "EIO"):
        with failing_writes(plan, rank):
            run.save(root, plan)
    while True:
        run.train()
        run.save(root, plan)


def uninterrupted(rank: int, pipe: int, num_steps: int) -> None:
    """Train to the end."""
    run = Rank(rank, pipe)
    for _ in range(num_steps):
        run.train()


@contextlib.contextmanager
def failing_writes(plan: Round, rank: int) -> Iterator[None]:
    """Have the n-th write or fsync of one rank fail, and those after it."""
    number = getattr(errno, plan.victim)
    num_calls = 0

    def instead_of(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if rank == plan.bad_rank and num_calls > plan.bad_call:
                raise OSError(number, os.strerror(number))
            return real(*arguments)

        return call

    with mock.patch("os.pwrite", instead_of(os.pwrite)), mock.patch("os.fsync", instead_of(os.fsync)):
        yield


def on_a_node(pipe: str, root: str, plan: str) -> None:
    """Do what `interrupted` does, in a process that `launch` has started. pipe: the path of one; plan: as JSON."""
    rank = int(os.environ["RANK"])
    Path(pipe).with_name(f"pid-{rank}").write_text(str(os.getpid()))
    interrupted(rank, os.open(pipe, os.O_WRONLY), Path(root), Round(**json.loads(plan)))


# ---- both of them ----


class Job(ABC):
    """Two ranks, and a pipe for what rank 0 says."""

    problem = ""  # after `end()`: what was wrong about it

    def __init__(self, pipe: int) -> None:
        """pipe: its end for reading."""
        self._pipe, self._rest = pipe, b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(pipe, selectors.EVENT_READ)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the ranks

    def messages(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        """Yield what rank 0 says, until `timeout_s` have passed or all ranks have ended."""
        end_s = time.monotonic() + timeout_s
        while self._selector.select(max(0.0, end_s - time.monotonic())):
            data = os.read(self._pipe, 65536)
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from map(json.loads, lines)
            if not data:
                return

    @abstractmethod
    def kill(self, victim: str) -> None:
        """Kill `victim`, one of `VICTIMS`."""

    def end(self) -> str:
        """Have nothing be left. Returns what the ranks wrote."""
        self._selector.close()
        os.close(self._pipe)
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-3000:]


class Ranks(Job):
    """Two forks of this process, which has loaded torch and started no thread."""

    def __init__(self, body: Callable[..., None], *arguments: Any) -> None:
        """body: called on each as `body(rank, pipe, *arguments)`."""
        read, write = os.pipe()
        super().__init__(read)
        port, parent = free_port(), os.getpid()
        self.pids = [self._fork(rank, port, parent, write, body, arguments) for rank in range(RANKS)]
        os.close(write)

    def _fork(self, rank: int, port: int, parent: int, pipe: int, body: Any, arguments: tuple[Any, ...]) -> int:
        pid = os.fork()
        if pid:
            return pid
        die_with_parent(parent)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
        os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}})
        os.dup2(self._log.fileno(), 1)
        os.dup2(self._log.fileno(), 2)
        try:
            body(rank, pipe, *arguments)
        except BaseException:  # noqa: BLE001  # it is in the log
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)

    def kill(self, victim: str) -> None:
        for rank in {"rank 0": [0], "rank 1": [1]}.get(victim, [0, 1]):
            os.kill(self.pids[rank], signal.SIGKILL)

    def end(self) -> str:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return super().end()


class Nodes(Job):
    """Two nodes of one rank each, which `launch` has started."""

    def __init__(self, server: sshd.LoopbackSshd, root: Path, plan: Round) -> None:
        self._folder = Path(tempfile.mkdtemp())
        pipe = self._folder / "pipe"
        os.mkfifo(pipe)
        super().__init__(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
        # Until rank 0 has opened it: a pipe that no one writes to seems to have ended.
        self._writer = os.open(pipe, os.O_WRONLY)
        script = self._folder / "script.py"
        words = (str(pipe), str(root), json.dumps(asdict(plan)))
        script.write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
            f"from soak import checkpoint_kills\ncheckpoint_kills.on_a_node(*{words!r})\n"
        )
        hostfile = self._folder / "hostfile"
        hostfile.write_text("".join(f"{node} slots=1\n" for node in NODES))
        options = ["--hostfile", str(hostfile), "--ssh_config", str(server.ssh_config), "--grace", "1"]
        self._launch = subprocess.Popen(
            [sys.executable, "-m", "launcher", *options, str(script)],
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def kill(self, victim: str) -> None:
        rank = int((self._folder / f"pid-{victim[-1]}").read_text())
        agent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in (agent, *descendants(agent)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> str:
        """Wait for `launch`, which ends the other node. Returns what it wrote."""
        os.close(self._writer)
        try:
            code = self._launch.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self._launch.terminate()
            code = self._launch.wait()
        shutil.rmtree(self._folder)
        if code != ExitCode.UNREACHABLE:
            self.problem = f"launch ended with {code}"
        return super().end()


# ---- rounds ----


@dataclass
class Story:
    """What is known of the training so far."""

    root: Path
    expected: list[str]  # losses, by step
    saved: int = 0  # the newest step of which a save was reported as done
    begun: int = 0  # and begun
    server: sshd.LoopbackSshd | None = None  # of nodes
    save_s: list[float] = field(default_factory=lambda: [0.1])
    problems: list[str] = field(default_factory=list)
    failures: int = 0  # saves that said that they failed

    def hear(self, message: dict[str, Any]) -> None:
        """Take a message in."""
        if "loss" in message and message["loss"] != self.expected[message["step"]]:
            self.problems.append(f"the loss of step {message['step']} is another")
        if "loaded" in message:
            loaded = message["loaded"] or 0
            if not self.saved <= loaded <= self.begun:
                self.problems.append(f"step {loaded} was loaded, after {self.saved} had been saved")
            self.saved = loaded
        self.begun = max(self.begun, message.get("saving", 0))
        self.saved = max(self.saved, message.get("saved", 0))
        self.failures += "failed" in message

    def begin_anew(self) -> None:
        """Forget all, and remove what was saved."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.saved = self.begun = 0


def one_round(story: Story, plan: Round, chance: random.Random) -> bool:
    """Start, save, kill. Returns whether it was killed within a save."""
    if story.begun > len(story.expected) - 30 or (plan.is_same_tag and latest_tag(story.root) not in (None, SAME_TAG)):
        story.begin_anew()
    is_node = plan.victim.startswith("node") and story.server is not None
    ranks = Nodes(story.server, story.root, plan) if is_node else Ranks(interrupted, story.root, plan)
    num_before = len(story.problems)
    num_saves = chance.choice((1, 1, 2)) + (plan.victim in ("ENOSPC", "EIO"))
    begin_s = 0.0
    for message in ranks.messages(HANG_S):
        story.hear(message)
        if "saved" in message or "failed" in message:
            story.save_s.append(time.monotonic() - begin_s)
        if "saving" in message:
            begin_s = time.monotonic()
            num_saves -= 1
            if not num_saves:
                break
    else:
        story.problems.append(f"{plan.name}: it hung or ended:\n{ranks.end()}")
        return False
    for message in ranks.messages(chance.random() * 1.3 * median(story.save_s[-30:])):
        story.hear(message)
    ranks.kill(plan.victim)
    for message in ranks.messages(0.05):  # then the launcher ends the other rank
        story.hear(message)
    log = ranks.end()
    story.problems += [ranks.problem] if ranks.problem else []
    if len(story.problems) > num_before:
        story.problems[-1] = f"{plan.name}: {story.problems[-1]}\n{log}"
    return story.begun > story.saved


def look_at(story: Story) -> None:
    """Look at the folder as a new process would; remove old checkpoints."""
    try:
        tag = latest_tag(story.root)
    except CheckpointError as error:
        story.problems.append(f"latest cannot be read: {error}")
        return
    found = committed_in(story.root)
    if tag is not None and tag not in {each.path.name for each in found}:
        story.problems.append(f"latest names {tag}, which is not a checkpoint")
    for each in found[:-KEPT]:
        if each.path.name != tag:
            shutil.rmtree(each.path)


def losses_of_reference(num_steps: int) -> list[str]:
    """Return the losses of the training that is not interrupted."""
    ranks = Ranks(uninterrupted, num_steps)
    losses = [message["loss"] for message in ranks.messages(600.0)]
    log = ranks.end()
    if len(losses) != num_steps:
        sys.exit(f"the training without kills ended early:\n{log}")
    return losses


def main() -> None:
    """Kill, and write what happened."""
    parser = argument_parser(__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where checkpoints go; default: a temporary folder")
    options = parser.parse_args()
    page = Section("Kills during saves", "torch")
    chance, start_s = random.Random(options.seed), time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    within: collections.Counter[str] = collections.Counter()
    wrong: collections.Counter[str] = collections.Counter()
    why_no_nodes = sshd.available()
    victims = [each for each in VICTIMS if not (why_no_nodes and each.startswith("node"))]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))
        server = None if why_no_nodes else stack.enter_context(sshd.LoopbackSshd(Path(folder, "sshd")))
        num_steps = min(NUM_STEPS, 40 + 6 * options.count)
        story = Story(Path(folder, "saved"), losses_of_reference(num_steps), server=server)
        for number in range(options.count):
            if number % 20 == 0:
                sys.stderr.write(f"{number} of {options.count}, {time.monotonic() - start_s:.0f} s\n")
            plan = Round(
                chance.choice(victims),
                chance.random() < 0.5,
                chance.random() < 0.5,
                chance.randrange(RANKS),
                chance.randrange(20),
            )
            num_before = len(story.problems)
            within[plan.name] += one_round(story, plan, chance)
            look_at(story)
            counts[plan.name] += 1
            wrong[plan.name] += len(story.problems) - num_before
        last = Round("rank 0", False, False, 0, 0)
        one_round(story, last, chance)  # what the last kill has left is loaded too
        look_at(story)
    rows = [[name, str(counts[name]), str(within[name]), str(wrong[name] or "none")] for name in sorted(counts)]
    columns = ["what happened", "times", "of these before the end of a save", "unreadable, lost or another loss"]
    text = (
        f"{RANKS} ranks, ZeRO-2, AdamW, {4 * (WIDTH + 1) * WIDTH:,} parameters in fp32; a save takes"
        f" {1000 * median(story.save_s):.0f} ms (median); {story.failures} saves failed with an error and the training"
        f" continued; {time.monotonic() - start_s:.0f} s in all; seed {options.seed}.\n\n{table(columns, rows)}\n\n"
        f"{f'No node was killed: {why_no_nodes}. ' if why_no_nodes else ''}"
        f"Problems: {len(story.problems) or 'none'}."
    )
    page.write(f"{options.count} rounds, one kill each", text, options.output)
    sys.stderr.write("\n".join(story.problems[:20]))
    sys.exit(bool(story.problems))


if __name__ == "__main__":
    main()
