"""Batch scripts as text: what is rendered, what is refused, what lint finds. No Slurm needed."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from harness.launch.command import ROOT
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import UsageError
from launcher.slurm.lint import lint_script
from launcher.slurm.script import Sbatch, job_name_of, render_script

GUIDE = Sbatch(job_name="train", nodes=2, gpus_per_node="8", cpus_per_task=10, time="20:00:00", output="%x-%j.out")


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_the_script_asks_for_what_was_asked_for() -> None:
    text = render_script(GUIDE, ["run", "train.py", "--deepspeed", "ds.json"])
    assert directives(text) == [
        "--job-name=train",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=10",
        "--gres=gpu:8",
        "--time=20:00:00",
        "--output=%x-%j.out",
    ]
    command = [sys.executable, str(ROOT / "launcher" / "__main__.py"), "run", "train.py", "--deepspeed", "ds.json"]
    assert shlex.split(text.splitlines()[-1]) == ["exec", *command]
    assert text.startswith("#!/bin/bash\n")


def test_every_option_has_a_line() -> None:
    options = Sbatch(
        job_name="a b",
        partition="gpu",
        account="me",
        qos="high",
        constraint="a100|h100",
        mem="100G",
        exclusive=True,
        mail_user="me@example.org",
        mail_type="END,FAIL",
        dependency="afterok:1",
        signal="B:USR1@120",
        array="0-7%2",
        gres="nvme:1",
        gpus_per_node="a100:4",
        nodelist="node[1-4]",
        exclude="node7",
        reservation="maintenance",
        error="err-%j.txt",
    )
    lines = directives(render_script(options, ["run", "train.py"]))
    assert {'--job-name="a b"', "--exclusive", "--array=0-7%2", "--signal=B:USR1@120"} < set(lines)
    assert {"--constraint=a100|h100", "--mail-user=me@example.org", "--output=%x-%A_%a.out"} < set(lines)
    assert {"--gres=gpu:a100:4,nvme:1", "--nodelist=node[1-4]", "--exclude=node7"} < set(lines)
    assert {"--reservation=maintenance", "--error=err-%j.txt"} < set(lines)
    assert "--mem-per-cpu=4G" in Sbatch(mem_per_cpu="4G").directives()


@pytest.mark.parametrize(
    ("gres", "num_ranks"),
    [("gpu:8", 8), ("gpu:a100:4,nvme:1", 4), ("nvme:2,gpu", 1), ("nvme:2", 1), ("gpu:h100", 1), ("mygpu:3", 1)],
)
def test_gpus_in_gres_are_ranks(gres: str, num_ranks: int) -> None:
    options = Sbatch(gres=gres)
    assert options.ranks_per_node == num_ranks
    assert f"--gres={gres}" in options.directives()


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"gpus_per_node": "8", "gres": "nvme:1,gpu:4"}, ("--gpus-per-node", "--gres")),
        ({"mem": "0", "mem_per_cpu": "4G"}, ("--mem", "--mem-per-cpu")),
        ({"array": "x"}, ('"x" is not a range', "--array")),
        ({"array": "0-7%"}, ('"0-7%" is not a range', "--array")),
        ({"signal": "foo@60"}, ('"foo@60" is not a signal', "--signal")),
    ],
)
def test_options_that_are_wrong_or_contradict_each_other(values: dict[str, str], names: tuple[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        Sbatch(**values)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize("text", ["USR1", "B:USR1@120", "R:SIGTERM@60", "BR:10@5"])
def test_signals_are_those_of_sbatch(text: str) -> None:
    assert f"--signal={text}" in Sbatch(signal=text).directives()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1, max_size=4))
def test_no_argument_reaches_the_shell(arguments: list[str]) -> None:
    text = render_script(GUIDE, ["run", *arguments])
    command = text[text.index("exec ") :]
    assert shlex.split(command)[3:] == ["run", *arguments]


@given(st.text(max_size=20))
def test_no_value_makes_a_line_of_its_own(value: str) -> None:
    try:
        lines = Sbatch(job_name="x", partition=value).directives()
    except UsageError:
        return
    assert len(lines) == len(Sbatch(job_name="x", partition="p").directives())
    assert not any("\n" in line or "\r" in line for line in lines)


@pytest.mark.parametrize(
    "options",
    [{"time": "tomorrow"}, {"gpus_per_node": "all"}, {"gpus_per_node": "0"}, {"setup": ("a\nb",)}],
)
def test_wrong_values_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Sbatch(job_name="x", **options)  # type: ignore[arg-type]


def test_a_template_of_the_user_s_own_extends_ours(tmp_path: Path) -> None:
    template = tmp_path / "mine.j2"
    template.write_text('{% extends "plain.sh.j2" %}{% block run %}mine {{ command }} {{ nodes }}\n{% endblock %}')
    text = render_script(GUIDE, ["run", "train.py"], template)
    assert "#SBATCH --gres=gpu:8" in text
    assert text.rstrip().endswith("/launcher/__main__.py run train.py 2")
    assert "\nmine " in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% if %}", "mine.j2:1: the template is wrong"),
        ("{{ nonsense }}", "'nonsense' is undefined"),
        (None, "no templ"),
    ],
)
def test_a_wrong_template_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    template = tmp_path / "mine.j2"
    if text is not None:
        template.write_text(text)
    with pytest.raises(UsageError, match=message):
        render_script(GUIDE, ["run", "train.py"], template)


GOOD = """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH -N 2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8   # all of them
#SBATCH --time=20:00:00
#SBATCH --output=%x-%j.out
module load cuda
launch --num_gpus 8 train.py
"""


def test_a_good_script_has_no_findings(tmp_path: Path) -> None:
    assert lint_script(GOOD, "job.sh", tmp_path) == []
    assert lint_script(render_script(GUIDE, ["run", "train.py"]), "job.sh", tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new", "place", "message"),
    [
        ("#!/bin/bash\n", "\n", 1, "names no interpreter"),
        ("--ntasks-per-node=1", "--ntasks-per-node=8", 4, "--ntasks-per-node is 8"),
        ("--ntasks-per-node=1", "--ntasks=16", 4, "--ntasks is 16 for 2 nodes"),
        ("#SBATCH --time=20:00:00\n", "", 1, "no --time"),
        ("--time=20:00:00", "--time=20h", 6, "is not a time"),
        ("--num_gpus 8", "--num_gpus 4", 9, "--num_gpus 4, but the job asks for 8 GPUs on a node"),
        ("--num_gpus 8", "--nnodes=4", 9, "--nnodes=4, but the job asks for 2 nodes"),
        ("#SBATCH --gres=gpu:8   # all of them\n", "", 8, "the job asks for none"),
        ("#SBATCH --gres", "# SBATCH --gres", 5, "is a comment for Slurm"),
        ("module load", "#SBATCH --mem=0\nmodule load", 9, None),
        ("module load cuda\n", "module load cuda\n#SBATCH --mem=0\n", 9, "no #SBATCH line after the first command"),
        ("--job-name", "--a-plugin-s-own", 2, None),
        ("%x-%j.out", "logs/%x.out", 7, "there is no folder logs"),
        ("--job-name=train", "--signal=USR1@60", 2, "reaches the tasks of srun"),
        ("launch --num_gpus 8", "srun launch", 9, "one rank for 8 GPUs"),
        ("--job-name=train", "--job-name='train", 2, "a quote is not closed"),
        ("--job-name=train", "train", 2, '"train" is not an option'),
    ],
)
def test_mistakes_are_found_with_their_line(
    tmp_path: Path, old: str, new: str, place: int, message: str | None
) -> None:
    assert old in GOOD
    findings = lint_script(GOOD.replace(old, new), "job.sh", tmp_path)
    if message is None:
        assert findings == []
        return
    found = next(finding for finding in findings if message in finding.message)
    assert found.where == f"job.sh:{place}"
    assert found.hint


def test_windows_line_ends_are_found(tmp_path: Path) -> None:
    (found,) = lint_script(GOOD.replace("\n", "\r\n"), "a job.sh", tmp_path)
    assert found.message == "lines end as on Windows (CR LF): sbatch refuses the script"
    assert found.hint == "sed -i 's/\\r$//' 'a job.sh'"


@pytest.mark.parametrize(
    ("script", "name"),
    [("train.py", "train"), ('we"ird.py', "we-ird"), ("a b\n.py", "a-b"), ('"".py', "launch"), ("größe.py", "größe")],
)
def test_every_script_has_a_job_name(script: str, name: str) -> None:
    assert job_name_of(script) == name
    assert f"--job-name={name}" in render_script(Sbatch(job_name_of(script)), ["run", script]).replace('"', "")


@pytest.mark.parametrize(
    ("setup", "launch", "code", "is_requeued"),
    [
        ((), "exit 75", 75, False),  # ranks that end so by themselves, each time anew
        (("kill -USR1 $$",), "echo started; exit 0", 75, True),  # a notice before anything runs
        ((), "trap 'exit 75' USR1; while :; do kill -USR1 $PPID; sleep 0.05; done", 75, True),
        ((), "kill -USR1 $PPID; sleep 0.5; trap 'exit 75' USR1; while :; do sleep 0.05; done", 75, True),
        ((), "kill -USR1 $PPID; sleep 0.5; exit 3", 3, False),  # before it has listened
        ((), "exit 3", 3, False),
    ],
)
def test_a_job_is_requeued_after_a_notice_only(
    tmp_path: Path, setup: tuple[str, ...], launch: str, code: int, is_requeued: bool
) -> None:
    done = run_script(tmp_path, setup, f"bash -c {shlex.quote(launch)} &")
    assert done.returncode == code, done.stderr
    assert ("SCONTROL requeue 7" in done.stdout) == is_requeued
    assert "started" not in done.stdout


def test_a_notice_just_before_launch_is_started_is_passed_on(tmp_path: Path) -> None:
    launch = "trap 'exit 75' USR1; for n in {1..200}; do sleep 0.05; done"
    done = run_script(tmp_path, (), f"kill -USR1 $$\nbash -c {shlex.quote(launch)} &")
    assert (done.returncode, "SCONTROL requeue 7" in done.stdout) == (75, True), done.stderr


def run_script(folder: Path, setup: tuple[str, ...], start: str) -> subprocess.CompletedProcess[str]:
    """Run a batch script of --requeue with other lines in place of the one that starts `launch`."""
    text = render_script(Sbatch("train", requeue=True, setup=setup), ["run", "train.py"])
    (command,) = [line for line in text.splitlines() if line.endswith(" run train.py &")]
    text = text.replace(command, start)
    stub = folder / "scontrol"
    stub.write_text('#!/bin/sh\necho "SCONTROL $*"\n')
    stub.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    return subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True)


def test_the_controller_of_slurm_is_asked_less_and_less_often() -> None:
    from launcher.cli.commands.sbatch import poll_intervals

    intervals = list(itertools.islice(poll_intervals(), 20))
    assert intervals[0] == 1.0
    assert intervals == sorted(intervals)
    assert intervals[-1] == 30.0


@given(st.text(alphabet="#SBATCH -=\n'\"ntasks1:gpu launch%/", max_size=120))
def test_no_script_ends_in_a_traceback(text: str) -> None:
    for finding in lint_script(text, "job.sh", Path("/")):
        assert finding.message
