"""Benchmarks run seldom: that each still works, and that the pages are what they wrote, is checked here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.launch import nodes, sshd
from harness.launch.command import ROOT
from harness.launch.forked_ranks import in_forks
from harness.train.forked import run_ranks

sys.path.insert(0, str(ROOT / "benchmarks"))
import bench  # benchmarks are not a package
import figures

PROGRAMS = {
    path.stem: str(path.relative_to(ROOT))
    for folder in ("benchmarks", "tests/soak")
    for path in (ROOT / folder).glob("*.py")
}
# What a section must say of itself: date, commit, hardware and versions, samples, command.
PROVENANCE = re.compile(
    r"Measured \d{4}-\d\d-\d\d \d\d:\d\d UTC at commit (?:[0-9a-f]{10}(?:-dirty)?|unknown), load before \d+\.\d\.\n"
    r"On .+, \d+ cores, \d+ GiB, Linux .+, Python [\d.]+.*\.\n"
    r".+\. Command: `(?P<command>.*?\b(?P<script>\w+)\.py\b.*)`\.\n"
)
# Script -> arguments that make it quick, and on how many ranks `launch` starts it (0: none).
SHORT = {
    "startup": ("--ranks 1 --rounds 1 --launchers launch", 0),
    "fanout": ("--hosts 2 --rounds 1", 0),
    "fault_matrix": ("--transports local --only exits", 0),
    "random_kills": ("--count 1", 0),
    "checkpoint_kills": ("--count 2", 0),
    "stalls": ("--pause 4 --lease 3 --cases suspended", 0),
    "many_ranks": ("--ranks 4 --hosts 2", 0),
    "journal_reading": ("--megabytes 0.2 --rounds 1", 0),
    "output": ("--lines 50 --ranks 1 --rounds 1", 0),
    "step_time": ("--models tiny --rounds 1", 1),
    "offload_time": ("--model tiny --rounds 1", 1),
    "speculative_update": ("--layers 4 --width 16 --rounds 1", 1),
    "expert_parallel": ("--width 16 --tokens 16 --rounds 1 --engines launch", 2),
    "checkpoint_peers": ("--count 1 --only ours", 0),
    "checkpoint_time": ("--sizes 0 --stages 2 --rounds 1", 2),
    "to_fp32": ("--layers 1 --rounds 1", 0),
    "parity_table": ("--steps 1 --worlds 1 --stages 0 --worst", 0),
    "architectures": ("--only transformers/llama timm/vit_tiny_patch16_224", 0),
    "fuzz": ("--count 130", 0),
    "checkpoint_fuzz": ("--count 270", 0),
    "memory_table": ("--worlds 2 --precisions fp32", 0),
    "rehearsal": ("--models mlp --worlds 1 --large 1", 0),
    "plan": ("--micro-batches 8 --layers 1 --rounds 1 --seconds 1", 0),
    "journal": ("--rounds 2 --models tiny --steps 2", 2),
    "verdicts": ("--places local --kinds plain --only kill --healthy 0 --seconds 3", 0),
    "nvme": ("--size 4MiB --seconds 0.01 --rounds 1", 0),
    "nvme_step": ("--layers 1 --rounds 1", 0),
    "hf_trainer": ("--rounds 1 --models vit --steps 3 --width 64 --engines launch", 0),
    "growth": ("--units 2 --rounds 1", 0),
    "start_7b": ("--worlds 8 --layers 2", 0),
    "pretrained_memory": ("--layers 1 --width 64", 0),
    "cpu_kernels": ("--numel-mi 1 --rounds 1 --threads 1 --cases Lion", 0),
    "sequence_parallel": ("--length 64 --width 32 --rounds 1", 2),
    "pipeline": ("--rounds 1 --micro-batches 4 --width 16", 2),
    "onebit": ("--width 64 --steps 2 --training_steps 8", 2),
    "scale_model": ("--many 26 --rounds 1", 0),
}
# These start many processes that load torch, or wait.
LONG = {"journal", "step_time", "pipeline", "checkpoint_time", "nvme"}
# Longer still, or alike; and what `make soak-programs` runs.
SOAK = {
    *(
        "architectures",
        "hf_trainer",
        "plan",
        "verdicts",
        "pretrained_memory",
        "random_kills",
        "checkpoint_kills",
        "stalls",
    ),
    *("fanout", "scale_model", "many_ranks", "fault_matrix", "offload_time", "growth", "expert_parallel", "onebit"),
    *("sequence_parallel", "nvme_step", "parity_table", "memory_table", "to_fp32", "checkpoint_peers", "output"),
    *("startup", "rehearsal"),
}
MARKS = {**dict.fromkeys(LONG, pytest.mark.long), **dict.fromkeys(SOAK, pytest.mark.soak)}
# These need torch and no process of their own: a fork has it.
WITH_JOURNALS = {"journal"}  # which ranks in forks have not
IN_FORKS = {"checkpoint_fuzz", "nvme", "cpu_kernels", "start_7b"}
NEEDS = {
    "fanout": sshd.available,
    "stalls": sshd.available,
    "many_ranks": sshd.available,
    "scale_model": sshd.available,
    "fault_matrix": nodes.available,
}


@pytest.mark.parametrize("script", [pytest.param(name, marks=MARKS.get(name, [])) for name in SHORT])
def test_every_benchmark_writes_a_section_with_its_provenance(script: str, tmp_path: Path) -> None:
    reason = NEEDS[script]() if script in NEEDS else None
    if reason is not None:
        pytest.skip(reason)
    arguments, num_ranks = SHORT[script]
    output = tmp_path / "section.md"
    if script in IN_FORKS:
        result = run_ranks(tmp_path, 0, ROOT / PROGRAMS[script], *arguments.split(), "--output", output)
        assert result.code == 0, result.out + result.err
    else:
        run_for_itself(script, arguments, num_ranks, tmp_path, output)
    found = PROVENANCE.search(output.read_text())
    assert found is not None, output.read_text()
    assert found["script"] == script
    assert arguments in found["command"]


def run_for_itself(script: str, arguments: str, num_ranks: int, folder: Path, output: Path) -> None:
    command: list[str | Path] = [PROGRAMS[script], *arguments.split(), "--output", output]
    if num_ranks:
        starter = ("-m", "launcher", "--quiet", "--log-dir", folder / "runs", "--num_gpus", str(num_ranks))
        command = [*starter, *(command if script in WITH_JOURNALS else in_forks(*command))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_benchmark_has_a_short_form() -> None:
    helpers = {"bench", "common", "fault_places", "figures", "peer_plugin"}
    elsewhere = {"peer_suites"}  # tests/test_peer_suites.py
    assert PROGRAMS.keys() - helpers - elsewhere == set(SHORT)
    assert {Path(section.command.split()[0]).stem for section in bench.SECTIONS} == set(SHORT) | elsewhere


def test_the_page_is_what_the_scripts_wrote() -> None:
    assert bench.PAGE.read_text() == bench.assemble(), "write it with: make bench-page"


def test_the_first_page_has_the_figures_that_were_measured() -> None:
    assert figures.PICTURE.read_text() == figures.picture(), "write it with: make bench-page"
    first_page = " ".join((ROOT / "README.md").read_text().split())
    for figure in figures.FIGURES:
        for who, value, unit in figure.values():
            assert figures.shown(value, unit) in first_page, (figure.title, who)


@pytest.mark.parametrize("section", bench.SECTIONS, ids=lambda section: section.name)
def test_what_was_measured_says_how(section: bench.Section) -> None:
    if section.output.exists():
        found = PROVENANCE.search(section.output.read_text())
        assert found is not None, f"{section.output.name} was not written by its script"
        assert found["script"] == Path(section.command.split()[0]).stem


def test_no_result_is_left_out_of_the_page() -> None:
    of_gpus = {bench.RESULTS / name for name in ("gpu.md", "gpu.json", "gpu_steps")}  # `make gpu`: a page of its own
    written = set(bench.RESULTS.glob("*")) - of_gpus
    assert written <= {section.output for section in bench.SECTIONS}
