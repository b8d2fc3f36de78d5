"""Host names folded into one expression, which expands to the same names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import Diagnostic
from launcher.cluster.nodeset import expand, fold, fold_findings


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["node01", "node02", "node03"], "node[01-03]"),
        (["gpu-a", "node3", "node1", "node2"], "gpu-a,node[1-3]"),
        (["node01-ib0", "node02-ib0"], "node[01-02]-ib0"),
        (["127.0.0.1", "127.0.0.2", "127.0.0.9"], "127.0.0.[1-2,9]"),
        (["n9", "n10", "n08"], "n[08,9-10]"),
        (["node7"], "node7"),
        (["::1", "::2"], "::1,::2"),
        ([], ""),
    ],
)
def test_names_are_folded(names: list[str], expected: str) -> None:
    assert fold(names) == expected


_NAMES = st.from_regex(r"[a-z]{1,2}[0-9]{0,2}(-[a-z][0-9]{1,2})?", fullmatch=True)


@given(st.lists(_NAMES, min_size=1, max_size=12, unique=True))
def test_what_was_folded_expands_to_the_same_names(names: list[str]) -> None:
    words, depth, word = [], 0, ""
    for character in fold(names) + ",":  # a comma inside brackets separates numbers, not words
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            words.append(word)
            word = ""
        else:
            word += character
    assert sorted(name for word in words for name in expand(word)) == sorted(names)


def test_what_hosts_share_is_one_finding() -> None:
    missing = [Diagnostic("srun is not in PATH", f"n{number}", "load the module") for number in (1, 2, 3)]
    refused = [
        Diagnostic(f"refused by {host}", host, f"try: ssh {host}", ("refused by HOST", "try: ssh HOST"))
        for host in ("a", "b")
    ]
    alone = Diagnostic("refused by c", "c", None, ("refused at port 2 by HOST", None))
    assert fold_findings([missing[0], refused[0], *missing[1:], alone, refused[1]]) == [
        Diagnostic("srun is not in PATH", "n[1-3]", "load the module"),
        Diagnostic("refused by HOST", "a,b", "try: ssh HOST"),
        alone,
    ]
