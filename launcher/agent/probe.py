"""What one host has: versions, devices, memory, disk, clock. Standard library only, quick, changes nothing.

    python -m launcher.agent.probe FOLDER FILE

prints the facts as one line of JSON: free disk counts below FOLDER, and `token` is what FOLDER/FILE holds.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from launcher import __version__
from launcher.cluster.devices import local_device_tokens

PACKAGES = ("torch", "numpy", "click", "paramiko", "pydantic", "PyYAML", "rich", "triton")

_MAX_TOKEN_CHARS = 64


def host_facts(folder: str) -> dict[str, Any]:
    """Return the facts about this host as plain data. Sizes are in bytes, times in seconds since the epoch.

    folder: the place whose free disk counts; `disk_free` is None when it does not exist.
    """
    memory = memory_bytes()
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "python_path": sys.executable,
        "launch": __version__,
        "packages": package_versions(PACKAGES),
        "devices": len(local_device_tokens(os.environ)),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_total": memory.get("MemTotal"),
        "memory_available": memory.get("MemAvailable"),
        "disk_free": free_disk_bytes(folder),
        "system": f"{platform.system()} {platform.release()}",
        "time_s": time.time(),
    }


def read_token(path: str) -> str | None:
    """Return the text of a small file, None when it cannot be read."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(_MAX_TOKEN_CHARS)
    except OSError:
        return None


def main(folder: str, file_name: str) -> None:
    """Print the facts, and what a file of the folder holds."""
    facts = {"token": read_token(os.path.join(folder, file_name)), "is_folder": os.path.isdir(folder)}
    sys.stdout.write(json.dumps(facts | host_facts(folder)) + "\n")


def package_versions(names: Sequence[str]) -> dict[str, str | None]:
    """Return the installed version of each package, None where there is none; nothing is imported."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def memory_bytes(path: str = "/proc/meminfo") -> dict[str, int]:
    """Return the entries of /proc/meminfo in bytes."""
    found = {}
    with open(path, encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            number, *unit = rest.split()
            found[name] = int(number) * (1024 if unit == ["kB"] else 1)
    return found


def free_disk_bytes(folder: str) -> int | None:
    """Return what a user may still write below `folder`, None when it does not exist."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def cpu_model() -> str:
    """Return the name of the processor, or of its architecture where the kernel gives no name."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


if __name__ == "__main__":
    main(*sys.argv[1:3])
