"""The agent protocol: every message survives the wire, however the stream is cut; damage is an error, not a crash."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.agent.wire import (
    MAGIC,
    MAX_BANNER_BYTES,
    PROTOCOL_VERSION,
    Bye,
    Call,
    Decoder,
    DumpStacks,
    Exited,
    Handled,
    Hello,
    MasterTried,
    Message,
    Output,
    PickPort,
    Ping,
    Pong,
    PortPicked,
    Progress,
    Raised,
    Spawn,
    SpawnFailed,
    Stacks,
    Started,
    Stop,
    Sweep,
    Trace,
    TryMaster,
    check_version,
    encode,
)
from launcher.base.errors import ProtocolError

# Arguments and file names may hold any bytes; Python shows those that are not UTF-8 as lone surrogates.
TEXT = st.text(st.characters(codec=None), max_size=20)
NAMES = st.dictionaries(TEXT, TEXT, max_size=3)
INTEGERS = st.integers(-(2**31), 2**31)
MESSAGES = st.one_of(
    st.builds(PickPort, st.integers(0, 65535)),
    st.builds(TryMaster, TEXT, INTEGERS),
    st.builds(MasterTried, st.none() | TEXT),
    st.builds(Ping),
    st.builds(Pong, st.floats(0, 2e9)),
    st.builds(Handled, INTEGERS),
    st.builds(Raised, INTEGERS, st.dictionaries(TEXT, TEXT | INTEGERS)),
    st.builds(Bye),
    st.builds(
        Spawn,
        TEXT,
        st.lists(st.lists(TEXT)),
        TEXT,
        NAMES,
        st.lists(NAMES),
        st.none() | st.floats(0, 1e6),
        st.floats(0, 9),
    ),
    st.builds(Stop, st.floats(0, 1e6)),
    st.builds(Sweep, TEXT),
    st.builds(Hello, INTEGERS, INTEGERS, TEXT, st.floats(0, 2e9)),
    st.builds(PortPicked, INTEGERS, st.none() | TEXT),
    st.builds(Started, INTEGERS, INTEGERS),
    st.builds(SpawnFailed, TEXT, st.none() | TEXT, st.booleans()),
    st.builds(Bye, st.lists(INTEGERS)),
    st.builds(Output, INTEGERS, st.sampled_from(["stdout", "stderr", "result"]), st.binary(max_size=200)),
    st.builds(Call, st.binary(max_size=200)),
    st.builds(
        Exited,
        INTEGERS,
        INTEGERS,
        st.floats(0, 2e9),
        st.none() | st.dictionaries(TEXT, TEXT | INTEGERS),
        INTEGERS,
        TEXT,
        st.none() | st.dictionaries(TEXT, TEXT | INTEGERS),
    ),
    st.builds(DumpStacks, st.booleans()),
    st.builds(Trace, TEXT, st.lists(INTEGERS), INTEGERS, INTEGERS),
    st.builds(
        Progress,
        INTEGERS,
        INTEGERS,
        st.none() | INTEGERS,
        st.none() | st.floats(allow_nan=False),
        TEXT,
        st.none() | INTEGERS,
    ),
    st.builds(Stacks, INTEGERS, TEXT, st.none() | st.dictionaries(TEXT, TEXT | INTEGERS), TEXT),
)


def decode_in_pieces(stream: bytes, piece: int, *, expect_magic: bool) -> list[Message]:
    decoder = Decoder(expect_magic=expect_magic)
    found: list[Message] = []
    for start in range(0, len(stream), piece):
        found.extend(decoder.feed(stream[start : start + piece]))
    return found


@given(st.lists(MESSAGES, max_size=5), st.integers(1, 64))
def test_any_messages_survive_any_cut(messages: list[Message], piece: int) -> None:
    stream = b"".join(map(encode, messages))
    assert decode_in_pieces(stream, piece, expect_magic=False) == messages


@given(st.binary(max_size=300).filter(lambda banner: MAGIC not in banner), st.integers(1, 64))
def test_a_banner_in_front_is_skipped(banner: bytes, piece: int) -> None:
    stream = banner + MAGIC + encode(Hello(1, 2, "python", 0.5))
    assert decode_in_pieces(stream, piece, expect_magic=True) == [Hello(1, 2, "python", 0.5)]


@given(st.binary(max_size=400))
def test_any_bytes_give_messages_or_a_protocol_error(stream: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_in_pieces(stream, 7, expect_magic=False)


def test_a_stream_without_an_agent_ends_in_an_error() -> None:
    with pytest.raises(ProtocolError, match="only other output") as caught:
        decode_in_pieces(b"x" * (MAX_BANNER_BYTES + 2), 1 << 16, expect_magic=True)
    assert "shell start-up files" in str(caught.value)


def test_an_impossible_length_is_damage() -> None:
    with pytest.raises(ProtocolError, match="impossible frame length"):
        decode_in_pieces(b"\xff" * 8, 8, expect_magic=False)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{}",
        b'{"type": "Nothing"}',
        b'{"type": "Stop"}',
        b"\xff",
        b'{"type": "Pong", "time_s": "noon"}',
        b'{"type": "Pong", "time_s": NaN}',
        b'{"type": "Pong", "time_s": 1' + b"0" * 400 + b"}",
        b'{"type": "Hello", "version": "5"}',
        b'{"type": "Started", "rank": null, "pid": 1}',
        b'{"type": "Raised", "rank": 0, "record": []}',
        b'{"type": "Bye", "left": [1, "2"]}',
        b'{"type": "Pong", "time_s": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_a_header_that_names_no_message_is_damage(header: bytes) -> None:
    frame = len(header).to_bytes(4, "big") + b"\0\0\0\0" + header
    with pytest.raises(ProtocolError, match="damaged"):
        decode_in_pieces(frame, len(frame), expect_magic=False)


def test_another_version_is_refused_with_the_host_and_the_remedy() -> None:
    check_version(Hello(PROTOCOL_VERSION, 1, "/usr/bin/python3", 0.0), "node-a")
    with pytest.raises(ProtocolError, match="node-a: the agent speaks protocol 99") as caught:
        check_version(Hello(99, 1, "/usr/bin/python3", 0.0), "node-a")
    assert "install the same launch-zero version" in str(caught.value)
