"""The rules of style that a tool can hold: sizes, typing, imports, where printing is allowed."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "launcher").rglob("*.py"))
MAX_FILE_LINES = 800
SMALL_FILE_LINES, MAX_SMALL_FILES = 60, 40
MAX_FUNCTION_LINES = 120
MAX_P90_FUNCTION_LINES = 40
MAX_CLASS_LINES = 500
MAX_PARAMETERS = 8
# Signatures that are not ours to choose: name -> why.
WIDE_SIGNATURES = {
    "initialize": "DeepSpeed's signature, which scripts call by position and by name",
    "init_distributed": "DeepSpeed's signature",
    "run": "click passes every option of a command as one argument; `launcher.run` has them as keywords",
    "DeepSpeedCPUAdam.__init__": "DeepSpeed's signature, which scripts call by position and by name",
    "FusedAdam.__init__": "DeepSpeed's signature, which scripts call by position and by name",
    "FusedLamb.__init__": "DeepSpeed's signature, which scripts call by position and by name",
    "OneCycle.__init__": "DeepSpeed's signature, which scripts call by position and by name",
    "build_loader": "keyword-only, the names of torch's DataLoader",
    "PipelineModule.__init__": "DeepSpeed's signature, which scripts call by position and by name",
    "MoE.__init__": "DeepSpeed's signature, which scripts call by position and by name",
    "TiledLinear.__init__": "DeepSpeed's signature, which scripts call by position and by name",
    "top1gating": "DeepSpeed's signature, which scripts call by position and by name",
    "TopKGate.__init__": "DeepSpeed's signature, which scripts call by position and by name",
    "sequence_tiled_compute": "DeepSpeed's signature, which scripts call by position and by name",
    "SequenceTiledCompute.apply": "DeepSpeed's signature, which scripts call by position and by name",
    "get_model_profile": "DeepSpeed's signature, which scripts call by position and by name",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions() -> Iterator[tuple[Path, Function]]:
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, Function):
                yield path, node


def num_lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def place(path: Path, node: ast.stmt) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def test_every_file_is_short_and_says_what_it_is_for() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}
    silent = [path for path in SOURCES if not ast.get_docstring(parsed(path)) and path.name != "__main__.py"]
    assert silent == []


def test_files_under_60_lines_have_a_reason_that_contributing_names() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Files under 60 lines")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(launcher/[\w/]+\.py)`", section))
    sources = [path for path in SOURCES if path.name != "__init__.py"]
    small = {str(path.relative_to(ROOT)) for path in sources if len(path.read_text().splitlines()) < SMALL_FILE_LINES}
    assert small == named
    assert len(small) <= MAX_SMALL_FILES


def test_functions_and_classes_are_small() -> None:
    lengths = [num_lines(node) for _, node in functions()]
    long = [f"{place(p, n)} {n.name}: {num_lines(n)}" for p, n in functions() if num_lines(n) > MAX_FUNCTION_LINES]
    assert long == []
    assert statistics.quantiles(lengths, n=10)[8] <= MAX_P90_FUNCTION_LINES
    large = [
        f"{place(path, node)} {node.name}: {num_lines(node)}"
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef) and num_lines(node) > MAX_CLASS_LINES and "schema" not in path.name
    ]
    assert large == []


def test_signatures_are_narrow() -> None:
    wide = []
    owners = {
        node: owner.name
        for path in SOURCES
        for owner in ast.walk(parsed(path))
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
    }
    for path, node in functions():
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        num_parameters = len([a for a in arguments if a.arg not in ("self", "cls")])
        names = {node.name, f"{owners.get(node)}.{node.name}"}
        if num_parameters > MAX_PARAMETERS and names.isdisjoint(WIDE_SIGNATURES):
            wide.append(f"{place(path, node)} {node.name}: {num_parameters}")
    assert wide == []


def imports_of(path: Path, modules: frozenset[str]) -> Iterator[str]:
    """Yield the modules of the package that a file imports when it is loaded, or for its types alone."""
    for outer in parsed(path).body:
        for node in outer.body if isinstance(outer, ast.If) else [outer]:
            if isinstance(node, ast.ImportFrom) and node.module:
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                yield from ({name if name in modules else node.module for name in names} & modules)
            elif isinstance(node, ast.Import):
                yield from ({alias.name for alias in node.names} & modules)


def test_no_import_circles_for_types_neither() -> None:
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES}
    modules = frozenset(names.values())
    graph = {name: set(imports_of(path, modules)) - {name} for path, name in names.items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_what_is_noted_on_parameters_and_modules_goes_through_one_file() -> None:
    attributes = re.compile(r"""["']_launch_\w+["']|getattr\(\w+, ["']ds_(shape|numel)["']""")
    users = {str(path.relative_to(ROOT)) for path in SOURCES if attributes.search(path.read_text())}
    assert users == {"launcher/sharding/layout.py"}  # the shape of a sharded parameter; marks are of `zero/marks.py`


def test_private_parts_of_torch_are_in_one_file() -> None:
    """Operators `_foreach_*` aside; zero_to_fp32.py stands alone, and rehearsals have a file of their own."""
    private = re.compile(
        r"""\b(torch(\.\w+)*|dist|distributed_c10d)\._(?!foreach_)[a-zA-Z]\w*|from torch(\.\w+)*\._\w+ import"""
    )
    code = {path: "\n".join(line.partition("#")[0] for line in path.read_text().splitlines()) for path in SOURCES}
    users = {str(path.relative_to(ROOT)) for path, text in code.items() if private.search(text)}
    own = {"launcher/checkpoint/zero_to_fp32.py", "launcher/rehearse/torch_tools.py"}
    assert users == {"launcher/comm/torch_internals.py", *own}


def test_no_star_imports() -> None:
    stars = [
        place(path, node)
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]
    assert stars == []


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = "('torch', 'click', 'paramiko', 'pydantic', 'yaml')"
    code = f"import launcher, sys; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


def test_the_version_is_the_package_s_own() -> None:
    import launcher

    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'^version = "(.+)"$', text, re.MULTILINE) == [launcher.__version__]


def test_public_names_exist() -> None:
    import launcher

    for name in launcher.__all__:
        assert getattr(launcher, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = launcher.no_such_name
