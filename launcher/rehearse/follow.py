"""Follow an engine through its steps: memory by phase and kind, and the collectives that it begins.

The same in a rehearsal and in a real run, so that the one can be held against the other.
"""

from __future__ import annotations

import contextlib
import os
import resource
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

import launcher.comm.device
import launcher.engine.build
import launcher.engine.watch
from launcher.comm import observe
from launcher.comm.mesh import current_mesh
from launcher.comm.torch_internals import tree_leaves
from launcher.engine.facts import left_facts
from launcher.planner.rehearsal import DeviceWork, RankRehearsal
from launcher.rehearse.collectives import CollectiveRecorder
from launcher.rehearse.ledger import (
    BACKWARD,
    BETWEEN,
    BUFFERS,
    FORWARD,
    GRADIENTS,
    HOST,
    INITIALIZING,
    OPTIMIZER,
    PARAMETERS,
    STEP,
    Ledger,
)
from launcher.rehearse.torch_tools import DispatchMode
from launcher.sharding.layout import unsharded_numel
from launcher.sharding.mesh import AXES

_PHASES = {"forward": FORWARD, "backward": BACKWARD, "step": STEP}
_KINDS = {"parameters": PARAMETERS, "gradients": GRADIENTS, "optimizer": OPTIMIZER}
Replacements = dict[tuple[Any, str], Any]  # (owner, name of an attribute) -> what it is meanwhile


class End(BaseException):
    """Ends a script after the last step that is wanted."""


class Follower:
    """One rank, and what is found about it. It follows every engine that the script builds."""

    def __init__(self, found: RankRehearsal, num_steps: int) -> None:
        """num_steps: after which the script ends."""
        self.found = found
        self._num_wanted = num_steps
        self.ledger = Ledger()
        self.recorder = CollectiveRecorder(self.ledger)
        self.work: dict[str, DeviceWork] = {}  # what a device would do in the last step, by phase
        self.reads: Counter[str] = Counter()  # numbers that the host has waited for in it, by file:line
        self._engines: list[Any] = []
        self._runtimes: weakref.WeakSet[Any] = weakref.WeakSet()
        self.ledger.lent_bytes = lambda: sum(each.buffers.lent_bytes for each in self._runtimes)

    @contextlib.contextmanager
    def running(self, mode: DispatchMode) -> Iterator[None]:
        """Follow what the block does, until the last step is taken. mode: sees the operations of torch."""
        with contextlib.ExitStack() as stack:
            observe.listeners.append(self.recorder)
            stack.callback(observe.listeners.remove, self.recorder)
            for (owner, name), replacement in self.replacements().items():
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, replacement)
            stack.enter_context(mode)
            with contextlib.suppress(End):
                yield

    def replacements(self) -> Replacements:
        """Return what is not as in a run that is not followed."""
        return {
            (launcher.engine.build, "initialize"): self._initialize(launcher.engine.build.initialize),
            (launcher.engine.watch.Watch, "phase"): lambda _, name, **__: self._phase(name),
            (launcher.comm.device.DeviceRuntime, "__post_init__"): self._see_runtime(),
            (launcher.comm.device.HostDeviceCopier, "empty"): self._host_memory(),
        }

    def _initialize(self, initialize: Callable[..., Any]) -> Callable[..., Any]:
        def initialize_and_follow(*args: Any, **kwargs: Any) -> Any:
            with self.ledger.within(INITIALIZING):
                found = initialize(*args, **kwargs)
                self._engines.append(found[0])
                self._assign_all()
            self.ledger.phase = BETWEEN
            self.recorder.step = self.found.num_steps + 1
            return found

        return initialize_and_follow

    def _see_runtime(self) -> Callable[[Any], None]:
        post_init = launcher.comm.device.DeviceRuntime.__post_init__

        def see(runtime: Any) -> None:
            post_init(runtime)
            self._runtimes.add(runtime)

        return see

    def _host_memory(self) -> Callable[..., Tensor]:
        empty = launcher.comm.device.HostDeviceCopier.empty

        def empty_of_host(*args: Any, **kwargs: Any) -> Tensor:
            memory = empty(*args, **kwargs)
            self.ledger.assign(HOST, [memory])
            return memory

        return empty_of_host

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Follow a part of a step. The forward after the last step ends the script."""
        if name == "forward" and self.found.num_steps >= self._num_wanted:
            raise End
        with self.ledger.within(_PHASES[name]):
            yield
        if name == "step":
            self.found.num_steps += 1
            self.recorder.step = self.found.num_steps + 1
            self._assign_all()
            if self.found.num_steps < self._num_wanted:  # of the last step is what a step needs
                self.ledger.forget_peaks()
                self.work.clear()
                self.reads.clear()

    def _assign_all(self) -> None:
        """Count what lasts from step to step by what it is."""
        for engine in self._engines:
            self.ledger.assign(BUFFERS, engine.module.buffers())
            for unit in engine._parts.sharded.units:
                is_away = self.ledger.is_on_host(unit.params.master)  # its states are where it is
                for kind, tensors in unit.memory().items():
                    self.ledger.assign(HOST if is_away and kind == OPTIMIZER else _KINDS[kind], tensors)

    def results(self) -> RankRehearsal:
        """Return what was found until now."""
        found, mesh = self.found, current_mesh()
        if mesh is not None:
            found.sizes = {axis: int(getattr(mesh.sizes, axis)) for axis in (*AXES, "expert")}
        if self._engines:
            engine = self._engines[-1]
            found.config = engine._parts.settings.model_dump(mode="json")
            found.params = [
                (name, unsharded_numel(param), param.requires_grad) for name, param in engine.module.named_parameters()
            ]
        facts = left_facts()
        if facts is not None:
            found.engine = replace(facts, device="cuda")  # what computes here stands for a GPU
        # Ranks reach the forward that ends the script after other transfers: what follows the last step is left out.
        found.groups = self.recorder.groups
        found.calls = [call for call in self.recorder.calls if call.step <= max(1, found.num_steps)]
        found.peaks = {phase: peak.by_kind for phase, peak in self.ledger.peaks.items() if peak.total}
        found.host_bytes = self.ledger.taken().get(HOST, 0)
        found.work, found.reads = dict(self.work), dict(self.reads)
        found.resident_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return found


class RealTensors(DispatchMode):
    """Has torch compute, and the ledger count what that takes: for a real run beside a rehearsal."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._pid = os.getpid()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        makes = all(each.alias_info is None for each in func._schema.returns)
        if makes and os.getpid() == self._pid and func.namespace == "aten":
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._ledger.note(leaf.untyped_storage())
        return result
