"""What a person asks for who wants to see more, or less: --verbose, --log_level debug, NO_COLOR."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.launch.command import run_here, run_launch
from harness.launch.sshd import LoopbackSshd
from harness.launch.terminal import TerminalLaunch


@pytest.mark.cluster
def test_what_ssh_does_is_shown(sshd: LoopbackSshd, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n")
    words = ("exec", "-H", "hosts", "-F", sshd.ssh_config, "true")
    assert " ssh: " not in run_launch(tmp_path, *words).err
    shown = run_launch(tmp_path, words[0], "--verbose", *words[1:])
    assert shown.code == 0
    assert " ssh: Authentication (publickey) successful!" in shown.err


@pytest.mark.parametrize(
    "options", [("run", "--log_level", "debug"), ("run", "-v"), ("exec", "-v"), ("check", "--verbose")]
)
def test_an_error_has_its_stack_only_for_who_asks(tmp_path: Path, options: tuple[str, ...]) -> None:
    words = [*options, "-H", "no-such-file", *(["true"] if options[0] != "check" else [])]
    result = run_launch(tmp_path, *words)
    assert result.code == 2
    assert "Traceback (most recent call last)" in result.err
    assert result.err.splitlines()[-2].startswith("✗ no-such-file: hostfile cannot be read")
    plain = run_launch(tmp_path, options[0], *words[len(options) :])
    assert "Traceback" not in plain.err


@pytest.mark.parametrize("words", [("check", "-H", "no-such-file"), ("exec", "false"), ("nosuch.py",)])
def test_no_color_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = TerminalLaunch(tmp_path, *words)
    coloured.wait()
    assert b"\x1b[31m" in coloured.raw
    monkeypatch.setenv("NO_COLOR", "1")
    plain = TerminalLaunch(tmp_path, *words)
    plain.wait()
    assert "✗".encode() in plain.raw
    assert b"\x1b[3" not in plain.raw


def test_the_protocol_is_shown_without_values(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    shown = run_launch(tmp_path, "-v", "--env", "TOKEN=hf_very_secret", "t.py", "--key", "hf_very_secret").err
    assert "protocol: received Hello(version=" in shown
    assert "protocol: sent Spawn(job_id=" in shown
    assert "protocol: received Exited(rank=0, status=0" in shown
    assert "hf_very_secret" not in shown
    assert "protocol:" not in run_launch(tmp_path, "t.py").err


HOSTILE = "\x1b]0;owned\x07"


@pytest.mark.cluster
def test_what_files_and_hosts_say_does_not_drive_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({HOSTILE: 1}))
    (tmp_path / f"{HOSTILE}.py").write_text("")
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n")
    with LoopbackSshd(tmp_path / "server", settings="ForceCommand printf '\\033]0;owned\\007'\n") as server:
        hosts = ["-H", str(tmp_path / "hosts"), "-F", str(server.ssh_config)]
        shown = {
            "config check": run_here(tmp_path, "config", "check", "ds.json"),
            "--dry-run": run_here(tmp_path, "--dry-run", "--num-gpus", "1", f"{HOSTILE}.py"),
            "a job": run_launch(tmp_path, "--num-gpus", "1", f"{HOSTILE}.py"),
            "ps": run_here(tmp_path, "ps"),
            "check": run_launch(tmp_path, "check", *hosts),
            "exec": run_here(tmp_path, "exec", *hosts, "true"),
            "-v": run_launch(tmp_path, "-v", *hosts, "--master-addr", "127.0.0.1", f"{HOSTILE}.py"),
        }
    for name, result in shown.items():
        assert "owned" in result.out + result.err or name == "a job", f"{name}: {result.out}{result.err}"
        assert not set("\x1b\x07") & set(result.out + result.err), name
