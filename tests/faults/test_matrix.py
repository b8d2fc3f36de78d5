"""Every cell of the fault matrix: each fault on each transport, on the real thing. See benchmarks/fault_matrix.py."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import nodes, slurm, sshd
from harness.launching import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from fault_matrix import FAULTS, Fault, Places, run_fault  # benchmarks are no package

NEEDS = {
    "local": lambda: None if os.geteuid() == 0 else "control groups and mounts need root",
    "ssh": lambda: sshd.available() or nodes.available(),
    "srun": lambda: slurm.available() or nodes.available(),
}
CELLS = [(transport, fault) for transport in NEEDS for fault in FAULTS if transport in fault.transports]


@pytest.fixture(scope="module", params=NEEDS)
def places(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    reason = NEEDS[request.param]()
    if reason is not None:
        # A skip in CI would pass for a test that ran.
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield Places(request.param, tmp_path_factory.mktemp("places") / "place", stack)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("places", "fault"),
    CELLS,
    indirect=["places"],
    ids=[f"{transport}-{fault.name.replace(' ', '_')}" for transport, fault in CELLS],
)
def test_cell(places: Places, fault: Fault, tmp_path: Path) -> None:
    with places.place_for(fault) as place:
        outcome = run_fault(fault, place, tmp_path / "job")
    assert outcome.problem == ""
