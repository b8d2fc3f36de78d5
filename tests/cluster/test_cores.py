"""CPU lists and shares."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from launcher.base.errors import UsageError
from launcher.cluster.cores import parse_core_list, physical_cores, shares


def test_lists() -> None:
    assert parse_core_list("0,2-4,9") == (0, 2, 3, 4, 9)
    for text in ("", "a", "3-1", "1,1", "1-", "-1"):
        with pytest.raises(UsageError):
            parse_core_list(text)


def test_one_cpu_of_each_physical_core_package_by_package(tmp_path: Path) -> None:
    for cpu, (package, core) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 0), (0, 1), (1, 1)]):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    assert physical_cores(range(8), tmp_path) == [0, 2, 1, 3]


def test_without_topology_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert physical_cores([3, 1], tmp_path) == [1, 3]


def test_shares_are_equal_and_refused_when_too_few() -> None:
    own = sorted(os.sched_getaffinity(0))
    assert shares(own, 1) == [own]
    with pytest.raises(UsageError, match=f"{len(own) + 1} ranks cannot be bound to {len(own)} cores?: each needs one"):
        shares(own, len(own) + 1)
    with pytest.raises(UsageError, match="CPU 99999 does not exist") as caught:
        shares([99999], 1)
    (allowed,) = re.findall(r"among ([0-9,-]+)", str(caught.value))
    assert list(parse_core_list(allowed)) == own
