"""What facts about hosts mean: every finding names what is wrong and a remedy; a sound cluster has none."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from launcher.agent.ports import UNRESOLVED
from launcher.base.errors import Diagnostic
from launcher.cluster.cluster import Host
from launcher.hosts.check import Finding, blame, choose_partners, judge, judge_error
from launcher.hosts.fanout import HostResult

SOUND: dict[str, Any] = {
    "python": "3.11.7",
    "python_path": "/opt/python",
    "launch": "0.1.0",
    "packages": {"torch": "2.13.0+cu130"},
    "devices": 8,
    "memory_available": 64 << 30,
    "disk_free": 64 << 30,
    "is_folder": True,
}
HOST = Host("node-b", tuple(range(8)))


def findings(changes: dict[str, Any], skew_s: float = 0.0, is_shared: bool | None = True) -> list[Finding]:
    return judge((HOST, SOUND | changes, skew_s), ("node-a", SOUND), "/data", is_shared)


def test_a_sound_host_has_no_findings() -> None:
    assert findings({}, 0.9) == []
    assert findings({"python": "3.11.9", "devices": 9}, is_shared=None) == []


@pytest.mark.parametrize(
    ("changes", "message", "remedy"),
    [
        ({"packages": {"torch": None}}, "torch is not installed", "on node-b: /opt/python -m pip install torch"),
        (
            {"packages": {"torch": "2.12.1"}},
            "torch 2.12.1 differs from node-a's 2.13.0+cu130",
            "on node-b: pip install torch==2.13.0",
        ),
        (
            {"packages": {"torch": "2.13.0+cpu"}},
            "torch 2.13.0+cpu differs from node-a's 2.13.0+cu130",
            "install the same build on both",
        ),
        ({"launch": "0.0.9"}, "launch 0.0.9 differs from node-a's 0.1.0", "install launch-zero 0.1.0 there"),
        ({"devices": 0}, "no GPU is visible, node-a has 8", "see: nvidia-smi, there"),
        ({"devices": 7}, "7 devices for slots up to 7", "write slots=7 into the hostfile"),
        ({"devices": 4}, "4 devices for slots up to 7", "write slots=4 into the hostfile"),
        (
            {"is_folder": False},
            "/data does not exist",
            "create it on node-b, or start from a folder that all hosts share",
        ),
    ],
)
def test_what_keeps_a_job_from_running(changes: dict[str, Any], message: str, remedy: str) -> None:
    assert findings(changes) == [Finding(message, remedy)]


@pytest.mark.parametrize(
    ("changes", "skew_s", "is_shared", "message"),
    [
        ({"python": "3.12.1"}, 0.0, True, "python 3.12.1 differs from node-a's 3.11.7"),
        ({}, 3.21, True, "its clock is 3.2 s ahead"),
        ({}, -90.0, True, "its clock is 1 min 30 s behind"),
        ({}, 0.0, False, "/data is another folder than here"),
        ({"memory_available": 1 << 20}, 0.0, True, "1.0 MiB of memory free"),
        ({"disk_free": 0}, 0.0, True, "0 B of disk free"),
    ],
)
def test_what_is_worth_knowing(changes: dict[str, Any], skew_s: float, is_shared: bool, message: str) -> None:
    (finding,) = findings(changes, skew_s, is_shared)
    assert (finding.message, finding.is_error) == (message, False)
    assert finding.remedy


def test_errors_come_first() -> None:
    found = findings({"python": "3.12.1", "is_folder": False, "launch": "0.0.9"}, 5.0)
    assert [finding.is_error for finding in found] == [True, True, False, False]


def test_a_cluster_without_gpus_is_sound() -> None:
    cpu = SOUND | {"devices": 0}
    assert judge((HOST, cpu, 0.0), ("node-a", cpu), "/data", True) == []


NAMES = ["node-a", "node-b", "node-c"]
ALL = [[1, 2], [0, 2], [0, 1]]
PEERS = [("10.0.0.1", 1001), ("10.0.0.2", 1002), ("10.0.0.3", 1003)]


def test_a_host_nobody_reaches_is_at_fault_itself() -> None:
    ((index, finding),) = blame({(0, 2): "timed out", (1, 2): "timed out"}, NAMES, PEERS, ALL)
    assert index == 2
    assert finding.message == "no other host can connect to 10.0.0.3 port 1003: timed out"
    assert "firewall" in finding.remedy


def test_a_host_that_reaches_nobody_is_said_to() -> None:
    ((index, finding),) = blame({(0, 1): "refused", (0, 2): "refused"}, NAMES, PEERS, ALL)
    assert index == 0
    assert finding.message == "it cannot connect to node-b,node-c: refused"


def test_a_name_that_nobody_resolves_is_no_matter_of_firewalls() -> None:
    ((index, finding),) = blame({(0, 2): UNRESOLVED, (1, 2): UNRESOLVED}, NAMES, PEERS, ALL)
    assert (index, finding.message) == (2, 'no other host can resolve the name "10.0.0.3"')
    assert "/etc/hosts" in finding.remedy
    assert "firewall" not in finding.remedy
    ((index, finding),) = blame({(0, 2): UNRESOLVED}, NAMES, PEERS, ALL)
    assert (index, finding.message) == (0, "it cannot connect to node-c: the name cannot be resolved")
    assert "DNS" in finding.remedy


def test_only_connections_that_were_tried_count() -> None:
    ring = [[1], [2], [0]]
    ((index, finding),) = blame({(0, 1): "timed out"}, NAMES, PEERS, ring)
    assert index == 1
    assert "no other host can connect" in finding.message


@pytest.mark.parametrize("num_hosts", [2, 17, 18, 500])
def test_connections_grow_with_the_hosts_and_not_with_their_square(num_hosts: int) -> None:
    partners = choose_partners(num_hosts)
    expected = min(num_hosts - 1, 16)
    reached: Counter[int] = Counter()
    for index, others in enumerate(partners):
        assert len(set(others)) == expected
        assert index not in others
        assert (index + 1) % num_hosts in others
        reached.update(others)
    assert set(reached.values()) == {expected}


def test_when_nothing_failed_nobody_is_blamed() -> None:
    assert list(blame({}, NAMES, PEERS, ALL)) == []


def test_a_host_without_an_answer_says_why() -> None:
    lost = HostResult(HOST, error=Diagnostic("host key changed\nsecond line", "node-b", "ssh-keygen -R node-b"))
    assert judge_error(lost) == Finding("host key changed", "ssh-keygen -R node-b")
    refused = HostResult(HOST, error=Diagnostic("the agent ended; its last words:\nno logins today", "node-b"))
    assert judge_error(refused).message == "the agent ended; its last words: no logins today"
    broken = HostResult(HOST, stderr=bytearray(b"Traceback\nModuleNotFoundError: No module named 'launcher.agent.x'\n"))
    broken.exit_code = 1
    found = judge_error(broken)
    assert "exit code 1: ModuleNotFoundError" in found.message
    assert "install the same launch-zero" in found.remedy
    silent = HostResult(HOST, exit_code=137)
    assert judge_error(silent).message == "the check ended with exit code 137: no message"
