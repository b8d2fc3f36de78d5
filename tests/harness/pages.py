"""The pages of the documentation: the commands, the output and the Python programs that they show."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import click

from launcher.cli.main import COMMANDS, cli
from launcher.cli.options.command import spelled

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# What a line of a block without a prompt begins with where it is a command and not a text.
_PROGRAMS = re.compile(
    r"(%%?launch|launch|make|pip|python3?|accelerate|deepspeed|torchrun|srun|sbatch|ssh[\w-]*|py-spy|eval|source|cd|export"
    r"|\.ci/[\w-]+)(?= |$)"
)
_OF_A_BENCHMARK = r"(?:\w+=\S+ )?(?:launch|python) (?:[^`]* )?(?:benchmarks|tests/soak)/\w+\.py[^`]*"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language ("" without one), its text, and the line of the page on which the text begins."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True)
class Shown:
    """A command that a page shows, with the output below it."""

    text: str
    page: str
    line: int
    output: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = page.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [Block(page, text.count("\n", 0, match.start(2)) + 1, match[1], match[2]) for match in found]


def prose_of(page: Path) -> str:
    """Return a page with its fenced blocks left empty: every line has the number it had."""
    fenced = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
    return fenced.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())


def python_blocks() -> list[Block]:
    """Return all blocks of Python."""
    return [block for page in PAGES for block in blocks_of(page) if block.language == "python"]


def commands() -> list[Shown]:
    """Return every command that a page shows: lines of blocks, and whole `launch` commands in the text."""
    return [found for page in PAGES for found in (*_in_blocks(page), *_in_text(page))]


def _in_blocks(page: Path) -> list[Shown]:
    found = []
    for block in blocks_of(page):
        if block.language in ("python", "json", "yaml"):
            continue
        lines = block.text.splitlines()
        prompts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
        if prompts:
            ends = [*prompts[1:], len(lines)]
            pieces = [(i, lines[i][2:], _output(lines[i + 1 : end])) for i, end in zip(prompts, ends, strict=True)]
        else:
            pieces = [(i, line.strip(), "") for i, line in enumerate(lines) if _is_command(line.strip())]
        for i, text, output in pieces:
            found.append(Shown(re.sub(r"\s{2,}#.*", "", text), page.name, block.line + i, output))
    return found


def _output(lines: list[str]) -> str:
    """Return what stands below a command; behind an empty line it is something else, such as a drawing."""
    return "\n".join(lines) if lines and lines[0] else ""


def _is_command(line: str) -> bool:
    return _PROGRAMS.match(line) is not None and "[OPTIONS]" not in line  # the form of a command


def _in_text(page: Path) -> list[Shown]:
    found = []
    for number, line in enumerate(prose_of(page).splitlines(), 1):
        for span in re.findall(r"`([^`]+)`", line.replace("\\|", "|")):
            if re.fullmatch(_OF_A_BENCHMARK, span) or (span.startswith("launch ") and is_whole(span)):
                found.append(Shown(span, page.name, number))
    return found


def words_of(command: str) -> list[str]:
    """Return the words of a command behind `launch`, up to a pipe, a redirection or the next command."""
    optional = re.sub(r"\[(--[\w-]+)\]", r"\1", command)  # `[--json]`: with it
    lexer = shlex.shlex(optional, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    return list(itertools.takewhile(lambda word: not set(word) <= set("|&;<>"), lexer))[1:]


def is_whole(command: str) -> bool:
    """Whether a `launch` command in the text could be typed: it is more than the name of a command or of an option."""
    if "·" in command or "[OPTIONS]" in command:  # a line that is printed, or a form
        return False
    context, words = resolved(words_of(command))
    if "--help" in words:
        return True
    if isinstance(context.command, click.Group):
        return False
    try:
        values = context.command.make_parser(context).parse_args(args=list(words))[0]
    except click.UsageError:  # an option without its value; one that is unknown is found by `tests/test_docs.py`
        return False
    if context.info_name == "run":  # the name of a script, or of its place; else a sentence that begins with `launch`
        script = values.get("script")
        return isinstance(script, str) and bool(re.search(r"[./]", script))
    if context.info_name == "sbatch":  # the script may be left out: `--lint FILE` takes none
        return any(isinstance(values.get(name), str) for name in ("script", "lint_file"))
    one_word = [each for each in context.command.params if isinstance(each, click.Argument) and each.nargs == 1]
    return all(isinstance(values.get(each.name), str) for each in one_word)


def resolved(words: list[str]) -> tuple[click.Context, list[str]]:
    """Return the context of the command that the words begin with, and the words behind its name."""
    parent = click.Context(cli, info_name="launch", token_normalize_func=spelled)
    name, *rest = words if words and words[0] in COMMANDS else ["run", *words]
    found = cli.get_command(parent, name)
    while isinstance(found, click.Group) and rest:
        below = found.get_command(parent, rest[0])
        if below is None:
            break
        parent = click.Context(found, parent=parent, info_name=name)
        name, found = rest.pop(0), below
    assert found is not None
    return click.Context(found, parent=parent, info_name=name, **found.context_settings), rest
