"""Every public name of the package as text, read from signatures and docstrings: `docs/api.md`.

`make docs` runs it; `make lint` compares the page with the code.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import launcher
from launcher.engine.deepspeed_engine import DeepSpeedEngine

_WIDTH = 100  # of a signature in one line
_LONGEST_DEFAULT = 40
_STARTING = "Starting ranks from Python"
# Heading -> the names under it, within `launcher`.
_PARTS = {
    "The engine": ("initialize", "init_distributed", "add_config_arguments"),
    "Progress and preemption": ("heartbeat", "phase", "log", "preempted", "EXIT_REQUEUE"),
    _STARTING: (
        *("run", "Options", "Outcome", "RankFailed", "JobTimeout", "JobError", "submit", "Sbatch", "SlurmJob"),
    ),
    "Parallelism": (
        *("PipelineModule", "LayerSpec", "TiedLayerSpec", "tp_model_init"),
        *("shard_sequence", "sequence_loss", "DistributedAttention"),
    ),
}
_MODULES = ("zero", "moe", "checkpoint", "checkpointing", "comm", "notebook", "compat")
_LEFT_OUT = {"load_ipython_extension"}  # what IPython calls
_HEAD = """# Python names

Every public name of `launcher`, written by `make docs` from signatures and docstrings. How they are used is in
[the engine](engine.md), [parallelism](parallelism.md), [checkpoints](checkpoints.md), [the Python API](python_api.md);
what `import deepspeed` gives is in [scripts written for DeepSpeed](huggingface.md#what-there-is).
"""


def markdown() -> str:
    """Return the page."""
    lines = [_HEAD]
    for heading, names in _PARTS.items():
        lines += [f"## {heading}\n", *_entries("launcher", launcher, names)]
    lines += ["## The methods of the engine\n", *_methods(DeepSpeedEngine)]
    for name in _MODULES:
        module = getattr(launcher, name)
        lines += [f"## launcher.{name}\n", f"{_text_of(module)}\n"]
        names = getattr(module, "__all__", ("install",))
        lines += _entries(f"launcher.{name}", module, sorted({*names} - _LEFT_OUT - {*_PARTS[_STARTING]}))
    return "\n".join(lines).rstrip() + "\n"


def public_names() -> set[str]:
    """Return the names of `launcher` that the page has."""
    return {name for names in _PARTS.values() for name in names} | {*_MODULES, "Engine", "__version__"}


def _entries(place: str, owner: Any, names: Any) -> Iterator[str]:
    for name in names:
        value = getattr(owner, name)
        yield f"### {place}.{name}\n"
        if not callable(value):
            yield f"`{value!r}`: an exit code, see [failures](failures.md#exit-codes).\n"
            continue
        yield f"```text\n{_signature(name, value)}\n```\n"
        yield f"{_text_of(value)}\n"


def _methods(kind: type) -> Iterator[str]:
    """Yield a table of a class's own public methods and properties, those of its bases in this package too."""
    yield "| name | what it does |\n|---|---|"
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if base.__module__.startswith("launcher."):
            for name, value in vars(base).items():
                if not name.startswith("_"):
                    found.setdefault(name, value)
    accessors = []
    for name in sorted(found):
        value = found[name]
        shown = name if isinstance(value, property) else f"{name}{_arguments(value)}"
        summary = _text_of(value).partition("\n\n")[0].replace("\n", " ")
        if summary.endswith("of the config in force."):
            accessors.append(f"`{shown}`")
        else:
            yield f"| `{shown}` | {summary} |"
    yield f"\nValues of the config in force, by DeepSpeed's names: {', '.join(accessors)}.\n"


def _arguments(value: Any) -> str:
    """Return the names of a method's arguments."""
    try:
        params = list(inspect.signature(value).parameters)[1:]
    except (TypeError, ValueError):
        return "()"
    return f"({', '.join(params)})"


def _signature(name: str, value: Any) -> str:
    """Return the signature of a function or a class, an argument on each line where it is long."""
    signature = inspect.signature(value)
    params = [_argument(param) for param in signature.parameters.values()]
    result = "" if inspect.isclass(value) else f" -> {_plain(signature.return_annotation)}"
    keyword = "class" if inspect.isclass(value) else "def"
    line = f"{keyword} {name}({', '.join(params)}){result}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{keyword} {name}(", *(f"    {param}," for param in params), f"){result}"])


def _argument(param: inspect.Parameter) -> str:
    prefix = "*" if param.kind is param.VAR_POSITIONAL else "**" if param.kind is param.VAR_KEYWORD else ""
    text = prefix + param.name
    if param.annotation is not param.empty:
        text += f": {_plain(param.annotation)}"
    if param.default is not param.empty:
        default = repr(param.default)
        # Objects are shown by addresses, which differ from run to run, or by all of their fields.
        text += f" = {'...' if default.startswith('<') or len(default) > _LONGEST_DEFAULT else default}"
    return text


def _plain(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else str(inspect.formatannotation(annotation))


def _text_of(value: Any) -> str:
    """Return a docstring; what it says of an argument begins a line, which Markdown would join to the one before."""
    text = inspect.getdoc(value) or ""
    return re.sub(r"(?<=[^\n])\n(?=(?:\w+(?:, \w+)*|Returns|Raises|Side effects): )", "  \n", text)


if __name__ == "__main__":
    sys.stdout.write(markdown())
