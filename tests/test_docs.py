"""The documents tell the truth: README's commands run, links lead somewhere, tables match the code."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.base import env
from launcher.cli.main import cli
from launcher.config.load import load_config
from launcher.planner.memory import rank_memory
from launcher.planner.model import ModelFacts, Parameter
from launcher.planner.settings import setting_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Commands of the README that take long or need more than this machine: where they are run instead.
RUN_ELSEWHERE = {
    "make demo": ".ci/run",
    "make test": ".ci/run",
    "launch --hostfile hostfiles/loopback examples/train_gpt.py"
    " --deepspeed examples/configs/zero2.json": "tests/e2e/test_train_gpt.py",
    "launch --num_gpus 2 examples/train_gpt.py --deepspeed examples/configs/zero2.json": "tests/e2e/test_train_gpt.py",
    "launch --num_gpus 2 examples/hf_trainer.py --deepspeed examples/configs/hf_zero2.json"
    " --output_dir out --max_steps 20": "tests/huggingface/test_example.py",
}


def readme_commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def test_the_readme_has_commands() -> None:
    assert {"make demo", "make test"} < set(readme_commands())
    assert set(RUN_ELSEWHERE) <= set(readme_commands())


@pytest.mark.parametrize("command", [c for c in readme_commands() if c not in RUN_ELSEWHERE])
def test_readme_commands_succeed(command: str) -> None:
    program, *arguments = shlex.split(command)
    assert program == "launch"
    result = subprocess.run(
        [sys.executable, "-m", "launcher", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize(("command", "place"), RUN_ELSEWHERE.items())
def test_long_readme_commands_are_run_where_it_is_said(command: str, place: str) -> None:
    text = (ROOT / place).read_text()
    if command.startswith("make"):
        assert re.search(rf"^{re.escape(command)}\b", text, re.MULTILINE)
        assert shutil.which("make") is None or subprocess.run(["make", "-n", command[5:]], cwd=ROOT).returncode == 0
    elif command not in text.replace('"\n    "', ""):  # whole, or as what it is made of
        options, config = command.removeprefix("launch ").split(" examples/train_gpt.py --deepspeed ")
        assert all(repr(word)[1:-1] in text for word in (*options.split(), config))


def printed_examples() -> list[tuple[str, str]]:
    """Commands of the pages that need nothing but this package, with the output the page shows."""
    blocks = [
        block
        for page in PAGES
        for block in re.findall(r"```\n\$ (launch estimate .*?)```", page.read_text(), re.DOTALL)
    ]
    return [(block.partition("\n")[0], block.partition("\n")[2]) for block in blocks]


@pytest.mark.parametrize(("command", "output"), printed_examples())
def test_a_page_shows_what_its_command_prints(command: str, output: str) -> None:
    result = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert result.output.splitlines() == output.splitlines()


def test_there_is_an_example_with_its_output() -> None:
    assert printed_examples()


@pytest.mark.parametrize("world_size", [1, 8])
def test_the_formulas_of_the_memory_page_are_those_of_the_planner(world_size: int) -> None:
    """The columns that are formulas; those in words are held to the engine by tests/planner/test_engine_agrees.py."""
    rows = re.findall(r"^\| (\d) \| (.*?) \| (.*?) \| (.*?) \|", (ROOT / "docs/memory.md").read_text(), re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    num_params = 800_000
    model = ModelFacts("m", "test", tuple(Parameter(f"blocks.{i}.w", num_params // 4) for i in range(4)))
    for stage, *cells in rows:
        zero = {"stage": int(stage), "stage3_param_persistence_threshold": 0}
        config = load_config({"bf16": {"enabled": True}, "zero_optimization": zero}).config
        found = rank_memory(model, setting_of(config, world_size), world_size)
        for cell, num_bytes in zip(cells, (found.parameters, found.gradients, found.optimizer), strict=True):
            factor, is_sharded = re.match(r"(\d+)P(/N)?", cell).groups()  # type: ignore[union-attr]
            assert num_bytes == int(factor) * num_params // (world_size if is_sharded else 1), (stage, cell)


def test_links_lead_somewhere() -> None:
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())]
    assert len(links) > len(PAGES)
    assert [(p.name, t) for p, t in links if "://" not in t and not (p.parent / t).exists()] == []


def test_environment_page_lists_every_variable() -> None:
    text = (ROOT / "docs" / "environment.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \| (set|read) \| (.*?) \|$", text, re.MULTILINE))
    assert rows == {(variable.name, variable.direction, variable.doc) for variable in env.ALL}


def test_architecture_names_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "launcher").glob("*/__init__.py")}
    missing = [room for room in rooms if not re.search(rf"^\s*\d?\s.*\b{room}\b", text, re.MULTILINE)]
    assert missing == []
