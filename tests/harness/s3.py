"""A server that answers as S3 does, in a process of its own on 127.0.0.1."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.launch.command import slowness
from harness.ports import free_port

START_S = 60.0


def services_folder() -> Path | None:
    """Return the folder with moto and s3fs; None where it was not installed, which in CI is a failure."""
    folder = Path(os.environ.get("TEST_SERVICES") or Path(sys.prefix) / "services")
    if (folder / "moto").is_dir():
        return folder
    if os.environ.get("CI"):
        pytest.fail(f"there is no moto in {folder}: `make test` installs .ci/test-services.txt")
    return None


def s3_environment(url: str, services: Path) -> dict[str, str]:
    """Return the variables with which s3fs asks the server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "TEST_SERVICES": str(services),
    }


@contextlib.contextmanager
def s3_server(services: Path) -> Iterator[str]:
    """Run the server; yield its URL."""
    port = free_port()
    code = (
        f"import sys; sys.path.append({str(services)!r}); from launcher.base import processes; "
        f"processes.die_with_parent({os.getpid()}); from moto.server import main; "
        f"main(['-H', '127.0.0.1', '-p', '{port}'])"
    )
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            _wait_until_it_answers(url, process)
            yield url
        finally:
            process.kill()


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + START_S * slowness()
    while True:
        try:
            with urllib.request.urlopen(f"{url}/moto-api/", timeout=5):
                return
        except OSError:
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < end_s, "the server does not answer"
            time.sleep(0.05)
