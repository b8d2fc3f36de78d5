"""Which device a rank has, and which calls of torch set it. No GPU is used: torch is replaced by doubles."""

from __future__ import annotations

import ctypes
import mmap
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.logs import logged
from harness.train.cudart import Cudart
from harness.train.ranks import run_on_ranks
from torch import nn

import launcher
from launcher.activation.rng import CudaRNGStatesTracker
from launcher.base.errors import EngineError
from launcher.comm.communicator import GlooCommunicator, NcclCommunicator, SingleProcess, communicator_for
from launcher.comm.device import DeviceRuntime, HostDeviceCopier, PinnedMemory, local_device, offset_seed
from launcher.comm.groups import DEFAULT_TIMEOUT, init_distributed, world_group
from launcher.comm.streams import Side, Streams, streams_of
from launcher.monitor.meters import MemoryUse, PhaseTimer, memory_use

CPU = torch.device("cpu")


class Gpus:
    """As many GPUs as a test wants, and what has been asked of torch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.current: list[torch.device] = []
        self.started: list[dict[str, Any]] = []

    def be(self, num_visible: int, local_rank: int, kind: str = "cuda") -> None:
        self._patch.setattr(torch.accelerator, "is_available", lambda: True)
        self._patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        self._patch.setattr(torch.accelerator, "device_count", lambda: num_visible)
        self._patch.setattr(torch.accelerator, "set_device_index", self.current.append)
        self._patch.setattr(dist, "init_process_group", lambda name, **given: self.started.append({"": name, **given}))
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
            self._patch.setenv(name, value)
        self._patch.setenv("LOCAL_RANK", str(local_rank))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


@dataclass
class NcclOptions:
    """NCCL's, as far as they are set."""

    is_high_priority_stream: bool = False
    _timeout: timedelta = timedelta(minutes=10)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[NcclOptions]:
    """Have torch know NCCL; return the options that are made."""
    made: list[NcclOptions] = []

    def options(is_high_priority_stream: bool) -> NcclOptions:
        made.append(NcclOptions(is_high_priority_stream))
        return made[-1]

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    return made


def group_of(monkeypatch: pytest.MonkeyPatch, **backends: str) -> None:
    """Have torch say that there is a process group with these backends."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=FakeGroup(backends)))


class FakeGroup:
    def __init__(self, backends: dict[str, str]) -> None:
        self._backends = backends

    def _get_backend(self, device: torch.device) -> Any:
        if device.type not in self._backends:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        named = mock.Mock()
        named.name.return_value = self._backends[device.type]
        return named

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def test_each_rank_of_a_host_has_the_gpu_of_its_number(gpus: Gpus) -> None:
    gpus.be(num_visible=4, local_rank=3)
    assert local_device() == torch.device("cuda", 3)


def test_a_rank_that_sees_one_gpu_has_it_whatever_its_number(gpus: Gpus) -> None:
    """`srun --gpus-per-task=1` shows each rank its own."""
    gpus.be(num_visible=1, local_rank=3)
    assert local_device() == torch.device("cuda", 0)


def test_any_accelerator_will_do_that_has_a_backend_of_its_own(gpus: Gpus) -> None:
    gpus.be(num_visible=2, local_rank=1, kind="xpu")
    assert local_device() == torch.device("xpu", 1)
    init_distributed()
    assert (gpus.started[0][""], gpus.started[0]["device_id"]) == ("xccl", torch.device("xpu", 1))
    gpus.be(num_visible=1, local_rank=0, kind="mps")  # only gloo serves it, from the CPU
    assert local_device() == CPU


class FakeModule:
    """torch's module of an accelerator, as far as it is asked."""

    def __init__(self) -> None:
        self.state = torch.tensor([1], dtype=torch.uint8)
        self.Event = mock.Mock(return_value=mock.Mock(elapsed_time=lambda _last: 1500.0))

    def memory_allocated(self, _device: torch.device) -> int:
        return 3

    def max_memory_allocated(self, _device: torch.device) -> int:
        return 4

    def get_rng_state(self) -> torch.Tensor:
        return self.state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state

    def manual_seed(self, seed: int) -> None:
        self.state = torch.tensor([seed % 256], dtype=torch.uint8)


def test_times_memory_and_random_states_are_asked_of_the_accelerators_module(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.be(num_visible=1, local_rank=0, kind="xpu")
    module, device = FakeModule(), torch.device("xpu", 0)
    monkeypatch.setattr(torch, "get_device_module", {device: module, "xpu": module}.__getitem__)
    assert memory_use(device) == MemoryUse(3, 4)
    timer = PhaseTimer(device)
    with timer.span("forward"):
        pass
    assert timer.take() == {"forward": 1.5}
    tracker = CudaRNGStatesTracker()
    tracker.add("own", 7)
    assert module.state == 1
    with tracker.fork("own"):
        assert module.state == 7
    assert module.state == 1


def test_cuda_is_named_only_where_nothing_else_is_meant() -> None:
    package = Path(launcher.__file__).parent
    naming = {path.name for path in package.rglob("*.py") if re.search(r"torch\.cuda\b|\bis_cuda\b", path.read_text())}
    # Versions of CUDA's libraries, names of NVIDIA's GPUs, Triton, cudaHostRegister, and what sentences call it.
    versions, sentences = {"environment.py", "op_builders.py"}, {"accelerator.py", "names.py"}
    kernels = {"triton_kernels.py", "program_shape.py", "grouped.py"}  # of NVIDIA's GPUs
    assert naming == versions | sentences | kernels | {"flops.py", "device.py", "torch_tools.py"}


def test_more_ranks_than_gpus_are_an_error(gpus: Gpus) -> None:
    gpus.be(num_visible=2, local_rank=2)
    with pytest.raises(EngineError, match="LOCAL_RANK 2 has no GPU: this process sees 2"):
        local_device()


def test_nccl_learns_the_gpu_of_its_rank(gpus: Gpus) -> None:
    gpus.be(num_visible=2, local_rank=1)
    init_distributed()
    own = torch.device("cuda", 1)
    assert (gpus.started[0][""], gpus.started[0]["device_id"]) == ("nccl", own)
    assert set(gpus.current) == {own}


def test_nccls_own_streams_go_ahead_of_the_computing(gpus: Gpus, nccl: list[NcclOptions]) -> None:
    gpus.be(num_visible=2, local_rank=1)
    init_distributed()
    init_distributed("cpu:gloo,cuda:nccl", timeout=timedelta(minutes=5))
    init_distributed("gloo")
    assert [started["pg_options"] for started in gpus.started] == [*nccl, None]
    assert nccl == [NcclOptions(True, DEFAULT_TIMEOUT), NcclOptions(True, timedelta(minutes=5))]


def test_gathers_and_reductions_go_ahead_of_the_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mock.Mock()
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    streams_of(torch.device("cuda", 0))
    priorities = dict(zip(Side, (call.kwargs["priority"] for call in made.Stream.call_args_list), strict=True))
    copies = {Side.TO_DEVICE: 0, Side.TO_HOST: 0}
    assert priorities == {Side.GATHER: -1, Side.REDUCE: -1, **copies, Side.RECEIVE: 0}


def test_the_gpu_is_made_current_when_the_group_is_somebody_elses(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.be(num_visible=2, local_rank=1)
    group_of(monkeypatch, cpu="gloo", cuda="nccl")
    init_distributed()
    assert (gpus.current, gpus.started) == ([torch.device("cuda", 1)], [])


def test_gloo_that_is_asked_for_trains_on_the_cpu(gpus: Gpus) -> None:
    gpus.be(num_visible=2, local_rank=1)
    init_distributed("gloo")
    assert (gpus.started[0][""], gpus.started[0]["device_id"]) == ("gloo", None)


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ({"cpu": "gloo", "cuda": "gloo"}, "cpu"),
        ({"cpu": "gloo"}, "cpu"),
        ({"cuda": "nccl"}, "cuda:1"),
        ({"cpu": "gloo", "cuda": "nccl"}, "cuda:1"),
    ],
)
def test_the_device_is_one_that_the_group_can_send(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, backends: dict[str, str], device: str
) -> None:
    gpus.be(num_visible=2, local_rank=1)
    group_of(monkeypatch, **backends)
    assert local_device() == torch.device(device)


@pytest.mark.parametrize(
    ("backends", "kind"),
    [({"cpu": "gloo", "cuda": "nccl"}, GlooCommunicator), ({"cpu": "fake"}, NcclCommunicator)],
)
def test_the_backend_of_the_device_chooses_the_communicator(backends: dict[str, str], kind: type) -> None:
    """A group that torch made without the name of a backend has one for each type of device."""
    assert type(communicator_for(FakeGroup(backends), DeviceRuntime(CPU))) is kind  # type: ignore[arg-type]
    assert type(communicator_for(None, DeviceRuntime(CPU))) is SingleProcess


def _default_backend(rank: int, world_size: int) -> str:
    group = dist.new_group()
    return type(communicator_for(group, DeviceRuntime(CPU))).__name__


def test_real_ranks_choose_gloo() -> None:
    assert run_on_ranks(2, _default_backend) == ["GlooCommunicator"] * 2


@pytest.mark.parametrize(("kind", "is_pinned"), [("cpu", False), ("xpu", True)])
def test_memory_for_other_accelerators_is_what_torch_page_locks(kind: str, is_pinned: bool) -> None:
    with mock.patch.object(torch, "empty") as empty:
        HostDeviceCopier(torch.device(kind), Streams()).empty(3, torch.uint8, is_pinned=True)
        HostDeviceCopier(torch.device(kind), Streams()).empty(3, torch.uint8, is_pinned=False)
    assert [call.kwargs["pin_memory"] for call in empty.mock_calls] == [is_pinned, False]


def _page_faults() -> dict[str, int]:
    """Return the minor page faults of each thread of this process so far (proc(5), "stat")."""
    tasks = Path("/proc/self/task").iterdir()
    return {task.name: int((task / "stat").read_text().rpartition(")")[2].split()[7]) for task in tasks}


def test_memory_is_faulted_in_by_torchs_threads_before_it_is_page_locked() -> None:
    """`cudaHostRegister` faults in what is not there, with one thread."""
    num_bytes, num_pages = 64 << 20, (64 << 20) // mmap.PAGESIZE
    resident = (ctypes.c_ubyte * num_pages)()
    seen: list[tuple[int, set[str]]] = []

    class Seeing(Cudart):
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), resident) == 0
            now = _page_faults()
            seen.append((sum(resident), {task for task, faults in now.items() if faults > before.get(task, 0)}))
            return super().cudaHostRegister(address, num_bytes, flags)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.zeros(2**20)  # the threads are there
        before = _page_faults()
        with mock.patch.object(torch.cuda, "cudart", return_value=Seeing()):
            storage = PinnedMemory().empty(num_bytes)
    finally:
        torch.set_num_threads(threads)
    ((num_resident, tasks),) = seen
    assert (storage.nbytes(), num_resident) == (num_bytes, num_pages)
    assert len(tasks) >= 2


def _num_links(rank: int, world_size: int) -> tuple[int, bool]:
    """Return the links that an engine at stage 3 makes, with layers that are tiled; and whether all units share one."""
    made: list[HostDeviceCopier] = []
    original = HostDeviceCopier.__init__

    def counting(link: HostDeviceCopier, *given: Any) -> None:
        made.append(link)
        original(link, *given)

    with mock.patch.object(HostDeviceCopier, "__init__", counting):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 2**18},
            "optimizer": {"type": "AdamW"},
        }
        model = nn.Sequential(*(nn.Linear(640, 640) for _ in range(2)))
        with launcher.zero.Init():
            sharded = nn.Sequential(nn.Linear(640, 640))
        engine, *_ = launcher.initialize(model=nn.Sequential(model, sharded), config=config)
    runtimes = {id(unit.group.runtime) for unit in engine._sharded.units}
    assert type(engine.module[0][0]) is not nn.Linear  # the bound on live parameters tiles it
    return len(made), len(runtimes) == 1 and world_group().runtime is not engine._parts.group.runtime


def test_an_engine_makes_one_link() -> None:
    """And `zero.Init`, which comes before any engine, one of its own."""
    assert run_on_ranks(2, _num_links) == [(2, True)] * 2


def test_a_single_rank_has_its_gpu_whatever_the_group(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has nothing to send."""
    gpus.be(num_visible=2, local_rank=1)
    monkeypatch.setattr(FakeGroup, "size", lambda _: 1)
    group_of(monkeypatch, cpu="gloo", cuda="gloo")
    assert local_device() == torch.device("cuda", 1)


def _lines_beside_gpus(rank: int, world_size: int) -> tuple[str, bool]:
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}
    with mock.patch("launcher.engine.announce.accelerator_type", return_value="cuda"), logged() as lines:
        engine, *_ = launcher.initialize(model=nn.Linear(4, 4), config=config)
    return str(engine.device), any("the process group is gloo's" in line and "GPU" in line for line in lines)


def test_idle_gpus_are_named() -> None:
    """Whoever asks for gloo on a host with GPUs learns from rank 0 what that costs."""
    assert run_on_ranks(2, _lines_beside_gpus) == [("cpu", True), ("cpu", False)]


def test_ranks_with_other_parts_of_a_model_drop_out_others() -> None:
    seeds: list[int] = []
    torch.manual_seed(40)
    with mock.patch("launcher.comm.device.device_module", return_value=SimpleNamespace(manual_seed=seeds.append)):
        offset_seed(torch.device("cuda"), 2)
        before = torch.get_rng_state()
        offset_seed(CPU, 2)
    assert seeds == [42]
    assert torch.equal(torch.get_rng_state(), before), "samplers draw from it"
