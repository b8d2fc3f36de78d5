"""An optimizer that works beside the next forward and backward: the parameters follow one step later.

Ren et al., "ZeRO-Offload", https://arxiv.org/abs/2101.06840, section 5.2, "one-step delayed parameter update".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from launcher.comm.hosts import on_any_rank
from launcher.comm.mesh import ParallelMesh
from launcher.kernels.cpu import part_of_threads
from launcher.optim.api import UnitOptimizer
from launcher.zero.stages import ZeroPolicy
from launcher.zero.unit import FlatUnit, lost_anywhere


class DelayedUpdate:
    """Takes the steps of one engine in a thread. Every rank must call `begin` and `write_back` in the same order."""

    def __init__(
        self,
        units: Sequence[FlatUnit],
        optimizer: UnitOptimizer,
        policy: ZeroPolicy,
        mesh: ParallelMesh,
    ) -> None:
        self._units = [unit for unit in units if unit.grads is not None]
        self._optimizer = optimizer
        self._mesh = mesh
        self._policy = policy
        self._num_left_in_order = policy.offload.num_steps_in_order
        self._thread = ThreadPoolExecutor(1, "launch-update")
        self._running: Future[None] | None = None
        self.is_written_back = True
        self._unused: Collection[str] = ()  # in the update that is not written back
        for unit in self._units:
            unit.params.pending = self

    def restart(self, num_steps: int) -> None:
        """Continue a run that has taken so many steps: the first ones, which are not delayed, are among them."""
        self._num_left_in_order = max(0, self._policy.offload.num_steps_in_order - num_steps)

    def begin(self, unused: Collection[str], grad_scale: float) -> None:
        """Take the units' gradients over and start a step with them. The step before must have been written back."""
        grads = {unit.index: unit.grads.hand_over() for unit in self._units if unit.grads is not None}
        update = self._optimizer.prepare(grad_scale, unused, grads)
        self.is_written_back, self._unused = False, unused
        self._running = self._thread.submit(self._run, update)
        if self._num_left_in_order > 0:
            self._num_left_in_order -= 1
            self.write_back(is_checked=True)

    def _run(self, update: Callable[[], None]) -> None:
        self._mesh.shard.copier.synchronize()  # copies of the step before may still read what this one writes
        with part_of_threads(self._policy.offload.cores_fraction):
            update()

    def wait(self) -> None:
        """Wait until masters, copies and states are not written any more. Raises what went wrong in the thread."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def write_back(self, *, is_checked: bool = False) -> None:
        """Write the updated masters back to the parameters, unless that is done. Collective.

        is_checked: the ranks know that no write into parameters would be lost to it. Raises: EngineError on every rank
        where one has such a write, once.
        """
        if not (is_checked or self.is_written_back):
            self._check_writes()
        self.wait()
        if not self.is_written_back:
            self.is_written_back = True
            for unit in self._units:
                unit.write_back(
                    is_written=self._optimizer.writes_params, overlaps=self._policy.overlap_comm, unused=self._unused
                )

    def _check_writes(self) -> None:
        own = next((error for unit in self._units if (error := unit.find_lost_to_update()) is not None), None)
        for unit in self._units:
            unit.forget_lost()
        is_lost = on_any_rank(self._mesh.data, [own is not None])
        if self._mesh.model is not None:
            is_lost = on_any_rank(self._mesh.model, is_lost)
        if is_lost[0]:
            raise lost_anywhere(own, self._mesh)

    def end(self) -> None:
        """Write the last update back and end the thread. Collective."""
        self.write_back(is_checked=True)
        self._thread.shutdown()
        for unit in self._units:
            unit.params.pending = None
