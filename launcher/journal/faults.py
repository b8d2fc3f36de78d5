"""The faults of `--fault`: what the option's text means, and how a rank injects each after a step.

Each is injected by what causes it in life: a signal, a sleep, a limit of the kernel. The journal has it before.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
import time

from launcher.base import env
from launcher.base.record import Record
from launcher.journal.rank import own_journal
from launcher.journal.records import DATA
from launcher.journal.steps import step_clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LEAST_S, _MOST_S = 0.02, 60.0  # of a sleep in place of a step
_FILE_BYTES = 4096
_NUM_HELD = 300_000  # objects that the garbage collector has to look at


PREEMPT = "preempt"
KINDS = {
    "kill": "the rank is killed by SIGKILL",
    "hang": "its main thread stops for good",
    "slow": "each following step takes twice its time",
    "diskfull": "its files cannot grow beyond 4 KiB from then on: saves fail with `File too large`",
    PREEMPT: "the job gets the notice of preemption, as from a scheduler",
    "input": "each following batch comes a step's time late",
    "gc": "each following step has pauses of the garbage collector as long as itself",
    "nan": "the output of a module is NaN in the next forward",
}


class Fault(Record):
    """One fault."""

    kind: str
    step: int  # after which it is done
    rank: int | None = None  # None: the last one

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}" + ("" if self.rank is None else f":{self.rank}")


def parse_fault(text: str) -> Fault:
    """Return what `kill@20:1` means. Raises: ValueError."""
    kind, at, rest = text.partition("@")
    step, colon, rank = rest.partition(":")
    if kind not in KINDS:
        raise ValueError(f"there is no fault {kind!r:.40}: it is one of {', '.join(KINDS)}")
    is_number = [part.isascii() and part.isdigit() and len(part) < 16 for part in (step, rank if colon else "0")]
    if not at or not all(is_number) or int(step) < 1:
        raise ValueError(f"expected {kind}@STEP or {kind}@STEP:RANK, such as {kind}@20:1, got {text!r:.80}")
    return Fault(kind, int(step), int(rank) if colon else None)


# ---- In a rank ----


class Faults:
    """The faults of this rank. `after_step` is called after each of its steps, or heartbeats."""

    def __init__(self) -> None:
        rank = int(os.environ.get(env.RANK.name, "0"))
        found = [parse_fault(text) for text in os.environ.get(env.FAULTS.name, "").split(",") if text]
        self._waiting = [fault for fault in found if fault.rank == rank]
        self._slows = self._collects = self._delays = self._has_loader = False
        self._held: list[list[int]] = []
        self._ended_s = time.perf_counter()  # the last step, with what was added to it
        self._step_s = _LEAST_S  # the last one's time without that
        self._late_s = 0.0  # how long its batches were made to come late

    def after_step(self, step: int) -> None:
        """Do what is due after this step, and again what follows each step since."""
        self._step_s = min(_MOST_S, max(_LEAST_S, time.perf_counter() - self._ended_s - self._late_s))
        self._late_s = 0.0
        if self._slows or (self._delays and not self._has_loader):
            time.sleep(self._step_s)
        if self._collects:
            self._collect()
        for fault in [fault for fault in self._waiting if step >= fault.step]:
            self._waiting.remove(fault)
            self._begin(fault, step)
        self._ended_s = time.perf_counter()

    def _begin(self, fault: Fault, step: int) -> None:
        journal = own_journal()
        if journal is not None:
            journal.add("fault", name=fault.kind, step=step)
            with contextlib.suppress(OSError):
                journal.flush()
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "hang":
            while True:
                time.sleep(_MOST_S)
        elif fault.kind == "slow":
            self._slows = True
        elif fault.kind == "diskfull":
            # The kernel's limit holds for files that C++ writes, too. Python ignores the signal that goes with it.
            resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        elif fault.kind == "gc":
            self._held = [[] for _ in range(_NUM_HELD)]
            self._collects = True
        elif fault.kind == "input":
            self._delay_input()
        elif fault.kind == "nan":
            _spoil_next_output()

    def _collect(self) -> None:
        until_s = time.perf_counter() + self._step_s
        while time.perf_counter() < until_s:
            gc.collect()

    def _delay_input(self) -> None:
        """Let each batch of a DataLoader be waited for, where there is one; else the script waits between its steps."""
        self._delays = True
        dataloader: Any = sys.modules.get("torch.utils.data.dataloader")
        if dataloader is None:
            return
        iterator = dataloader._BaseDataLoaderIter
        fetch, waiting = iterator.__next__, step_clock().inside(DATA)

        def fetch_late(loader: Any) -> Any:
            self._has_loader = True
            with waiting:
                time.sleep(self._step_s)
                self._late_s += self._step_s
                return fetch(loader)

        iterator.__next__ = fetch_late


def _spoil_next_output() -> None:
    """Make the next output of a module that is trained NaN, once."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return

    def spoil(_module: Any, _inputs: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not (output.requires_grad and output.is_floating_point()):
            return None
        handle.remove()
        return output * float("nan")

    handle = torch.nn.modules.module.register_module_forward_hook(spoil)
