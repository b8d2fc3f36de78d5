"""Batch scripts: from options to text. Submitting and reading logs is the command line's business."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import UsageError
from launcher.base.fields import option_of
from launcher.base.preemption import EXIT_REQUEUE

# They are part of the package, so that a wheel has them; a checkout shows them at the top too, by a link.
_PACKAGE = Path(__file__).resolve().parents[1]
_TEMPLATES = _PACKAGE / "slurm_templates"
TIME_FORM = re.compile(r"\d+|\d+:\d+(:\d+)?|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_GPUS_FORM = re.compile(r"(?:[A-Za-z][\w.-]*:)?([1-9]\d{0,3})")
_GPUS_OF_GRES = re.compile(r"(?:^|,)gpu(?::[A-Za-z][\w.-]*)?(?::([1-9]\d{0,3}))?(?=,|$)")
_NOTICE = "B:USR1@120"  # two minutes before the end, to the batch script
_ARRAY_FORM = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?")
_SIGNAL_FORM = re.compile(r"(?:[RB]{1,2}:)?(\w+)(?:@\d{1,5})?")
_SAFE = re.compile(r"[\w@%+=:,./*|&!()\[\]<>~^-]+")


@dataclass(frozen=True)
class Sbatch:
    """What a job asks Slurm for. Texts are in sbatch's own forms; None leaves the choice to Slurm."""

    job_name: str | None = None
    nodes: int = 1
    gpus_per_node: str | None = None  # "8" or "a100:8"
    gres: str | None = None  # other resources of each node, or the GPUs too: "gpu:a100:8,nvme:1"
    cpus_per_task: int | None = None  # CPUs of each node: one task on each
    time: str | None = None
    output: str | None = None
    error: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    mem: str | None = None
    mem_per_cpu: str | None = None
    exclusive: bool = False
    mail_user: str | None = None
    mail_type: str | None = None
    dependency: str | None = None
    signal: str | None = None
    array: str | None = None
    container_image: str | None = None
    requeue: bool = False  # warn the ranks before the time limit, and start again when they ask for it
    setup: tuple[str, ...] = ()  # shell lines before `launch`

    def __post_init__(self) -> None:
        for name, form, meaning, expected in (
            ("time", TIME_FORM, "a time", '"20:00:00" or "2-12:00:00"'),
            ("gpus_per_node", _GPUS_FORM, "a number of GPUs", '"8" or "a100:8"'),
            ("array", _ARRAY_FORM, "a range", '"0-7", "0-7%2" or "1,3,5"'),
        ):
            value = getattr(self, name)
            if value is not None and not form.fullmatch(value):
                raise UsageError(f'"{value}" is not {meaning}', where=option_of(name), hint=f"expected {expected}")
        if self.signal is not None and not _is_signal(self.signal):
            raise UsageError(
                f'"{self.signal}" is not a signal', where="--signal", hint='expected "USR1@120" or "B:USR1@120"'
            )
        if self.gpus_per_node is not None and _GPUS_OF_GRES.search(self.gres or ""):
            raise UsageError("--gpus-per-node and --gres both name GPUs", hint="leave one of them out")
        if self.mem is not None and self.mem_per_cpu is not None:
            raise UsageError("--mem and --mem-per-cpu exclude each other", hint="leave one of them out")
        if self.requeue and self.container_image is not None:
            raise UsageError(
                "--requeue and --container-image exclude each other: no `launch` outlives the ranks of a container",
                hint="write a template of your own and name it with --template",
            )
        for line in self.setup:
            if "\n" in line:
                raise UsageError("a line of --setup holds a line break", hint="give --setup once for each line")

    @property
    def ranks_per_node(self) -> int:
        """GPUs of each node, 1 without."""
        if self.gpus_per_node is not None:
            match = _GPUS_FORM.fullmatch(self.gpus_per_node)
        else:
            match = _GPUS_OF_GRES.search(self.gres or "")
        return int(match[1] or 1) if match else 1

    def directives(self) -> list[str]:
        """Return the options of sbatch, one for each `#SBATCH` line. Raises: UsageError for control characters."""
        log = "%x-%A_%a.out" if self.array else "%x-%j.out"
        gpus = f"gpu:{self.gpus_per_node}" if self.gpus_per_node else None
        values: list[tuple[str, str | int | None]] = [
            ("job-name", self.job_name),
            ("nodes", self.nodes),
            # One launcher's agent on each node, which starts the ranks. More tasks would be more launchers.
            ("ntasks-per-node", 1),
            ("cpus-per-task", self.cpus_per_task),
            ("gres", ",".join(filter(None, (gpus, self.gres))) or None),
            ("mem", self.mem),
            ("mem-per-cpu", self.mem_per_cpu),
            ("time", self.time),
            ("output", self.output or log),
            ("error", self.error),
            ("partition", self.partition),
            ("account", self.account),
            ("qos", self.qos),
            ("constraint", self.constraint),
            ("nodelist", self.nodelist),
            ("exclude", self.exclude),
            ("reservation", self.reservation),
            ("dependency", self.dependency),
            ("array", self.array),
            ("signal", self.signal or (_NOTICE if self.requeue else None)),
            ("open-mode", "append" if self.requeue else None),
            ("mail-user", self.mail_user),
            ("mail-type", self.mail_type),
        ]
        lines = [f"--{name}={_quoted(name, str(value))}" for name, value in values if value is not None]
        flags = [("--exclusive", self.exclusive), ("--requeue", self.requeue)]
        return [*lines, *(flag for flag, is_on in flags if is_on)]


def _is_signal(text: str) -> bool:
    match = _SIGNAL_FORM.fullmatch(text)
    name = match[1].upper().removeprefix("SIG") if match else ""
    return name.isdigit() or f"SIG{name}" in signal.Signals.__members__


def job_name_of(script: str) -> str:
    """Return a name for the job that runs `script`, which a batch script can hold whatever the file is called."""
    return re.sub(r"[^\w.+@-]+", "-", Path(script).stem).strip("-") or "launch"


def render_script(options: Sbatch, words: list[str], template: Path | None = None, program: Sequence[str] = ()) -> str:
    """Return the batch script that runs `launch WORDS`. program: what runs in place of `launch`.

    template: a file of the user's own; it may extend ours by name and gets the same variables (docs/slurm.md).
    Raises: UsageError when a template cannot be read or used.
    """
    import jinja2  # not for those who render nothing

    loader = jinja2.FileSystemLoader([*([template.parent] if template else []), _TEMPLATES])
    environment = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # a shell script: values are quoted by shlex
    )
    name = template.name if template else f"{_template_for(options)}.sh.j2"
    try:
        return environment.get_template(name).render(_variables(options, words, program))
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"the template is wrong: {error.message}", where=f"{error.name}:{error.lineno}") from None
    except jinja2.TemplateNotFound as error:
        hint = f"ours are in {_TEMPLATES}"
        raise UsageError(f'there is no template "{error.name}"', where=str(template), hint=hint) from None
    except (jinja2.TemplateError, UnicodeDecodeError) as error:
        raise UsageError(f"the template cannot be used: {error}", where=str(template or name)) from None


def _template_for(options: Sbatch) -> str:
    if options.container_image is not None:
        return "container"
    if options.requeue:
        return "requeue"
    return "array" if options.array is not None else "plain"


def _variables(options: Sbatch, words: list[str], program: Sequence[str]) -> dict[str, object]:
    """Return what a template can use; texts are quoted for the shell."""
    ranks = options.ranks_per_node
    image = options.container_image or ""
    cpus = options.cpus_per_task
    return {
        "directives": options.directives(),
        "setup": options.setup,
        "command": shlex.join([*(program or (sys.executable, str(_PACKAGE / "__main__.py"))), *words]),
        "task_command": shlex.join(["launch", *words]),  # in an image its path is not known
        "nodes": options.nodes,
        "ranks_per_node": ranks,
        "cpus_per_rank": cpus // ranks if cpus is not None and cpus >= ranks else None,
        "container_image": shlex.quote(image),
        "requeue_code": EXIT_REQUEUE,
        "container_is_file": image.endswith((".sif", ".simg")),
    }


def _quoted(name: str, value: str) -> str:
    """Quote a value as sbatch reads `#SBATCH` lines. A line break would end the line and begin another."""
    if not value or any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise UsageError("the value is empty or holds control characters", where=f"--{name}")
    if _SAFE.fullmatch(value):
        return value
    if '"' in value or "\\" in value:
        raise UsageError("a batch script's options cannot hold quotes and backslashes", where=f"--{name}")
    return f'"{value}"'
