"""Fixtures that several rooms share."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from harness import schedule
from harness.launch import slurm as slurm_harness
from harness.launch.command import slowness
from harness.launch.slurm import LoopbackSlurm
from harness.launch.sshd import LoopbackSshd, available
from harness.needs import need
from hypothesis import HealthCheck

from launcher.base import env
from launcher.base.timeouts import timeouts

STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1)
_clock = schedule.Clock()

# Garbage collection is off until all tests are collected: imported modules are not garbage.
gc.disable()

# Threads of OpenMP that wait sleep, here and in every process of the tests. By default they spin for a while, and where
# many processes share few cores they take most of the time from those that compute. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# How long an example takes says nothing where other tests share the cores.
hypothesis.settings.register_profile("shared cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis.settings.load_profile("shared cores")


# What a shell inside of a job, or on a machine with GPUs, may have set: tests say themselves what they start with.
_OF_THE_CALLER = re.compile(
    r"(SLURM|PET|OMPI|PMI|PMIX|TORCHELASTIC|DLTS|LAUNCH)_(?!TIMEOUT_SCALE)\w+"
    r"|(LOCAL_|GROUP_|ROLE_|NODE_|CROSS_)?(RANK|WORLD_SIZE|SIZE)|NNODES|MASTER_(ADDR|PORT)|ACCELERATE_\w+|SHELL"
)


def pytest_configure(config: pytest.Config) -> None:
    for name in list(os.environ):
        if _OF_THE_CALLER.fullmatch(name):
            del os.environ[name]
    if config.option.markexpr != "gpu":  # there it chooses the card
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        schedule.arrange(items)


def pytest_collection_finish() -> None:
    # Nor do later searches for garbage go through it, which would take half a second of a processor each.
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)  # pytest-xdist is not needed to run some of the tests
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return schedule.make_scheduler(config, log)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _clock.add(report)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if path := os.environ.get("TEST_SECONDS"):
        terminalreporter.section("where the time went")
        for line in _clock.lines():
            terminalreporter.write_line(line)
        _clock.write(Path(path))


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests' jobs out of the user's own list."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A command that runs in this process ends with its signals ignored; children of later tests would inherit that."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def waits_scaled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a busy machine what a test calls in this process waits longer, too: twice, as the load may still grow."""
    factor = slowness()
    if factor == 1.0 or env.TIMEOUT_SCALE.name in os.environ:
        yield
        return
    monkeypatch.setenv(env.TIMEOUT_SCALE.name, f"{2 * factor:.3f}")
    timeouts.cache_clear()
    yield
    timeouts.cache_clear()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute here as ranks do: with another number of threads some of torch's sums run in another order."""
    import torch  # most rooms' tests need none
    from harness.train.ranks import NUM_THREADS

    num_threads = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def sshd() -> Iterator[LoopbackSshd]:
    """A real sshd on 127.0.0.*; tests that stop or change it make their own instead."""
    need(available())
    with LoopbackSshd() as server:
        yield server


@pytest.fixture(scope="session")
def slurm() -> Iterator[LoopbackSlurm]:
    """A real Slurm with three nodes; a test that stops a node starts it again."""
    need(slurm_harness.available())
    with LoopbackSlurm() as cluster:
        yield cluster
