"""The Python of the pages runs: each block as one rank that has what its page speaks of, or in a test that is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import page_programs
from harness.launch.command import ROOT
from harness.pages import Block, blocks_of, python_blocks
from harness.train.forked import run_ranks

KERNEL = "tests/notebook/test_kernel.py"
# Page, and what is in the block -> the test that runs it.
ELSEWHERE = {
    ("README.md", "launcher.notebook.run("): "tests/docs/test_python.py::test_the_notebook_example_of_the_readme_runs",
    ("guides.md", "launcher.notebook.emulate()"): "tests/huggingface/test_cell.py::test_the_cell_trains",
    (
        "notebooks.md",
        "launcher.notebook.run(",
    ): "tests/notebook/test_kernel.py::test_run_with_what_the_notebook_defines",
    ("python_api.md", "launcher.run("): "tests/api/test_docs.py::test_examples_on_this_machine",
    ("python_api.md", "launcher.submit("): "tests/api/test_docs.py::test_examples_in_slurm",
}


def place_of(block: Block) -> str | None:
    """Return the test that runs a block, None where it is run here."""
    return next((ELSEWHERE[key] for key in ELSEWHERE if block.page.name == key[0] and key[1] in block.text), None)


def test_tests_that_run_blocks_elsewhere_exist() -> None:
    for page, words in ELSEWHERE:
        assert [block for block in python_blocks() if block.page.name == page and words in block.text], (page, words)
    for path, _, name in (place.partition("::") for place in ELSEWHERE.values()):
        assert f"def {name}(" in (ROOT / path).read_text()


def shape_of(line: str) -> str:
    """Return a line without numbers, and without what names the CPU's instruction sets."""
    return re.sub(r"\[.*?\]|(?<=optimizer kernel: ).*|\d+", "", line)


def test_every_other_block_runs(tmp_path: Path) -> None:
    here = [block.place for block in python_blocks() if place_of(block) is None]
    assert len(here) > 10
    own = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONBREAKPOINT": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = run_ranks(tmp_path, 0, page_programs.main, *here, env=own)
    assert done.code == 0, done.out + done.err
    assert re.findall(r"^ran (.+)$", done.out, re.MULTILINE) == here
    assert "saved\nexit code 75\n" in done.out  # docs/slurm.md
    shown = next(b.text for b in blocks_of(ROOT / "docs" / "offload.md") if "[0] zero stage 3" in b.text)
    said = [shape_of(line) for line in (done.out + done.err).splitlines()]
    lines = re.findall(r"^\[0\] (.*)", shown, re.MULTILINE)
    assert [line for line in lines if shape_of(line) not in said] == []
    assert (tmp_path / "checkpoints" / "latest").exists()
    assert (tmp_path / "weights.pt").exists()


def test_the_notebook_example_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # logs are written below it
    (example,) = (b.text for b in python_blocks() if b.page.name == "README.md" and "notebook" in b.text)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["results"] == [f"rank {rank} of 2, lr 0.001" for rank in range(2)]
