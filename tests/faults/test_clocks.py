"""Clocks that are wrong, differ between hosts, or are set while a job runs."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT, Launch, slowness, wait_until
from harness.launch.nodes import MortalNodes, available
from harness.launch.sshd import LoopbackSshd
from harness.needs import need

# In every python of the job, on every host: `time.time()` is off by what a file says now.
_SETTABLE_CLOCK = """
import time
_real = time.time
def _shown():
    with open({path!r}) as file:
        return _real() + float(file.read() or 0)
time.time = _shown
"""
LEASE_S = 4.0


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the seconds by which the wall clock is wrong."""
    offset = tmp_path / "offset"
    offset.write_text("0")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_SETTABLE_CLOCK.format(path=str(offset)))
    return offset


@pytest.mark.parametrize("jump_s", [86_400, -86_400])
def test_a_clock_that_is_set_ends_no_job_and_hides_no_cause(
    sshd: LoopbackSshd, tmp_path: Path, clock: Path, jump_s: int
) -> None:
    """Leases, hang watch, graces: a day forward or back, over SSH, for longer than the lease."""
    script = scripts.write(
        tmp_path,
        """
        import os, signal, sys, time
        import launcher
        assert time.time.__name__ == "_shown"
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it fails while it is being stopped
        print("READY", flush=True)
        while not os.path.exists("go"):
            launcher.heartbeat()
            time.sleep(0.05)
        if os.environ["RANK"] == "0":
            open("first", "w").close()
            sys.exit(5)
        while not os.path.exists("first"):
            time.sleep(0.05)
        time.sleep(1.0)
        sys.exit(6)  # a victim: later, whatever its clock says
        """,
    )
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    lease_s = LEASE_S * slowness()
    options = ("--hostfile", "hosts", "--ssh_config", str(sshd.ssh_config), "--lease", str(lease_s), "--grace", "5")
    path = f"{tmp_path / 'site'}:{ROOT}"
    job = Launch(tmp_path, *options, "--hang-timeout", "3", script, env={"PYTHONPATH": path})
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    clock.write_text(str(jump_s))
    time.sleep(1.5 * lease_s)  # longer than lease and hang timeout: what measured with this clock would be over
    assert job.process.poll() is None, job.out
    (tmp_path / "go").touch()
    result = job.wait()
    assert result.code == 5
    assert re.search(r"✗ rank 0 .* failed \d+\.\d s after start: exit code 5", result.err), result.err


@pytest.fixture
def skewed(tmp_path: Path) -> Iterator[MortalNodes]:
    reason = available()
    if reason is None and subprocess.run(["unshare", "--time", "--monotonic", "1", "true"]).returncode != 0:
        reason = "this kernel has no time namespaces"
    need(reason)
    with MortalNodes(tmp_path, 2, clock_offsets_s=(0, 3600)) as started:
        yield started


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_cause_is_found_on_hosts_whose_clocks_are_an_hour_apart(
    skewed: MortalNodes, tmp_path: Path, first: int
) -> None:
    """Both hosts fail, a second apart; the second does so although it is being stopped by then."""
    script = scripts.write(
        tmp_path,
        f"""
        import os, signal, time
        if os.environ["RANK"] in "02":
            is_first = os.environ["NODE_RANK"] == "{first}"
            if not is_first:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while not os.path.exists("go" if is_first else "first"):
                time.sleep(0.005)
            if is_first:
                open("first", "w").close()
                raise ValueError("first")
            time.sleep(1.0)
            raise ValueError("second")
        print("READY", time.monotonic(), flush=True)
        time.sleep(600)
        """,
    )
    options = ("--hostfile", str(skewed.hostfile), "--ssh_config", str(skewed.ssh_config), "--grace", "5")
    job = Launch(tmp_path, *options, script)
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    shown = sorted(float(text) for text in re.findall(r"READY (\S+)", job.out))
    assert shown[1] - shown[0] > 3000
    (tmp_path / "go").touch()
    result = job.wait()
    assert result.code == 1
    assert f"✗ rank {2 * first} ({skewed.nodes[first].address}" in result.err
    assert result.err.count("ValueError: first") == 1
    assert "ValueError: second" not in result.err
