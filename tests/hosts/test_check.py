"""`launch check` on this machine and over a real sshd."""

from __future__ import annotations

import json
import platform
import re
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from harness.launch.command import Launch, run_launch, slowness, wait_until
from harness.launch.sshd import LoopbackSshd, StalledServer

from launcher.base.timeouts import Timeouts
from launcher.cli.commands.check import exit_code_of
from launcher.cluster.cluster import Cluster, Host
from launcher.fleet.transports import SshTransports
from launcher.hosts import check
from launcher.hosts.check import Checker, CheckReport
from launcher.transport.ssh.options import SshOptions


def hosts(sshd: LoopbackSshd, folder: Path, *lines: str) -> list[str]:
    path = folder / "hosts"
    path.write_text("\n".join(lines) + "\n")
    return ["--hostfile", str(path), "--ssh_config", str(sshd.ssh_config)]


def run_checker(cluster: Cluster, sshd: LoopbackSshd, address: str | None, folder: Path) -> CheckReport:
    config = folder / "ssh_config"  # what is tested is the limit of the check
    config.write_text(f"ConnectTimeout 60\n{sshd.ssh_config.read_text()}")
    transports = SshTransports(SshOptions(ssh_config=config))
    if address is not None:
        transports.address_of = lambda _: address  # type: ignore[method-assign]
    try:
        return Checker(cluster, transports).run(str(folder))
    finally:
        transports.close()


def test_this_machine_alone(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "check")
    assert result.code == 0, result.out + result.err
    line, summary = result.out.splitlines()
    assert line.startswith("localhost  ok  this machine · ")
    assert f"python {platform.python_version()} · torch {metadata.version('torch')} · " in line
    assert summary == "1 host: 1 ok"


@pytest.mark.cluster
def test_every_host_is_shown_and_all_pairs_connect(sshd: LoopbackSshd, tmp_path: Path) -> None:
    result = run_launch(tmp_path, "check", *hosts(sshd, tmp_path, "127.0.0.[1-3] slots=2"))
    assert result.code == 0, result.out + result.err
    *lines, summary = result.out.splitlines()
    assert [line.split()[:3] for line in lines] == [[f"127.0.0.{i}", "ok", "ssh"] for i in (1, 2, 3)]
    assert all("2 slots" in line and "memory " in line and "disk " in line and "clock " in line for line in lines)
    assert summary == "3 hosts: 3 ok · TCP: 6 of 6 connections between hosts"
    assert not list(tmp_path.glob(".launch-check*"))


@pytest.mark.cluster
def test_the_json_holds_the_facts_and_no_secret(sshd: LoopbackSshd, tmp_path: Path) -> None:
    arguments = hosts(sshd, tmp_path, "127.0.0.1 slots=2", "no-such-host slots=1")
    result = run_launch(tmp_path, "check", *arguments, "--json", env={"HF_TOKEN": "hf_very_secret"})
    assert result.code == 69
    assert "hf_very_secret" not in result.out
    found: dict[str, Any] = json.loads(result.out)
    assert found["exit_code"] == 69
    first, second = found["hosts"]
    assert first["ok"]
    assert first["reachable"]
    assert abs(first["clock_skew_s"]) < slowness()
    assert first["facts"]["host"] == socket.gethostname()
    assert first["slots"] == [0, 1]
    assert not second["reachable"]
    assert second["facts"] is None
    assert "cannot be resolved" in second["findings"][0]["message"]
    assert found["connections"] == {"tried": 0, "made": 0}


@pytest.mark.cluster
def test_a_host_that_is_down_has_a_line_and_the_others_theirs(sshd: LoopbackSshd, tmp_path: Path) -> None:
    lines = ("127.0.0.1 slots=1", "127.0.0.2:1 slots=1", "127.0.0.3 slots=1")
    result = run_launch(tmp_path, "check", *hosts(sshd, tmp_path, *lines))
    assert result.code == 69
    marks = [line.split()[1] for line in result.out.splitlines() if line.startswith("127.")]
    assert marks == ["ok", "✗", "ok"]
    assert "→" in result.out
    assert "3 hosts: 2 ok, 1 ✗ · TCP: 2 of 2 connections between hosts" in result.out


@pytest.mark.cluster
def test_what_is_wrong_with_several_hosts_is_said_once(sshd: LoopbackSshd, tmp_path: Path) -> None:
    lines = ("127.0.0.1 slots=1", "127.0.0.2:1 slots=1", "127.0.0.3:1 slots=1", "127.0.0.4:1 slots=1")
    result = run_launch(tmp_path, "check", *hosts(sshd, tmp_path, *lines))
    assert result.code == 69
    first, second, *_ = result.out.splitlines()
    assert first.startswith("127.0.0.1")
    assert re.match(r"127\.0\.0\.\[2-4\] +✗   .*refused", second), result.out
    assert "4 hosts: 1 ok, 3 ✗" in result.out


@pytest.mark.cluster
def test_an_address_others_cannot_use_is_found(sshd: LoopbackSshd, tmp_path: Path) -> None:
    cluster = Cluster((Host("127.0.0.1", (0,)), Host("127.0.0.2", (0,))))
    report = run_checker(cluster, sshd, "no-such-host.invalid", tmp_path)
    assert (report.num_pairs, report.num_connected) == (2, 0)
    assert exit_code_of(report) == 1
    for host in report.hosts:
        (finding,) = host.findings
        assert finding.message == 'no other host can resolve the name "no-such-host.invalid"'
        assert "DNS" in finding.remedy


@pytest.mark.cluster
def test_localhost_among_other_hosts_is_found(sshd: LoopbackSshd, tmp_path: Path) -> None:
    report = run_checker(Cluster((Host("localhost", (0,)), Host("127.0.0.2", (0,)))), sshd, None, tmp_path)
    assert [finding.message for finding in report.hosts[0].findings][:1] == [
        "other hosts cannot reach this machine as localhost"
    ]
    assert report.hosts[1].is_ok


@pytest.mark.cluster
def test_a_folder_that_other_hosts_do_not_share_is_found(
    sshd: LoopbackSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checker, "_write_token", lambda *_: True)  # written to a disk the hosts do not see
    report = run_checker(Cluster((Host("127.0.0.1", (0,)),)), sshd, None, tmp_path)
    (finding,) = report.hosts[0].findings
    assert finding.message == f"{tmp_path} is another folder than here"
    assert exit_code_of(report) == 0


def test_a_folder_that_cannot_be_written_is_noted(tmp_path: Path) -> None:
    missing = tmp_path / "gone"
    transports = SshTransports(SshOptions())
    report = Checker(Cluster((Host("localhost", (0,)),)), transports).run(str(missing))
    transports.close()
    assert "whether all hosts share it was not checked" in report.notes[0]
    assert report.hosts[0].findings[0].message == f"{missing} does not exist"
    assert exit_code_of(report) == 1


@pytest.mark.cluster
def test_a_host_that_hangs_is_given_up_in_time(
    sshd: LoopbackSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "timeouts", lambda: Timeouts(check_round_s=10.0))
    with StalledServer() as stalled:
        cluster = Cluster((Host("127.0.0.1", (0,)), Host("127.0.0.1", (0,), port=stalled.port)))
        report = run_checker(cluster, sshd, None, tmp_path)
    assert [host.is_reachable for host in report.hosts] == [True, False]
    assert report.hosts[1].findings[0].message == "not done after 10 s"


@pytest.mark.cluster
def test_an_interrupt_ends_the_check(sshd: LoopbackSshd, tmp_path: Path) -> None:
    with StalledServer() as stalled:
        arguments = hosts(sshd, tmp_path, f"127.0.0.1:{stalled.port} slots=1")
        job = Launch(tmp_path, "check", *arguments)
        wait_until(lambda: "waiting for 127.0.0.1" in job.err, "the hint")
        job.signal(2)
        result = job.wait()
        assert result.code == 130
    assert "stopped before it was connected" in result.out, "not given up after its ConnectTimeout"
    assert not list(tmp_path.glob(".launch-check*"))
