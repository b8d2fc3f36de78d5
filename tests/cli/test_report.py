"""`launch report`: the facts are this machine's, and what cannot be found is said, not hidden."""

from __future__ import annotations

import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from harness.launch.command import run_here, run_launch

from launcher.agent import probe
from launcher.hosts import inventory

SECTIONS = (
    "launch", "python", "packages", "machine", "memory", "torch", "devices", "optimizer", "kernels", "compilers",
    "programs",
)  # fmt: skip


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "TORCH_FACTS_MODULE", "launcher.no_such_module")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `launch report --json` prints here."""
    found: dict[str, Any] = json.loads(run_launch(tmp_path_factory.mktemp("report"), "report", "--json").out)
    return found


def test_the_json_holds_the_facts_of_this_machine(facts: dict[str, Any]) -> None:
    found = facts
    assert found["machine"]["python"] == platform.python_version()
    assert found["machine"]["packages"]["click"] == metadata.version("click")
    assert found["torch"]["version"].startswith(metadata.version("torch").partition("+")[0])
    kernels = found["torch"]["kernels"]
    assert re.match(r"(C\+\+ \S+) \(the best of .*\)$", kernels["cpu"])
    assert found["torch"]["optimizers"]["cpu"]["AdamW"] == f"AdamW[{kernels['cpu'].partition(' (')[0]}]"
    assert re.match(r"Triton \d|torch \(Triton cannot be loaded: .*triton", kernels["cuda"])
    assert isinstance(found["torch"]["gloo"], bool)
    assert set(found["compilers"]) == {"gcc", "g++", "nvcc", "ninja"}
    assert {"sshd", "srun"} <= set(found["programs"])


def test_the_text_names_every_section(tmp_path: Path, facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "_torch_facts", lambda: facts["torch"])  # no second start of torch
    result = run_here(tmp_path, "report", env={"HF_TOKEN": "hf_very_secret"})
    assert result.code == 0
    first_words = [line.split()[0] for line in result.out.splitlines()]
    assert first_words == list(SECTIONS)
    assert f"torch {metadata.version('torch')}" in result.out
    assert "hf_very_secret" not in result.out


def test_each_kernel_is_named_once_behind_its_optimizers() -> None:
    from launcher.cli.commands.report import by_kernel

    labels = ["Adam[torch fused]", "AdamW[C++ AVX2]", "SGD[torch fused]", "Adam[torch fused]", "does not run: why"]
    assert by_kernel(labels) == "Adam, SGD [torch fused], AdamW [C++ AVX2], does not run: why"


@pytest.mark.usefixtures("no_torch")
def test_a_torch_that_cannot_start_is_a_finding_with_its_reason() -> None:
    from launcher.cli.commands.report import rows

    found = inventory.gather()
    assert "no_such_module" in found["torch"]["error"]
    rows = dict(rows(found))
    assert rows["torch"].startswith("cannot be used: ")
    assert "optimizer" not in rows


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize(
    ("script", "version"),
    [
        ("echo 'gcc (Debian 12.2.0-14) 12.2.0'", "12.2.0"),
        ("echo 'Copyright 2005-2025'; echo 'release 13.0, V13.0.48'", "13.0"),
        ("echo 'OpenSSH_9.2p1 Debian' >&2", "9.2p1"),
        ("echo 'broken 1.2'; exit 3", None),
        ("echo nothing", None),
    ],
)
def test_versions_are_read_from_what_programs_print(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, version: str | None
) -> None:
    program = tmp_path / "gcc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert inventory.gather()["compilers"]["gcc"] == {"path": str(program), "version": version}


@pytest.mark.usefixtures("no_torch")
def test_a_missing_program_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inventory, "_SYSTEM_FOLDERS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert set(inventory.gather()["compilers"].values()) == {None}


def test_probe_reads_memory_and_disk(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1000 kB\nHugePages_Total:       3\n")
    assert probe.memory_bytes(str(meminfo)) == {"MemTotal": 1_024_000, "HugePages_Total": 3}
    free = probe.free_disk_bytes(str(tmp_path))
    assert free is not None
    assert free > 0
    assert probe.free_disk_bytes("/no/such/folder") is None
    assert probe.package_versions(["click", "no-such-package"]) == {
        "click": metadata.version("click"),
        "no-such-package": None,
    }


def test_versions_of_what_trains_are_listed(facts: dict[str, Any]) -> None:
    packages = facts["machine"]["packages"]
    assert {"transformers", "accelerate", "deepspeed", "lightning", "peft", "trl"} <= set(packages)
    assert packages["transformers"] == metadata.version("transformers")


@pytest.mark.usefixtures("no_torch")
def test_the_links_of_gpus_are_shown_as_nvidia_smi_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n[ \"$1\" = topo ] && printf '\\tGPU0\\tGPU1\\nGPU0\\t X \\tNV12\\n' || echo 535.104\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "\nnvidia-smi topo -m:\n\tGPU0\tGPU1\nGPU0\t X \tNV12\n" in run_here(tmp_path, "report").out
    program.write_text("#!/bin/sh\nexit 9\n")  # no driver
    assert "topo" not in run_here(tmp_path, "report").out


@pytest.mark.usefixtures("no_torch")
def test_a_bug_report_has_arguments_config_and_how_the_job_ended(tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text("raise ValueError('no hf_0123456789abcdef')")
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8,\n "monitor": {"api_key": "s3cret"}}')
    job = run_launch(tmp_path, "t.py", "--token", "s3cret", "--config", "ds.json").job_id
    bundle = run_here(tmp_path, "report", "--job", job[:8], "--config", "ds.json").out
    assert f"job        {job} · exit code 1 · 1 rank on localhost · " in bundle
    assert "t.py --token ••• --config ds.json · in " in bundle
    assert '\nds.json:\n{"train_batch_size": 8,\n "monitor": {"api_key": "•••"}}\n' in bundle
    plain = run_here(tmp_path, "report", "--job", job, "--json").out
    found = json.loads(plain)
    assert found["job"]["report"]["failure"]["exit_code"] == 1
    assert "s3cret" not in bundle + plain
    assert "hf_0123456789abcdef" not in bundle + plain
    missing = run_here(tmp_path, "report", "--config", "nowhere")
    assert (missing.code, "nowhere: the config cannot be read" in missing.err) == (2, True)


@pytest.mark.usefixtures("no_torch")
def test_the_config_of_a_job_is_found_by_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    job = run_launch(tmp_path, "t.py", "--deepspeed", "ds.json").job_id
    assert f'\n{tmp_path / "ds.json"}:\n{{"train_batch_size": 8}}\n' in run_here(tmp_path, "report", "--job", job).out
