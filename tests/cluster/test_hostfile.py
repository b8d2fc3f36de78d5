"""Hostfiles: what is read, and that every mistake is named with its line and column."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import HostfileError
from launcher.cluster.cluster import MAX_EXPANSION, Cluster, Host
from launcher.cluster.hostfile import parse_hostfile, read_hostfile
from launcher.cluster.nodeset import expand

ROOT = Path(__file__).resolve().parents[2]
SLOTS_2 = (0, 1)


def parse(text: str) -> tuple[Host, ...]:
    return parse_hostfile(text, "hosts").hosts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a slots=2", [Host("a", SLOTS_2)]),
        ("a slots=1024", [Host("a", tuple(range(1024)))]),
        ("  a\tslots = 2  # two\r\n\n# none\n", [Host("a", SLOTS_2)]),
        ("u@a slots=2", [Host("a", SLOTS_2, "u")]),
        ("a:2222 slots=2", [Host("a", SLOTS_2, None, 2222)]),
        ("a slots=2 port = 2222", [Host("a", SLOTS_2, None, 2222)]),
        ("::1 slots=2", [Host("::1", SLOTS_2)]),
        ("u@[::1]:22 slots=2", [Host("::1", SLOTS_2, "u", 22)]),
        ("n[08-10]x slots=2", [Host(f"n{n}x", SLOTS_2) for n in ("08", "09", "10")]),
        ("u@n[1,3]:22 slots=2", [Host(f"n{n}", SLOTS_2, "u", 22) for n in "13"]),
    ],
)
def test_lines_are_read_as_meant(text: str, expected: list[Host]) -> None:
    assert list(parse(text)) == expected


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a", "hosts:1:2", "no slots"),
        ("a slots=0", "hosts:1:9", "slots=0"),
        ("a slots=x", "hosts:1:9", "not a whole number"),
        ("a slots=2x", "hosts:1:9", "not a whole number"),
        ("a slots=-1", "hosts:1:9", "not a whole number"),
        ("a slots=²", "hosts:1:9", "not a whole number"),
        ("a slots=999999999999", "hosts:1:9", "more than"),
        ("a slots=1025", "hosts:1:9", "slots=1025 is more than 1024"),
        ("a slots=2 junk", "hosts:1:11", 'unexpected "junk"'),
        ("a slot=2", "hosts:1:3", 'did you mean "slots"'),
        ("a slots=2 slots=2", "hosts:1:11", "twice"),
        ("node1:8", "hosts:1:8", 'write "node1 slots=8"'),
        ("slots=2", "hosts:1:1", "instead of a host"),
        ("\n\n a:99999 slots=2", "hosts:3:2", "port"),
        ("a:1 slots=2 port=2", "hosts:1:13", "twice"),
        ("n[1-x] slots=2", "hosts:1:1", "not a number"),
        ("n[1-99999999] slots=2", "hosts:1:1", "more than"),
        ("-oProxyCommand=x slots=2", "hosts:1:1", "instead of a host"),
        ("-x slots=2", "hosts:1:1", "not a host name"),
        ("a slots=1\nb slots=1\nA slots=1", "hosts:3:1", "line 1 and on line 3"),
        ("# only a comment", "hosts", "names no host"),
    ],
)
def test_mistakes_are_placed(text: str, place: str, words: str) -> None:
    with pytest.raises(HostfileError, match=r".") as caught:
        parse(text)
    (finding,) = caught.value.diagnostics
    assert finding.where == place
    assert words in str(finding)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(HostfileError) as caught:
        parse("a\nb slots=1\nc slots=0\nb slots=1")
    assert [finding.where for finding in caught.value.diagnostics] == ["hosts:1:2", "hosts:3:9", "hosts:4:1"]


def test_a_missing_or_unreadable_hostfile_is_an_error(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"a slots=1\n\xff\xfe")
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path, "directory"), (binary, "UTF-8")):
        with pytest.raises(HostfileError, match=words):
            read_hostfile(path)


@pytest.mark.parametrize("path", sorted((ROOT / "hostfiles").iterdir()), ids=lambda path: path.name)
def test_shipped_hostfiles_are_valid(path: Path) -> None:
    assert read_hostfile(path).num_slots > 0


def test_the_loopback_hostfile_is_two_hosts_of_one_slot() -> None:
    hosts = (Host("127.0.0.1", (0,)), Host("127.0.0.2", (0,)))
    assert read_hostfile(ROOT / "hostfiles" / "loopback") == Cluster(hosts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", ["a"]),
        ("a[01-03]", ["a01", "a02", "a03"]),
        ("a[9-11]", ["a9", "a10", "a11"]),
        ("a[1-2]b[3,5]", ["a1b3", "a1b5", "a2b3", "a2b5"]),
    ],
)
def test_ranges_expand(text: str, expected: list[str]) -> None:
    assert list(expand(text)) == expected


@pytest.mark.parametrize(
    "text", ["a[", "a]", "a[]", "a[1-]", "a[2-1]", "a[01-100]", "a[1-08]", "a[1-60000][1-60000]", "a[[1]]"]
)
def test_bad_ranges_are_refused(text: str) -> None:
    with pytest.raises(HostfileError):
        expand(text)


HOSTILE = st.one_of(st.text(max_size=80), st.text(alphabet="an01[]-,:@=# \nslotsport", max_size=80))


@given(HOSTILE)
def test_no_text_breaks_the_reader(text: str) -> None:
    for call in (expand, parse):
        with contextlib.suppress(HostfileError):
            assert 0 < len(call(text)) <= MAX_EXPANSION


NAMES = st.from_regex(r"\A[a-z][a-z0-9-]{0,8}\Z")


@given(
    st.lists(
        st.builds(
            lambda name, slots, user, port: Host(name, tuple(range(slots)), user, port),
            NAMES,
            st.integers(1, 16),
            st.none() | NAMES,
            st.none() | st.integers(1, 65535),
        ),
        min_size=1,
        max_size=8,
        unique_by=lambda host: host.name,
    )
)
def test_written_hosts_read_back(hosts: list[Host]) -> None:
    lines = []
    for host in hosts:
        user = f"{host.user}@" if host.user else ""
        port = f":{host.port}" if host.port else ""
        lines.append(f"{user}{host.name}{port} slots={len(host.slots)}")
    assert list(parse("\n".join(lines))) == hosts
