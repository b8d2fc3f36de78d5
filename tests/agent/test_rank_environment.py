"""What a rank's environment takes from the agent's own, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.agent import spawn
from launcher.agent.wire import Spawn

RANK_ENV = {"RANK": "0", "LOCAL_RANK": "0"}


def environment(
    cwd: str = "/",
    given: dict[str, str] | None = None,
    cores: list[int] | None = None,
    forwarded: dict[str, str] | None = None,
) -> dict[str, str]:
    spec = Spawn("a-b-0000", [], cwd, given or {}, [RANK_ENV], None, 1.0, forwarded_env=forwarded or {})
    return spawn.rank_environment(spec, RANK_ENV, {}, cores)


def test_torchrun_around_launch_serves_no_store_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environment()


def test_what_a_setup_has_changed_wins_over_what_is_forwarded_and_not_over_what_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NCCL_DEBUG", "HF_HOME", "LD_LIBRARY_PATH", "TZ"):
        monkeypatch.setenv(name, "setup")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("LAUNCH_SETUP_CHANGED", "NCCL_DEBUG LD_LIBRARY_PATH LD_PRELOAD ")
    names = ("NCCL_DEBUG", "HF_HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "TZ")
    forwarded = dict.fromkeys(names[:4], "forwarded")
    found = environment(given={"LD_LIBRARY_PATH": "given"}, forwarded=forwarded)
    assert [found.get(name) for name in names] == ["setup", "forwarded", "given", None, "setup"]
    assert "LAUNCH_SETUP_CHANGED" not in found


def test_a_number_of_threads_that_is_set_counts_on_bound_cores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment(cores=[0, 1])["OMP_NUM_THREADS"] == "2"
    assert environment(given={"OMP_NUM_THREADS": "7"}, cores=[0, 1])["OMP_NUM_THREADS"] == "7"


def test_pwd_is_the_folder_of_the_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for inherited in ("/", "", str(tmp_path / "missing"), None):
        if inherited is None:
            monkeypatch.delenv("PWD")
        else:
            monkeypatch.setenv("PWD", inherited)
        assert environment(str(tmp_path))["PWD"] == str(tmp_path), inherited
    monkeypatch.setenv("PWD", str(link))
    assert environment(str(tmp_path))["PWD"] == str(link), "the way that the user has taken is kept"
