"""The walks of docs/walks.md are those of the code: each function is where the page says, and leads to the next one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from harness.launch.command import ROOT

PAGE = (ROOT / "docs/walks.md").read_text()
# | number | `file` | `function` | `handed on as` | what happens |
ROW = re.compile(r"^\| *\d+ *\| *`([^`]+)` *\| *`([^`]+)` *\| *(?:`([^`]+)`)? *\|", re.MULTILINE)
WALKS = {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
# Files that a walk names at most.
LIMITS = {
    "A gradient at stage 2": 13,
    "A parameter, saved": 8,
    "A parameter, loaded": 7,
    "The key `stage3_prefetch_bucket_size`": 7,
    "A line of the hostfile, to a socket": 14,
    "A line that a rank prints, to the terminal": 10,
    "A failure of a rank, to the exit code": 12,
    "A Slurm allocation, to agents": 9,
}


def source_of(file: str, name: str) -> str:
    """Return the source of a function, a class, or a method as `Class.method`."""
    text = (ROOT / "launcher" / file).read_text()
    body: list[ast.stmt] = ast.parse(text).body
    node: ast.FunctionDef | ast.ClassDef | None = None
    for part in name.split("."):
        named = [each for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == part]
        assert named, f"{file} has no {name}"
        node = named[-1]
        body = node.body
    assert node is not None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def mentions(source: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", source) is not None


def test_the_page_has_these_walks() -> None:
    assert list(WALKS) == list(LIMITS)


@pytest.mark.parametrize("title", WALKS)
def test_each_step_leads_to_the_next(title: str) -> None:
    rows = ROW.findall(WALKS[title])
    assert len(rows) == WALKS[title].count("\n| ") - 1, "every row has the form of ROW, but for the header"
    before = ""
    for file, name, handed_on_as in rows:
        source = source_of(file, name)
        word = handed_on_as or name.rpartition(".")[2]
        if before:
            assert mentions(before, word), f"the step before does not mention {word}, and {file} has {name}"
        assert mentions(source, word), f"{name} does not mention {word}"
        before = source
    assert len({Path(file) for file, _, _ in rows}) <= LIMITS[title]
