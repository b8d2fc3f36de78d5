"""One rank of a trial of `launch tune`: runs a script for a few optimizer steps, and writes down what they took.

    launch run --module launcher.rehearse.trial STEPS MEMORY script train.py ARGS

Here tensors, peers and devices are real, as in any job. Followed is what the script does; replaced is only that it
saves and loads checkpoints. The report is a line of the rank's output, which reaches the launcher from any host.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import launcher.engine.build
import launcher.engine.watch
from launcher import worker
from launcher.base import env
from launcher.base.errors import LauncherError
from launcher.comm.device import accelerator_type, device_module, map_memory
from launcher.comm.torch_internals import tree_leaves
from launcher.config.schema import Config
from launcher.engine.deepspeed_engine import DeepSpeedEngine
from launcher.engine.engine import Engine
from launcher.planner.tuning import ConfigFacts, RankTrial
from launcher.rehearse.follow import End, Replacements

_BUILDING, _INITIALIZING, _BETWEEN = "building the model", "initialize()", "the script, between the engine's calls"
# What is raised as RuntimeError: words of torch's allocator of a CPU, of oneDNN, gloo, NCCL, cuBLAS and Python.
_NO_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|bad_alloc|out of memory|ALLOC_FAILED|can't start new thread"
)


class Follower:
    """Follows every engine of a script for some optimizer steps."""

    def __init__(self, num_steps: int, memory_bytes: int | None) -> None:
        """num_steps: to be timed, after one more. memory_bytes: all that this rank may take; None: what there is."""
        self._num_wanted = num_steps
        self._memory_bytes = memory_bytes
        self._device = torch.device(accelerator_type() or "cpu")
        self._phase_now = _BUILDING
        self._ended_s: float | None = None  # when the last optimizer step ended
        self.found = RankTrial(
            rank=int(os.environ.get(env.RANK.name, "0")),
            node=int(os.environ.get(env.NODE_RANK.name, "0")),
            host=socket.gethostname(),
            device="cpu",
        )
        self._resident_bytes = _status_bytes("VmRSS")

    @property
    def is_building(self) -> bool:
        """Whether an engine is being built, or could not be."""
        return self._phase_now == _INITIALIZING

    @property
    def _is_cpu(self) -> bool:
        return self._device.type == "cpu"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Follow what the block does, until the last step is taken or there is no memory left."""
        with contextlib.ExitStack() as stack:
            for (owner, name), replacement in self._replacements().items():
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, replacement)
            if self._is_cpu:
                self._bound_host_memory(stack)
            try:
                yield
            except End:
                pass
            except BaseException as error:
                stack.close()  # what follows needs some memory
                if not _is_out_of_memory(error):
                    raise
                self.found.oom_phase = self._phase_now

    def _bound_host_memory(self, stack: contextlib.ExitStack) -> None:
        with contextlib.suppress(OSError):  # the peak from now on: see proc(5)
            Path("/proc/self/clear_refs").write_text("5")
        if self._memory_bytes is not None:
            # A limit counts what malloc has, in use or not. What is freed must leave it at once, or whether a tensor
            # still fits would depend on how free blocks lie: a smaller micro-batch could fail where a larger one fits.
            map_memory()
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            wanted = _status_bytes("VmData") + self._memory_bytes
            bounds = [each for each in (wanted, soft, hard) if each != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), hard))
            stack.callback(resource.setrlimit, resource.RLIMIT_DATA, (soft, hard))

    def _replacements(self) -> Replacements:
        """Return what is not as in a run that is not followed."""
        build = launcher.engine.build
        bounded = {(build, "keep_freed_memory"): lambda: False} if self._memory_bytes is not None else {}
        return {
            **bounded,
            (build, "initialize"): self._initialize(build.initialize),
            (build, "_batch"): self._batch(build._batch),
            (build, "_prepare_device"): self._prepare_device(build._prepare_device),
            (launcher.engine.watch.Watch, "phase"): self._phase(launcher.engine.watch.Watch.phase),
            (Engine, "forward"): self._forward(Engine.forward),
            (Engine, "save_checkpoint"): lambda *_, **__: True,
            (Engine, "load_checkpoint"): lambda *_, **__: (None, {}),
            (DeepSpeedEngine, "save_16bit_model"): lambda *_, **__: True,
        }

    def _initialize(self, initialize: Callable[..., Any]) -> Callable[..., Any]:
        def initialize_and_follow(*args: Any, **kwargs: Any) -> Any:
            self._phase_now = _INITIALIZING
            found = initialize(*args, **kwargs)
            self.found.has_loader = self.found.has_loader or found[2] is not None
            self._phase_now = _BETWEEN
            return found

        return initialize_and_follow

    def _batch(self, solve: Callable[..., Any]) -> Callable[..., Any]:
        """Return what notes the settings of an engine, before it takes the memory that there may not be."""

        def solve_and_note(settings: Config, sizes: Any) -> Any:
            batch, zero = solve(settings, sizes), settings.zero_optimization
            self.found.facts = ConfigFacts(
                int(zero.stage), str(zero.offload_optimizer.device), str(zero.offload_param.device),
                batch.micro_batch_size, batch.accumulation_steps, sizes.data,
                has_pipeline=sizes.pipeline > 1, keeps_batch=isinstance(settings.train_batch_size, int),
            )  # fmt: skip
            return batch

        return solve_and_note

    def _prepare_device(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Return what bounds the memory of the rank's GPU, which is known now; what it has already counts."""

        def prepare_and_bound(settings: Config, group: Any) -> None:
            prepare(settings, group)
            self._device = group.device
            if self._memory_bytes is not None and group.device.type != "cpu":
                module = device_module(group.device)
                whole_bytes = module.get_device_properties(group.device).total_memory
                module.set_per_process_memory_fraction(min(1.0, self._memory_bytes / whole_bytes), group.device)

        return prepare_and_bound

    def _forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_forward(engine: Engine, *inputs: Any, **kwargs: Any) -> Any:
            if self.found.input_shape is None:
                shapes = [list(leaf.shape) for leaf in tree_leaves((inputs, kwargs)) if isinstance(leaf, Tensor)]
                self.found.input_shape = next(filter(None, shapes), None)
            return forward(engine, *inputs, **kwargs)

        return note_and_forward

    def _phase(self, phase: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def follow(watch: Any, name: str, **options: bool) -> Iterator[None]:
            before, self._phase_now = self._phase_now, name
            with phase(watch, name, **options):
                yield
            self._phase_now = before  # not after an error: it says where that was
            if name == "step":
                self._end_step()

        return follow

    def _end_step(self) -> None:
        """Note the time since the end of the step before. All ranks end the script at this place.

        At the next forward some would wait there for transfers of others that have left, as stages of a pipeline do.
        """
        if not self._is_cpu:
            device_module(self._device).synchronize(self._device)
        now_s = time.perf_counter()
        if self._ended_s is not None:
            self.found.steps_s.append(now_s - self._ended_s)
        self._ended_s = now_s
        if len(self.found.steps_s) == self._num_wanted:
            raise End

    def report(self) -> RankTrial:
        """Return what was found until now."""
        if self._is_cpu:
            self.found.peak_bytes = max(0, _status_bytes("VmHWM") - self._resident_bytes)
        elif device_module(self._device).is_initialized():
            module = device_module(self._device)
            self.found.device = str(module.get_device_name(self._device))
            self.found.peak_bytes = module.max_memory_allocated(self._device)
            self.found.reserved_bytes = module.max_memory_reserved(self._device)
        return self.found


def _status_bytes(name: str) -> int:
    """Return a size from /proc/self/status: VmRSS (resident), VmHWM (its peak), VmData (what RLIMIT_DATA bounds)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return 0


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, says that there is no memory left."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError | OSError) and _NO_MEMORY.search(str(error)):
            return True
        seen.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _become_plain() -> None:
    """Leave `__main__` as the script would find it: `python -m` has put this module's names and spec there."""
    namespace = vars(sys.modules["__main__"])
    for name in [name for name in namespace if not name.startswith("__")]:
        del namespace[name]
    namespace.update(__doc__=None, __spec__=None, __package__=None)


def main() -> None:
    """Run the script that `sys.argv` names, and report. Every rank must call it.

    Out of memory, or refused by the engine, the rank ends at once with code 1: it cannot wait for its peers.
    """
    steps, memory, kind, target = sys.argv[1:5]
    sys.argv[:] = [target, *sys.argv[5:]]
    output = os.dup(1)  # whatever the script does to its own
    if kind == "script" and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]  # which `python -m` has put there, and python does not for a script
    _become_plain()
    follower = Follower(int(steps), int(memory) or None)
    try:
        with follower.running():
            worker.run_target(kind, target)
    except LauncherError as error:
        if not follower.is_building:  # an error of the script, which is shown with its place
            raise
        follower.found.refused = str(error)
    except SystemExit as end:
        if end.code:
            raise
    report = follower.report()
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(output, f"\n{report.as_line()}\n".encode())
    if report.oom_phase is not None or report.refused is not None:
        os._exit(1)


if __name__ == "__main__":
    from launcher.rehearse import trial

    trial.main()
