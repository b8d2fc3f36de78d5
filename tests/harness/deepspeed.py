"""The real DeepSpeed, in processes of its own: the environment of the tests does not have it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.needs import need
from harness.ports import free_port

PEERS = Path(sys.prefix) / "peers"
_TESTS = Path(__file__).resolve().parents[1]
_DEADLINE_S = 150.0


def available() -> str | None:
    """Return why DeepSpeed cannot be run here, None when it can."""
    if not (PEERS / "deepspeed").is_dir():
        return f"DeepSpeed is not installed in {PEERS} (make test does it where it can be fetched)"
    return None


def run_ranks(num_ranks: int, module: str, *arguments: str) -> None:
    """Run a module of the harness on so many ranks that have DeepSpeed, and wait until all have ended well."""
    need(available())
    port = free_port()
    base = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_TESTS), str(PEERS)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(PEERS / "torch_extensions"),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    with contextlib.ExitStack() as stack:
        # Not pipes: a rank whose pipe is full would keep the others waiting.
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(num_ranks)]
        processes = []
        for rank, output in enumerate(outputs):
            variables = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-X", "faulthandler", "-m", module, *arguments]
            process = subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        end_s = time.monotonic() + _DEADLINE_S
        try:
            codes = [process.wait(timeout=max(0.0, end_s - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            for process in processes:
                process.send_signal(signal.SIGABRT)  # on which it dumps its stacks
                process.wait()
            codes = [process.wait() for process in processes]
        if any(codes):
            for output in outputs:
                output.seek(0)
            said = (f"rank {rank}: {output.read()[-6000:]}" for rank, output in enumerate(outputs) if codes[rank])
            raise AssertionError("\n".join(said))
