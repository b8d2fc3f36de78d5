"""What this machine has, for `launch report`: versions, torch, devices, compilers, programs, kernels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launcher.agent.probe import host_facts, package_versions
from launcher.base.timeouts import timeouts
from launcher.transport.command import last_json, own_argv, package_root

TORCH_FACTS_MODULE = "launcher.probes.environment"
_VERSION = re.compile(r"\d+\.\d+[\w.]*")
# Program -> the option that makes it print its version; sshd has none that every release knows.
COMPILERS = {"gcc": "--version", "g++": "--version", "nvcc": "--version", "ninja": "--version"}
PROGRAMS = {"ssh": "-V", "sshd": None, "srun": "--version", "nvidia-smi": "--version"}
# What trains: versions that a bug report needs, and that hosts need not share.
TRAINING_PACKAGES = (
    "transformers",
    "accelerate",
    "deepspeed",
    "lightning",
    "pytorch-lightning",
    "peft",
    "trl",
    "datasets",
)
_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/local/cuda/bin")


def gather() -> dict[str, Any]:
    """Return the whole report as plain data; starts short processes and changes nothing."""
    with ThreadPoolExecutor(8, thread_name_prefix="report") as pool:
        torch = pool.submit(_torch_facts)
        compilers = {name: pool.submit(_program, name, option) for name, option in COMPILERS.items()}
        programs = {name: pool.submit(_program, name, option) for name, option in PROGRAMS.items()}
        topology = pool.submit(_topology)
        machine = host_facts(os.getcwd()) | {"package": os.path.join(package_root(), "launcher")}
        machine["packages"] |= package_versions(TRAINING_PACKAGES)
        return {
            "machine": machine,
            "torch": torch.result(),
            "compilers": {name: future.result() for name, future in compilers.items()},
            "programs": {name: future.result() for name, future in programs.items()},
            "topology": topology.result(),
        }


def _torch_facts() -> dict[str, Any]:
    """Ask a process of its own, which may import torch; `error` says why there are no facts."""
    limit_s = timeouts().torch_facts_s
    try:
        done = subprocess.run(
            own_argv(TORCH_FACTS_MODULE),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"torch was not ready after {limit_s:.0f} s"}
    problem = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return last_json(done.stdout) or {"error": problem}


def _topology() -> str | None:
    """Return how the GPUs are linked, as `nvidia-smi topo -m` prints it; None where it cannot say."""
    path = shutil.which("nvidia-smi")
    text = "" if path is None else _output_of([path, "topo", "-m"])
    return re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip() or None


def _program(name: str, option: str | None) -> dict[str, str | None] | None:
    """Return path and version of a program, None when it is not installed."""
    path = shutil.which(name) or shutil.which(name, path=":".join(_SYSTEM_FOLDERS))
    if path is None:
        return None
    text = "" if option is None else _output_of([path, option])
    # nvcc's first number is a year; the version follows "release".
    found = re.search(r"release (\d+\.\d+)", text) or _VERSION.search(text)
    return {"path": path, "version": None if found is None else found.group(found.lastindex or 0)}


def _output_of(argv: list[str]) -> str:
    """Return what a program prints on both streams; "" when it fails or takes too long."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeouts().version_s,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
