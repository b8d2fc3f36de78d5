"""Which hosts a command means when none are named, and by which address they are told of node 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launcher.base.errors import LauncherError
from launcher.cli.main import cli
from launcher.cli.options import hosts as host_options


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a script and, where DeepSpeed looks for it, a hostfile of two hosts."""
    (tmp_path / "train.py").touch()
    (tmp_path / "hostfile").write_text("127.0.0.[1-2] slots=4\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host_options, "DEFAULT_HOSTFILE", str(tmp_path / "hostfile"))
    for name in ("LAUNCH_JOB_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def launch(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def hosts_of(*words: str) -> list[str]:
    result = launch(*words, "--dry-run", "--json", "train.py")
    assert result.exit_code == 0, result.exception
    plan = json.loads(result.stdout)
    return [f"{node['host']}:{len(node['slots'])}" for node in plan["nodes"]]


def test_the_hostfile_of_deepspeed_is_read_where_none_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hosts_of() == ["127.0.0.1:4", "127.0.0.2:4"]
    assert hosts_of("--num_gpus", "2", "--num_nodes", "1") == ["127.0.0.1:2"]
    assert hosts_of("--include", "127.0.0.2:1") == ["127.0.0.2:1"]
    (folder / "own").write_text("127.0.0.9 slots=1\n")
    assert hosts_of("--hostfile", "own") == ["127.0.0.9:1"]
    assert hosts_of("--standalone", "--num_gpus", "1") == ["localhost:1"]
    monkeypatch.setenv("LAUNCH_JOB_ID", "calm-otter-0000")
    assert hosts_of("--num_gpus", "1") == ["localhost:1"], "a rank that launches stays on its machine"
    monkeypatch.delenv("LAUNCH_JOB_ID")
    (folder / "hostfile").unlink()
    assert hosts_of("--num_gpus", "1") == ["localhost:1"]


def test_tools_mean_the_same_hosts_and_say_so(folder: Path) -> None:
    result = launch("exec", "--exclude", "127.0.0.9", "true")
    assert isinstance(result.exception, LauncherError)
    assert 'did you mean "127.0.0.2"?' in str(result.exception)
    assert result.stderr == f"{host_options.DEFAULT_HOSTFILE_NOTE}\n"


def config(folder: Path, *lines: str) -> tuple[str, str, str, str]:
    (folder / "config").write_text("\n".join(lines) + "\n")
    (folder / "hosts").write_text("node-a slots=1\nnode-b slots=1\n")
    return ("-F", "config", "-H", "hosts")


def address(*words: str) -> str:
    result = launch(*words, "--dry-run", "--json", "train.py")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return str(json.loads(result.stdout)["master_addr"])


def test_node_0_is_named_as_the_other_hosts_can_reach_it(folder: Path) -> None:
    inner = config(folder, "Host node-*", "  ProxyJump gate", "Host node-a", "  HostName 10.0.0.5")
    assert address(*inner) == "10.0.0.5", "the address in the network behind the gate"
    tunnel = config(folder, "Host node-*", "  HostName 127.0.0.1", "Host node-a", "  Port 2201")
    with pytest.raises(LauncherError) as caught:
        address(*tunnel)
    assert "leads other hosts to themselves" in str(caught.value)
    assert "--master-addr" in str(caught.value)
    assert address(*tunnel, "--master-addr", "10.0.0.5") == "10.0.0.5"
    assert address(*tunnel, "--num_nodes", "1") == "127.0.0.1", "one host reaches itself"
