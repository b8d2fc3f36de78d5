"""Filters: the documented grammar of include and exclude, and every way to get it wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import HostfileError, LauncherError, UsageError
from launcher.cluster.cluster import Cluster, Host
from launcher.cluster.filters import select

POOL = Cluster((Host("worker-0", (0, 1, 2, 3)), Host("worker-1", (0, 1, 2, 3), "ada"), Host("::1", (0, 1))))


def chosen(**options: object) -> dict[str, tuple[int, ...]]:
    return {host.name: host.slots for host in select(POOL, **options).hosts}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("worker-0@worker-1:0,2", {"worker-0": (0, 1, 2, 3), "worker-1": (0, 2)}),
        ("worker-0", {"worker-0": (0, 1, 2, 3)}),
        ("worker-1:2@worker-0:1@worker-1:0,2", {"worker-0": (1,), "worker-1": (0, 2)}),
        ("worker-1:3,1-2", {"worker-1": (1, 2, 3)}),
        ("worker-[0-1]:0", {"worker-0": (0,), "worker-1": (0,)}),
        ("[::1]:1", {"::1": (1,)}),
        ("::1", {"::1": (0, 1)}),
        ("ada@worker-1:0", {"worker-1": (0,)}),
        ("worker-0:0@ada@worker-1:0", {"worker-0": (0,), "worker-1": (0,)}),
    ],
)
def test_include(include: str, expected: dict[str, tuple[int, ...]]) -> None:
    assert chosen(include=include) == expected


def test_exclude_drops_hosts_and_slots() -> None:
    assert chosen(exclude="worker-0@worker-1:0") == {"worker-1": (1, 2, 3), "::1": (0, 1)}
    assert "worker-1" not in chosen(exclude="worker-1:0-3")


def test_counts_take_the_first() -> None:
    assert chosen(num_nodes=2, num_gpus=2) == {"worker-0": (0, 1), "worker-1": (0, 1)}
    assert select(POOL) == POOL


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"include": "a", "exclude": "b"}, UsageError, "cannot be used together"),
        ({"include": "worker-0", "num_nodes": 1}, UsageError, "--num-nodes cannot"),
        ({"exclude": "worker-0", "num_gpus": 1}, UsageError, "--num-gpus cannot"),
        ({"num_nodes": 4}, UsageError, "only 3 hosts"),
        ({"num_nodes": 0}, UsageError, "1 or more"),
        ({"num_gpus": 3}, UsageError, "::1: .*only 2 slots.*raise slots= in the hostfile"),
        ({"num_gpus": 3, "source": "Slurm"}, UsageError, "only 2 slots.*ask Slurm for more with --gpus-per-node"),
        ({"num_nodes": 4, "source": "Slurm"}, UsageError, "only 3 hosts.*ask Slurm for more nodes"),
        ({"num_gpus": -1}, UsageError, "1 or more"),
        ({"include": "worker-1:9"}, HostfileError, "no slot 9"),
        ({"exclude": "worker-1:9"}, HostfileError, "no slot 9"),
        ({"include": "worker0"}, HostfileError, 'did you mean "worker-0"'),
        ({"include": "worker-0:"}, HostfileError, "without slots"),
        ({"include": "worker-0:a"}, HostfileError, "not a number"),
        ({"include": "worker-0@"}, HostfileError, "empty host name"),
        ({"include": "bob@worker-1"}, HostfileError, '"bob" is not in the cluster'),
        ({"exclude": "worker-[0-1]@::1"}, HostfileError, "leaves no slot"),
    ],
)
def test_mistakes(options: dict[str, object], kind: type[LauncherError], words: str) -> None:
    with pytest.raises(kind, match=words):
        chosen(**options)


def test_all_mistakes_of_a_filter_are_told_at_once() -> None:
    with pytest.raises(HostfileError) as caught:
        chosen(include="nope@worker-0:7@worker-1:x")
    assert len(caught.value.diagnostics) == 3


HOSTILE = st.one_of(st.text(max_size=60), st.text(alphabet="worker-01:@,[] 9ada", max_size=60))


@given(HOSTILE, st.booleans())
def test_no_filter_ends_in_anything_but_our_errors(text: str, include: bool) -> None:
    try:
        result = select(POOL, include=text) if include else select(POOL, exclude=text)
    except (HostfileError, UsageError):
        return
    assert result.num_slots > 0


@given(st.dictionaries(st.sampled_from([h.name for h in POOL.hosts]), st.sets(st.integers(0, 1), min_size=1)))
def test_include_and_exclude_complement_each_other(slots_of: dict[str, set[int]]) -> None:
    text = "@".join(
        f"[{n}]:" * (":" in n) + f"{n}:" * (":" not in n) + ",".join(map(str, s)) for n, s in slots_of.items()
    )
    if not text:
        return
    kept = chosen(include=text)
    assert {name: set(slots) for name, slots in kept.items()} == slots_of
    everything = {(host.name, slot) for host in POOL.hosts for slot in host.slots}
    left = {(name, slot) for name, slots in chosen(exclude=text).items() for slot in slots}
    assert left == everything - {(name, slot) for name, slots in kept.items() for slot in slots}
