"""The real DeepSpeed, in processes of its own: the environment of the tests does not have it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.needs import need
from harness.ports import free_port

PEERS = Path(sys.prefix) / "peers"
_TESTS = Path(__file__).resolve().parents[1]
_DEADLINE_S = 300.0


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
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        said = [process.communicate(timeout=_DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [text for process, text in zip(processes, said, strict=True) if process.returncode]
    assert not failed, failed[0][-8000:]
