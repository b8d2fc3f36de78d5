"""A plan is made of values alone: of a request, of what this machine is, and of the hosts there are."""

from __future__ import annotations

import pytest

from launcher.base.errors import UsageError
from launcher.cluster.cluster import Cluster, Host, NodeRange
from launcher.plan.plan import Command, JobPlan
from launcher.plan.planning import Here, choose_hosts, make_plan
from launcher.plan.request import Request
from launcher.plan.variables import JobEnvironment

SCRIPT = Command("script", "t.py", ())
OTHERS = Cluster((Host("node-a", (0, 1)), Host("node-b", (0, 1)), Host("node-c", (0, 1))))


def machine(num_gpus: int) -> Here:
    return Here({"NCCL_DEBUG": "INFO"}, "/work", tuple(f"GPU-{index}" for index in range(num_gpus)), num_cpus=6)


def planned(request: Request, here: Here, available: Cluster | None = None) -> JobPlan:
    cluster = choose_hosts(request, here, available).cluster
    return make_plan(request, here, cluster, "calm-otter-0001", JobEnvironment({}, ()), lambda host: f"{host.name}.lan")


@pytest.mark.parametrize("address", ["", "a b", "node-a:29500", "[::1]", "-x"])
def test_a_master_address_is_one_host(address: str) -> None:
    with pytest.raises(UsageError, match="is not the name or address of a host"):
        planned(Request(command=SCRIPT, master_addr=address), machine(0), OTHERS)


@pytest.mark.parametrize("address", ["node_a.lan", "10.0.0.7", "2001:db8::7", "fe80::1%eth0"])
def test_a_master_address_may_be_of_any_kind(address: str) -> None:
    assert planned(Request(command=SCRIPT, master_addr=address), machine(0), OTHERS).master_addr == address


def test_hosts_do_not_meet_at_a_loopback_address_unless_they_are_one_machine() -> None:
    request = Request(command=SCRIPT, hostfile="hosts", master_addr="localhost")
    with pytest.raises(UsageError, match="--master-addr: localhost leads every host to itself, and node-a is another"):
        planned(request, machine(0), OTHERS)
    for names in (["node-a"], ["127.0.0.2", "localhost"]):
        hosts = Cluster(tuple(Host(name, (0,)) for name in names))
        assert planned(request, machine(0), hosts).master_addr == "localhost"


def test_cores_of_this_machine_are_not_counted_for_hosts() -> None:
    for hosts in ({"hostfile": "hosts"}, {"in_slurm": True}):
        with pytest.raises(UsageError, match="--num-gpus cpu counts the cores of this machine"):
            Request(command=SCRIPT, num_gpus="cpu", **hosts)  # type: ignore[arg-type]


def test_settings_reach_the_plan_by_their_names() -> None:
    request = Request(command=SCRIPT, grace_s=7.0, bound_cores=(3, 4), engine="builtin", max_restarts=2)
    plan = planned(request, machine(0))
    assert (plan.grace_s, plan.bound_cores, plan.engine, plan.max_restarts) == (7.0, (3, 4), "builtin", 2)


@pytest.mark.parametrize(
    ("num_gpus", "wish", "tokens"),
    [
        (2, None, ("GPU-0", "GPU-1")),
        (2, "gpu", ("GPU-0", "GPU-1")),
        (2, "auto", ("GPU-0", "GPU-1")),
        (2, "cpu", ("",) * 6),  # more ranks than GPUs: none is visible
        (0, "auto", ()),
        (0, None, ()),
    ],
)
def test_the_words_for_a_number_of_ranks(num_gpus: int, wish: str | None, tokens: tuple[str, ...]) -> None:
    plan = planned(Request(command=SCRIPT, num_gpus=wish), machine(num_gpus))
    assert plan.device_tokens == tokens
    assert plan.placement.world_size == (len(tokens) or (6 if wish == "auto" else 1))


def test_gpus_that_are_hidden_from_launch_are_hidden_from_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plan = planned(Request(command=SCRIPT, num_gpus=2), Here.now())
    assert plan.device_tokens == ("", "")


def test_hosts_are_known_by_the_kind_of_their_transport() -> None:
    plan = planned(Request(command=SCRIPT, hostfile="hosts"), machine(8), OTHERS)
    assert plan.transports == {0: "ssh", 1: "ssh", 2: "ssh"}
    assert (plan.master_addr, plan.agent_commands) == ("node-a.lan", {})
    plan = planned(Request(command=SCRIPT, in_slurm=True), machine(0), OTHERS)
    assert set(plan.transports.values()) == {"srun"}
    one = Request(command=SCRIPT, node_rank=1, num_nodes=NodeRange(2, 2), master_addr="a", master_port=1)
    assert planned(one, machine(1)).transports == {1: "local"}


def test_hosts_beyond_the_largest_number_are_spares() -> None:
    request = Request(command=SCRIPT, hostfile="hosts", num_nodes=NodeRange(1, 2))
    choice = choose_hosts(request, machine(0), OTHERS)
    assert ([host.name for host in choice.cluster.hosts], [host.name for host in choice.spares]) == (
        ["node-a", "node-b"],
        ["node-c"],
    )
    assert request.least_nodes == 1
    with pytest.raises(UsageError, match="each with its own command, need --master-addr and --master-port"):
        planned(Request(command=SCRIPT, node_rank=1, num_nodes=NodeRange(2, 2)), machine(1))
