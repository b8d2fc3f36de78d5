"""`launch sbatch` against a real Slurm: every template is accepted, jobs are submitted, chained and followed."""

from __future__ import annotations

import json
import re
import shlex
import signal
import stat
import sys
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT, Launch, Result, run_here, run_launch, wait_until
from harness.launch.forked_ranks import in_forks
from harness.launch.slurm import LoopbackSlurm
from harness.train import hf_job

pytestmark = pytest.mark.cluster
TEMPLATES = sorted((ROOT / "slurm_templates").glob("*.j2"))
OPTIONS = {
    "plain": ["--nodes", "2", "--gpus-per-node", "2", "--cpus-per-task", "4", "--mem", "0", "--exclusive"],
    "array": ["--array", "0-3%2", "--mail-type", "END,FAIL", "--mail-user", "me@example.org"],
    "requeue": ["--requeue", "--nodes", "2", "--gpus-per-node", "1"],
    "container": ["--container-image", "image.sif", "--nodes", "3", "--gpus-per-node", "2"],
}


def sbatch(slurm: LoopbackSlurm, folder: Path, *words: str | Path) -> Result:
    return run_launch(folder, "sbatch", *words, env=slurm.env)


def states(slurm: LoopbackSlurm, *jobs: str) -> list[str]:
    found = [slurm.run("scontrol", "show", "job", job) for job in jobs]
    return [match[1] for text in found if (match := re.search(r"JobState=(\w+)", text))]


def test_every_template_is_tried() -> None:
    assert {path.name.partition(".")[0] for path in TEMPLATES} == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_slurm_accepts_every_template(slurm: LoopbackSlurm, tmp_path: Path, name: str) -> None:
    result = sbatch(slurm, tmp_path, *OPTIONS[name], "--time", "10:00", "train.py", "it's $HOME")
    assert result.code == 0, result.err
    path = tmp_path / "job.sh"
    path.write_text(result.out)
    slurm.run("sbatch", "--test-only", path, cwd=tmp_path)
    slurm.run("bash", "-n", path)
    assert sbatch(slurm, tmp_path, "--lint", path).out == f"{path}: ok\n"


def test_following_a_job_shows_its_log_and_has_its_code(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    options = ["--nodes", "3", "--gpus-per-node", "2", "--time", "5", "--follow"]
    scripts.write(tmp_path, scripts.ENVIRONMENT)
    result = sbatch(slurm, tmp_path, *options, "--setup", "export GREETING='hello there'", "script.py", "a b")
    assert result.code == 0, result.err
    ranks = [json.loads(text)["RANK"] for text in re.findall(r"ENV (\{.*\})$", result.out, re.MULTILINE)]
    assert sorted(ranks) == list("012345")
    assert result.out.count('ARGV ["a b"]') == 6
    scripts.write(tmp_path, scripts.BIPOLAR)
    result = sbatch(slurm, tmp_path, *options, "script.py", "exit")
    assert result.code == 3
    assert "ended as FAILED (exit code 3)" in result.err


def test_an_interrupt_ends_the_following_and_not_the_job(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "import time; print('READY', flush=True); time.sleep(600)")
    following = Launch(tmp_path, "sbatch", "--time", "5", "--follow", script, env=slurm.env)
    wait_until(lambda: "READY" in following.out, "the log", 60)
    following.signal(signal.SIGINT)
    result = following.wait()
    job = result.out.split()[0]
    try:
        assert result.code == 130
        assert f"end it with `scancel {job}`" in result.err
        assert states(slurm, job) == ["RUNNING"]
    finally:
        slurm.run("scancel", job)
    wait_until(lambda: states(slurm, job) == ["CANCELLED"], "the end", 30)


def test_what_a_job_waits_for_is_told(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "")
    following = Launch(tmp_path, "sbatch", "--nodes", "9", "--time", "5", "--follow", script, env=slurm.env)
    try:
        wait_until(lambda: "waits in the queue: PartitionNodeLimit" in following.err, "the reason", 60)
    finally:
        following.signal(signal.SIGINT)
        slurm.run("scancel", following.wait().out.split()[0])


def test_a_chain_runs_one_after_the_other(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "import sys; sys.exit(1)")
    result = sbatch(slurm, tmp_path, "--time", "5", "--chain", "3", "--submit", script)
    assert result.code == 0, result.err
    jobs = result.out.split()
    assert len(jobs) == 3
    wait_until(lambda: states(slurm, *jobs) == ["FAILED"] * 3, "the jobs", 60)
    starts = [re.findall(r"StartTime=(\S+)", slurm.run("scontrol", "show", "job", job))[0] for job in jobs]
    assert starts == sorted(starts)


def test_an_array_gives_each_job_its_number(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "import os; print('ELEMENT', os.environ['SLURM_ARRAY_TASK_ID'])")
    result = sbatch(slurm, tmp_path, "--time", "5", "--array", "4-5", "--submit", script)
    assert result.code == 0, result.err
    logs = [tmp_path / f"script-{result.out.strip()}_{number}.out" for number in (4, 5)]
    wait_until(lambda: all(log.exists() and "ELEMENT" in log.read_text() for log in logs), "the logs", 60)
    assert ["ELEMENT 4" in log.read_text() for log in logs] == [True, False]


def test_ranks_run_in_the_container(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    """A stand-in for apptainer that runs what it is given, and says so."""
    apptainer = tmp_path / "apptainer"
    apptainer.write_text('#!/bin/bash\n[ "$1 $2" = "exec --nv" ] || exit 9\necho "IN $3"\nshift 3\nexec "$@"\n')
    launch = tmp_path / "launch"
    launch.write_text(f'#!/bin/bash\nexec {sys.executable} -m launcher "$@"\n')
    for path in (apptainer, launch):
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    scripts.write(tmp_path, scripts.ENVIRONMENT)
    options = [*OPTIONS["container"], "--time", "5", "--setup", f'export PATH={tmp_path}:"$PATH"', "--follow"]
    result = sbatch(slurm, tmp_path, *options, "script.py")
    assert result.code == 0, result.err + result.out
    assert result.out.count("IN image.sif") == 6
    ranks = [json.loads(text)["RANK"] for text in re.findall(r"ENV (\{.*\})$", result.out, re.MULTILINE)]
    assert sorted(ranks) == list("012345")


def test_what_slurm_refuses_is_passed_on(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    result = sbatch(slurm, tmp_path, "--partition", "nowhere", "--submit", scripts.write(tmp_path, ""))
    assert result.code == 2
    assert "✗ sbatch: " in result.err
    assert "invalid partition" in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--follow", "--array", "0-1", "train.py"], "--follow shows one log"),
        (["--chain", "2", "train.py"], "--chain is about submitting"),
        (["--launch-args", "'", "train.py"], "--launch-args"),
        (["--lint", "no-such-file"], "the script cannot be read"),
        ([], "SCRIPT is missing"),
        (["--submit", "nosuch.py"], "nosuch.py does not exist here, and the job would look for it from this folder"),
        (["--launch-args", "--nosuch", "train.py"], "✗ --launch-args: there is no option --nosuch"),
        (["--launch-args", "--bogus", "train.py"], "there is no option --bogus\n  → launch run --help lists"),
        (["--launch-args", "--num_gpus two", "train.py"], "✗ --launch-args: --num-gpus: expected a whole number"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    result = run_here(tmp_path, "sbatch", *words)
    assert result.code == 2
    assert message in result.err


def test_lint_finds_nothing_in_the_example(tmp_path: Path) -> None:
    result = run_here(tmp_path, "sbatch", "--lint", ROOT / "examples" / "hf_trainer.slurm")
    assert result.code == 0, result.out + result.err


def test_lint_names_line_and_remedy(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/bash\n#SBATCH --time=1:00:00\n#SBATCH --ntasks-per-node=4\nlaunch train.py\n")
    result = run_here(tmp_path, "sbatch", "--lint", path)
    assert result.code == 2
    assert f"{path}:3: --ntasks-per-node is 4" in result.err
    assert "→ write --ntasks-per-node=1" in result.err


@pytest.mark.long  # the same as a default preemption, which Slurm announces in another way
def test_a_preempted_job_saves_and_starts_again(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os, pathlib, sys, time
        import launcher
        from launcher.base.resume import start_kind
        rank, saved = os.environ["RANK"], pathlib.Path("saved_" + os.environ["RANK"])
        if saved.exists():
            print("RESUMED" if start_kind(os.environ).resumes else "BEGUN ANEW", rank)
            sys.exit(0)
        print("FIRST" if not start_kind(os.environ).resumes else "RESUMED TOO EARLY", rank, flush=True)
        while not launcher.preempted():
            time.sleep(0.02)
        time.sleep(float(rank))  # one rank saves longer than the other
        saved.touch()
        sys.exit(launcher.EXIT_REQUEUE)
        """,
    )
    result = sbatch(slurm, tmp_path, *OPTIONS["requeue"], "--time", "5", "--submit", script)
    assert result.code == 0, result.err
    job = result.out.strip()
    log = tmp_path / f"script-{job}.out"
    wait_until(lambda: log.exists() and log.read_text().count("FIRST") == 2, "the first run", 60)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: "Restarts=1" in slurm.run("scontrol", "show", "job", job), "the requeue", 30)
    assert (tmp_path / "saved_0").exists()
    assert (tmp_path / "saved_1").exists()
    wait_until(lambda: log.read_text().count("RESUMED") == 2, "the second run", 150)
    wait_until(lambda: states(slurm, job) == ["COMPLETED"], "the end", 30)


@pytest.mark.parametrize("options", [[], ["--requeue"]])
def test_a_cancelled_job_leaves_the_ranks_their_grace(slurm: LoopbackSlurm, tmp_path: Path, options: list[str]) -> None:
    """Slurm signals every process: the script, `launch`, srun, the agents, the ranks. It kills after KillWait, 5 s."""
    script = scripts.write(tmp_path, scripts.SAVES)
    result = sbatch(slurm, tmp_path, *options, "--nodes", "2", "--time", "5", "--submit", script)
    job = result.out.strip()
    log = tmp_path / f"script-{job}.out"
    wait_until(lambda: log.exists() and log.read_text().count("READY") == 2, "the ranks", 60)
    slurm.run("scancel", job)
    wait_until(lambda: log.read_text().count("SAVED") == 2, "the ranks to save", 30)
    text = log.read_text()
    assert text.count("ASKED") == 2, f"once each: {text}"
    assert "again" not in text
    wait_until(lambda: states(slurm, job) == ["CANCELLED"], "the end", 30)


def test_preemption_as_slurm_does_it_by_default_is_a_notice(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    """Without PreemptParameters=send_user_signal there is SIGTERM alone, to all processes, and SIGKILL later."""
    script = scripts.write(
        tmp_path,
        """
        import os, pathlib, sys, time
        import launcher
        saved = pathlib.Path("saved_" + os.environ["RANK"])
        if saved.exists():
            print("RESUMED", flush=True)
            sys.exit(0)
        print("READY", flush=True)
        while not launcher.preempted():
            time.sleep(0.02)
        time.sleep(float(os.environ["RANK"]))  # one rank saves longer than the other
        saved.touch()
        sys.exit(launcher.EXIT_REQUEUE)
        """,
    )
    low = [*OPTIONS["requeue"], "--partition", "low", "--time", "5", "--submit"]
    job = sbatch(slurm, tmp_path, *low, script).out.strip()
    log = tmp_path / f"script-{job}.out"
    wait_until(lambda: log.exists() and log.read_text().count("READY") == 2, "the first run", 60)
    whole = ["--partition", "high", "--nodes", "3", "--exclusive", "--time", "1", "--output", "/dev/null"]
    other = slurm.run("sbatch", "--parsable", *whole, "--wrap", "true").strip()
    wait_until(lambda: "Restarts=1" in slurm.run("scontrol", "show", "job", job), "the requeue", 30)
    wait_until(lambda: states(slurm, other) == ["COMPLETED"], "the job that preempts", 60)
    text = log.read_text()
    assert "DUE TO PREEMPTION" in text
    assert "the job is about to be preempted" in text
    assert "✗" not in text
    assert (tmp_path / "saved_0").exists()
    assert (tmp_path / "saved_1").exists()
    wait_until(lambda: log.read_text().count("RESUMED") == 2, "the second run", 150)
    wait_until(lambda: states(slurm, job) == ["COMPLETED"], "the end", 30)


@pytest.mark.long
def test_a_preempted_training_continues_from_its_checkpoint(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    """The script knows nothing of checkpoints: the config says where, the notice when, the requeue to continue."""
    script = scripts.write(
        tmp_path,
        """
        import os, time
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # the nodes' names do not resolve here
        import torch, launcher
        config = {
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "checkpoint": {"folder": "saved"},
        }
        engine, *_ = launcher.initialize(model=torch.nn.Linear(4, 1), config=config)
        print("BEGINS BEHIND", engine.global_steps, flush=True)
        while engine.global_steps < 6:
            if engine.global_steps == 2 and os.environ["RANK"] == "1":
                print("READY", flush=True)
                while not launcher.preempted():
                    time.sleep(0.02)
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
        print("DONE AT", engine.global_steps, flush=True)
        """,
    )
    *options, in_fork = in_forks(preload=hf_job.IMPORTS)  # which another test of this group needs
    launch_options = ["--launch-args", shlex.join(map(str, options))]
    result = sbatch(slurm, tmp_path, *OPTIONS["requeue"], "--time", "5", "--submit", *launch_options, in_fork, script)
    assert result.code == 0, result.err
    job = result.out.strip()
    log = tmp_path / f"{in_fork.stem}-{job}.out"
    wait_until(lambda: log.exists() and "READY" in log.read_text(), "the first run", 120)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: log.read_text().count("DONE AT 6") == 2, "the second run", 200)
    text = log.read_text()
    assert (text.count("BEGINS BEHIND 0"), text.count("BEGINS BEHIND 3")) == (2, 2), text
    assert "step 3 is saved in saved" in text
    wait_until(lambda: states(slurm, job) == ["COMPLETED"], "the end", 30)
