"""The real DeepSpeed, in processes of its own: the environment of the tests does not have it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.launch.command import slowness
from harness.needs import need
from harness.ports import free_port

PEERS = Path(sys.prefix) / "peers"
_TESTS = Path(__file__).resolve().parents[2]
_DEADLINE_S = 150.0


def available() -> str | None:
    """Return why DeepSpeed cannot be run here, None when it can."""
    if not (PEERS / "deepspeed").is_dir():
        return f"DeepSpeed is not installed in {PEERS} (make test does it where it can be fetched)"
    return None


def run_module(num_ranks: int, module: str, *arguments: str) -> None:
    """Run a module of the harness, which forks so many ranks, with DeepSpeed; wait until all have ended well."""
    need(available())
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_TESTS), str(PEERS)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(PEERS / "torch_extensions"),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    command = [sys.executable, "-X", "faulthandler", "-m", module, *arguments]
    # Not a pipe: a rank whose pipe is full would keep the others waiting.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(_DEADLINE_S * slowness())
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)  # on which they dump their stacks
            code = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
        if code:
            output.seek(0)
            raise AssertionError(output.read()[-12_000:])
