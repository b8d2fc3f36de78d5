"""Mistakes in batch scripts that Slurm accepts and that cost a night, each with its line and its remedy."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from launcher.base.errors import Diagnostic
from launcher.slurm.script import TIME_FORM

# Letters of the options that a check looks at; what else sbatch does not know, it refuses at once.
_SHORT = {"G": "gpus", "N": "nodes", "e": "error", "n": "ntasks", "o": "output", "t": "time"}
_ALMOST = re.compile(r"#\s+SBATCH\b|#SBATCH[^\s]|##SBATCH\b|#sbatch\b")
_LAUNCHERS = re.compile(r"(?:^|[\s/;&|])(launch|launcher|torchrun|deepspeed|accelerate|torch\.distributed\.run)(?=\s)")
_PER_TASK = re.compile(r"(?:^|[\s;&|])srun\s[^;&|]*?(?:\blaunch\b|-m launcher)\s")


@dataclass
class _Script:
    """What a script says, by option; values with the line they stand in."""

    path: str
    options: dict[str, tuple[str, int]] = field(default_factory=dict)
    findings: list[tuple[int, Diagnostic]] = field(default_factory=list)

    def find(self, message: str, line: int, hint: str) -> None:
        self.findings.append((line, Diagnostic(message, f"{self.path}:{line}", hint)))

    def number(self, name: str) -> int | None:
        """Return the value of an option as a number: of `4`, of `gpu:a100:4`; None without."""
        text = self.options.get(name, ("", 0))[0].partition("(")[0].rpartition(":")[2]
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def lint_script(text: str, path: str, folder: Path) -> list[Diagnostic]:
    """Return every mistake found in a batch script, in the order of its lines.

    path: its name, for the findings. folder: where it will be submitted; output folders are looked for there.
    """
    script = _Script(path)
    if "\r\n" in text:
        script.find(
            "lines end as on Windows (CR LF): sbatch refuses the script", 1, f"sed -i 's/\\r$//' {shlex.quote(path)}"
        )
    lines = text.replace("\r\n", "\n").splitlines()
    body = _read_directives(script, lines)
    if not lines or not lines[0].startswith("#!"):
        script.find("the first line names no interpreter: sbatch refuses the script", 1, "begin it with #!/bin/bash")
    command = _command_line(lines, body)
    _check_tasks(script, command)
    _check_counts(script, command)
    _check_rest(script, folder)
    return [finding for _, finding in sorted(script.findings, key=lambda found: found[0])]


def _read_directives(script: _Script, lines: list[str]) -> int:
    """Fill in the options; returns the number of the first line of commands."""
    body = len(lines) + 1
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if line.startswith("#SBATCH") and line[7:8] in (" ", "\t", ""):
            if number > body:
                script.find(
                    "Slurm reads no #SBATCH line after the first command: this one has no effect",
                    number,
                    f"move it above line {body}",
                )
            else:
                _read_options(script, line[7:], number)
        elif _ALMOST.match(text):
            script.find("this line is a comment for Slurm", number, 'write it as "#SBATCH --option=value"')
        elif text and not text.startswith("#") and number < body:
            body = number
    return body


def _read_options(script: _Script, text: str, number: int) -> None:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        script.find("a quote is not closed", number, "close it")
        return
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        name, has_value, value = word.partition("=")
        if word.startswith("--"):
            name = name[2:]
        elif word.startswith("-") and len(word) > 1:
            name, has_value, value = _SHORT.get(word[1], word[1]), word[2:], word[2:].removeprefix("=")
        else:
            script.find(f'"{word}" is not an option', number, 'write options as "--name=value"')
            continue
        if not has_value and position < len(words) and not words[position].startswith("-"):
            value = words[position]
            position += 1
        script.options[name] = (value, number)


def _command_line(lines: list[str], body: int) -> tuple[str, int]:
    """Return the command that starts the ranks, continued lines joined, with its line; ("", 0) without."""
    joined, first = "", 0
    for number, line in enumerate(lines[body - 1 :], body):
        first = number if not joined else first
        joined += line.removesuffix("\\").strip() + " "
        if line.endswith("\\"):
            continue
        if _LAUNCHERS.search(joined) and not joined.lstrip().startswith("#"):
            return joined, first
        joined = ""
    return "", 0


def _check_tasks(script: _Script, command: tuple[str, int]) -> None:
    """One launcher on each node, or one task for each rank: what lies between starts everything several times."""
    text, line = command
    tasks, where = script.number("ntasks-per-node"), script.options.get("ntasks-per-node", ("", line))[1]
    is_per_task = bool(_PER_TASK.search(text))
    if not is_per_task and tasks not in (None, 1):
        script.find(
            f"--ntasks-per-node is {tasks}: a launcher starts the ranks of a node itself, from one task",
            where,
            "write --ntasks-per-node=1; CPUs are asked for with --cpus-per-task",
        )
    total, nodes = script.number("ntasks"), script.number("nodes") or 1
    if not is_per_task and total is not None and total != nodes:
        script.find(
            f"--ntasks is {total} for {nodes} nodes, and a launcher needs one task on each",
            script.options["ntasks"][1],
            "write --ntasks-per-node=1 in its place",
        )
    if is_per_task and tasks == 1 and (_gpus(script) or 1) > 1 and "--ntasks" not in text:
        script.find(
            f"`srun launch` makes each task one rank: one rank for {_gpus(script)} GPUs",
            line,
            "leave srun out: `launch` starts the ranks of all nodes itself",
        )


def _gpus(script: _Script) -> int | None:
    name = "gpus-per-node" if "gpus-per-node" in script.options else "gres"
    if name == "gres" and not script.options.get("gres", ("", 0))[0].startswith("gpu"):
        return None
    text = script.options.get(name, ("", 0))[0]
    return 1 if text == "gpu" else script.number(name)


def _check_counts(script: _Script, command: tuple[str, int]) -> None:
    text, line = command
    for pattern, have, what in (
        (r"--(?:num[_-]gpus|num[_-]accelerators|nproc[_-]per[_-]node)[= ](\d{1,9})", _gpus(script), "GPUs on a node"),
        (r"--(?:num[_-]nodes|nnodes)[= ](\d{1,9})", script.number("nodes"), "nodes"),
    ):
        match = re.search(pattern, text)
        if match is not None and have is not None and int(match[1]) != have:
            script.find(
                f"{match[0]}, but the job asks for {have} {what}",
                line,
                "make them equal, or leave it out: `launch` takes all that the job has",
            )
    if text and _gpus(script) is None and re.search(r"--(?:num[_-]gpus|nproc[_-]per[_-]node)[= ]", text):
        where = script.options.get("gpus", ("", 0))[1]
        if not where:
            script.find("the command wants GPUs, but the job asks for none", line, "add #SBATCH --gres=gpu:N")


def _check_rest(script: _Script, folder: Path) -> None:
    time, line = script.options.get("time", ("", 1))
    if "time" not in script.options:
        script.find("no --time: the partition's default holds, which may be minutes", 1, "add #SBATCH --time=20:00:00")
    elif not TIME_FORM.fullmatch(time):
        script.find(f'--time "{time}" is not a time', line, 'write "20:00:00" or "2-12:00:00"')
    for name in ("output", "error"):
        text, line = script.options.get(name, ("", 0))
        parent = Path(text).parent
        if text and "%" not in str(parent) and not (folder / parent).is_dir():
            script.find(
                f"--{name}: there is no folder {parent}, and Slurm does not make it: the job would end without a word",
                line,
                f"mkdir -p {shlex.quote(str(parent))}",
            )
    signal, line = script.options.get("signal", ("", 0))
    if signal and not signal.upper().startswith(("B:", "R:B:", "BR:")):
        script.find(f"--signal={signal} reaches the tasks of srun, not `launch`", line, f"write --signal=B:{signal}")
