"""One rank of a world that is not there: runs a script under the real engine, and writes down what it would cost.

    start.py FOLDER launcher.rehearse.main script train.py ARGS

LAUNCH_REHEARSAL names the file that says which rank of how many, and that takes the result. Process groups have no
peers (`torch_tools`), tensors have no values (`virtual`), and what would leave this process is replaced by the table in
`Rehearsal.replacements`. The script ends after some steps, wherever it is then.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import launcher.comm.communicator
import launcher.comm.groups
import launcher.comm.hosts
import launcher.engine.build
import launcher.engine.parallel
import launcher.engine.sharded
import launcher.engine.stages
import launcher.kernels.cpu
import launcher.zero.disk
from launcher import worker
from launcher.base import env
from launcher.base.errors import EngineError, LauncherError
from launcher.base.processes import die_with_parent
from launcher.comm.device import map_memory
from launcher.comm.groups import RankGroup
from launcher.compat import install
from launcher.engine.engine import Engine
from launcher.kernels.api import GradScale, Kernel, Span
from launcher.kernels.cpu import CpuKernel, CpuKernelStatus
from launcher.kernels.reference import ReferenceKernel
from launcher.parallel.pipeline.links import StageTransfers
from launcher.planner.rehearsal import RankRehearsal
from launcher.rehearse.follow import Follower, Replacements
from launcher.rehearse.torch_tools import CpuForCuda, cuda_functions, fake_groups, load_compiler, start_fake_group
from launcher.rehearse.virtual import VirtualTensors
from launcher.storage.store import AioSettings, Extent, Transfer, padded

# ---- replacements for disks and kernels ----


class _Disk:
    """A store whose disk takes nothing and has all."""

    reserved_bytes = 0  # of all of this process

    def __init__(self, folder: str, settings: AioSettings) -> None:
        self.folder, self.notice, self.size_bytes = folder, None, 0

    def reserve(self, num_bytes: int) -> Extent:
        extent = Extent(self.size_bytes, num_bytes)
        self.size_bytes += padded(num_bytes)
        _Disk.reserved_bytes += padded(num_bytes)
        return extent

    def read(self, extent: Extent, memory: memoryview) -> Transfer:
        return Transfer([])

    def write(self, extent: Extent, memory: memoryview) -> Transfer:
        return Transfer([])

    def tune(self, settings: AioSettings) -> None:
        pass

    def close(self) -> None:
        pass


class _Kernel(CpuKernel):
    """A kernel that computes where there are values, and takes gradients for finite where there are none."""

    def __init__(self, inner: Kernel, mode: VirtualTensors) -> None:
        self._inner, self._mode = inner, mode
        self.name = f"{inner.name}, rehearsed"

    def _have_values(self, tensors: Sequence[Tensor | None]) -> bool:
        return all(tensor is None or self._mode.has_values(tensor) for tensor in tensors)

    def update(self, spans: Sequence[Span], grad_scale: GradScale = 1.0) -> None:
        there = [each for each in spans if self._have_values([each.master, each.grad, *each.states, each.param])]
        if there:
            self._inner.update(there, grad_scale)

    def lamb_moments(self, spans: Sequence[Span], grad_scale: float = 1.0) -> Tensor:
        if all(self._have_values([each.master, each.grad, *each.states]) for each in spans):
            return self._inner.lamb_moments(spans, grad_scale)
        return torch.ones(len(spans), 2, dtype=torch.float64)

    def sum_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        if any(map(self._mode.is_guessed, grads)):
            return torch.ones((), dtype=torch.float64)
        return self._inner.sum_of_squares(grads)

    def measure(self, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if any(map(self._mode.is_guessed, grads)):
            return torch.ones((), dtype=torch.float64), torch.tensor([-1, -1])
        return self._inner.measure(grads)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def scaled_copy(self, target: Tensor, source: Tensor, scale: float) -> None:
        torch.mul(source, scale, out=target)


# ---- one rehearsal ----


class Rehearsal(Follower):
    """A rank whose peers, memory and devices are not there."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        gpus_per_node: int,
        num_steps: int,
        announced: dict[str, str],
        backend: str = "nccl",
    ) -> None:
        """announced: by stage of a pipeline, what other rehearsed ranks have said of the tensors that it returns.

        backend: whose way of carrying out collectives is rehearsed.
        """
        super().__init__(RankRehearsal(rank, world_size, gpus_per_node, announced=announced), num_steps)
        self._num_local = min(gpus_per_node, world_size)
        self._backend = backend
        self._mode = VirtualTensors(self.ledger, self.recorder.carry_out, self.work, self.reads)

    def variables(self) -> dict[str, str]:
        """Return what the environment says to the rank."""
        node, local = divmod(self.found.rank, self._num_local)
        values = {
            env.RANK: self.found.rank, env.WORLD_SIZE: self.found.world_size, env.LOCAL_RANK: local,
            env.LOCAL_WORLD_SIZE: self._num_local, env.LOCAL_SIZE: self._num_local, env.NODE_RANK: node,
            env.GROUP_RANK: node, env.CROSS_RANK: node, env.CROSS_SIZE: self._num_nodes,
            env.MASTER_ADDR: "127.0.0.1", env.MASTER_PORT: 29500, env.CUDA_VISIBLE_DEVICES: "",
        }  # fmt: skip
        return {variable.name: str(value) for variable, value in values.items()}

    @property
    def _num_nodes(self) -> int:
        return -(-self.found.world_size // self._num_local)

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Have everything in the block be of the rank."""
        load_compiler()
        start_fake_group(self.found.rank, self.found.world_size)
        map_memory()
        with self.running(self._mode), CpuForCuda():
            yield

    def replacements(self) -> Replacements:
        inner = launcher.kernels.cpu.load_cpu_kernel() or ReferenceKernel()
        status = CpuKernelStatus(_Kernel(inner, self._mode), "a rehearsal")

        def nothing(*_: Any, **__: Any) -> None:
            pass

        return {
            **super().replacements(),
            **fake_groups(),
            (dist, "init_process_group"): nothing,  # there is one
            (dist, "broadcast_object_list"): self.recorder.broadcast_objects,
            (launcher.comm.communicator, "backend_name"): lambda *_: self._backend,
            (launcher.comm.groups, "backend_name"): lambda *_: self._backend,
            (launcher.comm.hosts, "node_sizes"): self._node_sizes,
            (launcher.engine.parallel, "node_sizes"): self._node_sizes,
            (launcher.engine.sharded, "watch_order"): nothing,  # there is no peer to wait for
            (launcher.engine.build, "keep_freed_memory"): nothing,
            (launcher.engine.stages, "measured_on_rank_0"): lambda measure: [1.0] * len(measure()),
            (StageTransfers, "send_text"): self._announce(),
            (StageTransfers, "receive_text"): self._announced(),
            (launcher.kernels.cpu, "cpu_kernel_status"): lambda: status,
            (launcher.zero.disk, "Store"): _Disk,
            (Engine, "save_checkpoint"): lambda *_, **__: True,  # there is nothing to save
            (Engine, "load_checkpoint"): lambda *_, **__: (None, {}),
            **cuda_functions(self._num_local),
        }

    def _node_sizes(self, world: RankGroup) -> list[int]:
        world.communicator.gather_rows(torch.zeros(2, dtype=torch.float64))  # as in a real run
        return [self._num_local] * self._num_nodes

    def _announce(self) -> Callable[..., None]:
        send_text = StageTransfers.send_text

        def announce(transfers: StageTransfers, text: bytes, to_stage: int) -> None:
            send_text(transfers, text, to_stage)
            self.found.announced[str(to_stage - 1)] = text.decode()

        return announce

    def _announced(self) -> Callable[..., bytes]:
        """Return what answers for the stage before: as it was rehearsed, else as the nearest one before it."""
        receive_text = StageTransfers.receive_text

        def announced(transfers: StageTransfers, from_stage: int) -> bytes:
            receive_text(transfers, from_stage)
            known = [stage for stage in map(int, self.found.announced) if stage <= from_stage]
            if not known:
                self.found.needs_earlier_stages = True
                raise EngineError(
                    f"what stage {from_stage} of the pipeline returns is not known",
                    hint="rehearse a rank of each earlier stage before",
                )
            return self.found.announced[str(max(known))].encode()

        return announced

    def results(self) -> RankRehearsal:
        found = super().results()
        found.disk_bytes, found.computed = _Disk.reserved_bytes, dict(self._mode.computed)
        return found


def main() -> None:
    """Rehearse the script in `sys.argv`; exit with 1 where it has not reached its last step."""
    path = Path(os.environ[env.REHEARSAL.name])
    begun_s = time.monotonic()
    die_with_parent(os.getppid())
    rehearsal = Rehearsal(**json.loads(path.read_text()))
    os.environ.update(rehearsal.variables())
    kind, target = sys.argv[1:3]
    sys.argv[:] = [target, *sys.argv[3:]]
    install()  # `import deepspeed` of the script finds the engine
    error = None
    try:
        with rehearsal.rehearsing():
            worker.run_target(kind, target)
        if rehearsal.found.num_steps == 0:
            error = "the script has ended without a step of an engine"
    except LauncherError as failure:
        error = str(failure)
    except SystemExit as end:
        error = f"the script has exited with {end.code}" if end.code else None
    except BaseException as failure:  # noqa: BLE001  # whatever ends the script is a result
        trace = worker.user_traceback(failure)
        error = "".join(traceback.format_exception(type(failure), failure, trace)).rstrip()
    found = rehearsal.results()
    found.error, found.seconds = error, time.monotonic() - begun_s
    path.write_text(json.dumps(found.as_json()))
    sys.stdout.flush()
    os._exit(int(error is not None))  # exit handlers would wait for peers
