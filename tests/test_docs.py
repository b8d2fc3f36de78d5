"""The documents tell the truth: links lead somewhere, names exist, tables match the code. tests/docs runs commands."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import click
import pytest
from harness.pages import PAGES, ROOT, prose_of, resolved

import launcher
from launcher.base import env
from launcher.cli import reference
from launcher.cli.commands.run import run
from launcher.cli.options.accepted import without_counterpart
from launcher.cli.options.command import Option, spelled
from launcher.config.load import load_config
from launcher.planner.memory import rank_memory
from launcher.planner.model import ModelFacts, Parameter
from launcher.planner.settings import setting_of
from launcher.probes.reference import markdown as api_page
from launcher.probes.reference import public_names


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


def links_of(page: Path) -> list[tuple[Path, str]]:
    """Return the files of the repository that a page links, each with the heading that is meant, "" without one."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose_of(page))
    parts = [target.partition("#") for target in targets if "://" not in target]
    return [((page.parent / path).resolve() if path else page, heading) for path, _, heading in parts]


def headings_of(page: Path) -> set[str]:
    """Return what GitHub calls the headings of a page in links."""
    titles = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    links = [(page.name, path, heading) for page in PAGES for path, heading in links_of(page)]
    assert len(links) > len(PAGES)
    assert [link for link in links if not link[1].exists()] == []
    assert [link for link in links if link[2] and link[2] not in headings_of(link[1])] == []


def test_files_that_pages_name_exist() -> None:
    own = r"(?<!unit/)(?<!checkout/)\b"  # not in the tests of other projects
    pattern = own + r"((?:launcher|tests|examples|benchmarks|hostfiles)/[\w/.*-]*\w)(?:::(\w+))?"
    pages = [page for page in PAGES if page.name != "huggingface_tests.md"]  # those are files of other projects
    named = [(page.name, *found) for page in pages for found in re.findall(pattern, page.read_text())]
    assert [found for found in named if not list(ROOT.glob(found[1]))] == []
    tests = [(path, name) for _, path, name in named if name]
    assert tests
    assert [(path, name) for path, name in tests if f"def {name}(" not in (ROOT / path).read_text()] == []


def test_questions_are_answered_two_links_from_the_readme() -> None:
    """The table "Where is ...?": the page is linked by the README, and names the file."""
    table = prose_of(ROOT / "CONTRIBUTING.md").partition("## Where is ...?")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+\?) \| \[(launcher/[\w/.]+)\]\((.+?)\).* \| (.+) \|$", table, re.MULTILINE)
    assert len(rows) >= 12
    linked = [path for path, _ in links_of(ROOT / "README.md")]
    for question, name, target, found_by in rows:
        page = ROOT / (re.findall(r"\((.+)\)", found_by) or ["CONTRIBUTING.md"])[0]
        assert (ROOT / target).is_file(), question
        assert page in linked, question
        assert f"`{name}`" in page.read_text() or page.name == "CONTRIBUTING.md", (question, name)


def commands_of(page: Path) -> list[str]:
    """Return the `launch` commands of a page: in blocks of code and in the text."""
    text = page.read_text().replace("\\|", "|")
    blocks = re.findall(r"^```(?!python|yaml|json).*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", prose_of(page).replace("\\|", "|"))
    return [text for text in [*lines, *spans] if re.match(r"launch [-\w./]+( |$)(?!·)", text)]


def unknown_option(command: str) -> str | None:
    """Return the first option of a command that the command line does not know, None where it knows all."""
    command = re.split(r" [|>;#]|&&", command)[0]
    words = (shlex.split(command) if command.count("'") % 2 == command.count('"') % 2 == 0 else command.split())[1:]
    words = [word for word in words if word not in ("...", "[OPTIONS]")]  # as in text
    context, words = resolved(words)
    if isinstance(context.command, click.Group) and words:
        return words[0]
    try:
        context.command.make_parser(context).parse_args(words)
    except click.NoSuchOption as error:
        return error.option_name
    except click.UsageError:
        pass  # a part of a command, such as an option without its value
    return None


def test_pages_name_options_that_exist() -> None:
    pages = [page for page in PAGES if page.name != "options.md"]  # that one is generated
    commands = [(page.name, command) for page in pages for command in commands_of(page)]
    assert len(commands) > 150
    assert [(*found, unknown) for found in commands if (unknown := unknown_option(found[1])) is not None] == []


def test_pages_name_make_targets_that_exist() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(page.read_text() for page in PAGES)
    named = {word for words in re.findall(r"(?:`|^|\$ )make ([a-z- ]+)", text, re.MULTILINE) for word in words.split()}
    assert {"demo", "site", "man"} <= named
    assert named - known == set()


def avoided_words() -> dict[str, str]:
    """Return the words of the glossary that pages and help texts avoid, with those to write."""
    table = (ROOT / "docs/glossary.md").read_text().partition("## Words that these pages avoid")[2]
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", table, re.MULTILINE)
    return {word: instead for words, instead in rows for word in re.findall(r"`([^`]+)`", words)}


def test_pages_and_help_texts_keep_to_the_glossary() -> None:
    avoided = avoided_words()
    assert len(avoided) > 20
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, avoided))})\b", re.IGNORECASE)
    texts = {page.name: prose_of(page) for page in PAGES if page.name != "glossary.md"}
    texts["help"] = reference.markdown()
    found = [(name, match[0], avoided[match[0].lower()]) for name in texts for match in pattern.finditer(texts[name])]
    assert found == []


def test_messages_keep_to_the_glossary() -> None:
    """The texts of the program, docstrings and comments left out."""
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, avoided_words()))})\b", re.IGNORECASE)
    found = []
    for path in (ROOT / "launcher").rglob("*.py"):
        tree = ast.parse(path.read_text())
        # An expression that is a text alone is a docstring.
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs]
        found += [
            (f"{path.relative_to(ROOT)}:{node.lineno}", match[0])
            for node in texts
            if isinstance(node.value, str)
            for match in pattern.finditer(node.value)
        ]
    assert found == []


def test_the_page_of_options_is_that_of_the_commands() -> None:
    assert (ROOT / "docs/options.md").read_text() == reference.markdown(), "make docs"


def test_the_page_of_python_names_has_them_all() -> None:
    assert public_names() == set(launcher.__all__)
    assert (ROOT / "docs/api.md").read_text() == api_page(), "make docs"


def test_every_command_has_a_man_page() -> None:
    pages = reference.man_pages()
    assert {"launch.1", "launch-exec.1", "launch-config-check.1"} < set(pages)
    assert r"\-\-num\-gpus N" in pages["launch.1"]
    for name, page in pages.items():
        requests = set(re.findall(r"^[.'](\S*)", page, re.MULTILINE))
        assert requests <= {"TH", "SH", "PP", "TP", "B", "BR", "nf", "fi"}, name


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "accelerate"])
def test_options_of_other_launchers_are_taken_or_explained(launcher: str) -> None:
    text = (ROOT / "docs" / f"coming_from_{launcher}.md").read_text()
    _, _, table = text.partition("\n## Options\n")
    names = [
        spelled(name)
        for row in re.findall(r"^\| (`-.*?) \|", table.partition("\n## ")[0], re.MULTILINE)
        for name in re.findall(r"`(--\w[\w-]+)", row)
    ]
    assert len(names) > 20
    params = [each for each in run.params if isinstance(each, Option)]
    taken = {spelled(name) for each in params for name in (*each.opts, *each.also)}
    assert [name for name in names if name not in taken and without_counterpart(name) is None] == []


def test_environment_page_lists_every_variable() -> None:
    text = (ROOT / "docs" / "environment.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \| (set|read) \| (.*?) \|$", text, re.MULTILINE))
    assert rows == {(variable.name, variable.direction, variable.doc) for variable in env.ALL}


def test_architecture_names_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "launcher").glob("*/__init__.py")}
    missing = [room for room in rooms if not re.search(rf"^\s*\d?\s.*\b{room}\b", text, re.MULTILINE)]
    assert missing == []
