"""Lines that several agents share one srun by: any bytes pass, cut anywhere, between noise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import ProtocolError
from launcher.slurm.framing import BEAT, DATA, LineReader, encode_lines

SLURM_MESSAGE_BYTES = 1024


@given(
    st.lists(st.tuples(st.sampled_from(["n1", "gpu-07.example.org"]), st.binary(max_size=2000)), max_size=6),
    st.sampled_from([b"", b"prolog says hello\n", b"\xff\x00 half a line\n"]),
    st.integers(1, 700),
)
def test_bytes_come_back_by_node(messages: list[tuple[str, bytes]], noise: bytes, cut: int) -> None:
    stream = noise + b"".join(encode_lines(node, DATA, body) + noise for node, body in messages)
    reader = LineReader()
    found: dict[str, bytes] = {}
    for start in range(0, len(stream), cut):
        for line in reader.feed(stream[start : start + cut]):
            assert line.kind == DATA
            found[line.node] = found.get(line.node, b"") + line.body
    expected: dict[str, bytes] = {}
    for node, body in messages:
        expected[node] = expected.get(node, b"") + body
    assert found == expected


def test_lines_are_shorter_than_what_slurm_cuts() -> None:
    longest_name = "n" * 255
    lines = encode_lines(longest_name, DATA, bytes(5000)).splitlines(keepends=True)
    assert len(lines) > 1
    assert max(map(len, lines)) < SLURM_MESSAGE_BYTES


@pytest.mark.parametrize("stream", [b"@launch n1 d QUJ@launch n2 d QUJD\n", b"@launch n1\n"])
def test_mixed_lines_are_refused(stream: bytes) -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        list(LineReader().feed(stream))


def test_a_damaged_body_is_refused() -> None:
    (line,) = LineReader().feed(b"@launch n1 d QU!D\n")
    with pytest.raises(ProtocolError, match="n1: a line of srun's output is damaged"):
        _ = line.body


def test_noise_does_not_grow() -> None:
    reader = LineReader()
    assert list(reader.feed(b"x" * 200_000)) == []
    assert [line.kind for line in reader.feed(b"\n" + encode_lines("n1", BEAT))] == [BEAT]
