"""Some cells of the fault matrix, on the real thing; tests/soak/fault_matrix.py runs all of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.launch import nodes, slurm, sshd
from harness.needs import need
from soak.fault_matrix import FAULTS, LIMIT_S, Fault, Places, run_fault

NEEDS = {
    "local": lambda: None if os.geteuid() == 0 else "cgroups and mounts need root",
    "ssh": lambda: sshd.available() or nodes.available(),
    "srun": lambda: slurm.available() or nodes.available(),
}
TESTED = {
    "local": ("rank crashes (SIGSEGV)", "stdout closed, then rank exits 3", "log disk full, then rank exits 3"),
    "ssh": (
        "rank out of memory",
        "rank hangs",
        "rank raises, a thread of it lives on",
        "agent killed",
        "100 MB/s from each rank, then one exits 3",
        "sshd, slurmd killed on one host",
    ),
    "srun": ("rank out of memory", "rank hangs", "node crashes", "network partition"),
}
BY_NAME = {fault.name: fault for fault in FAULTS}
# A Slurm of its own in network namespaces; the same over SSH is in test_nodes.py.
LONG = {("srun", "node crashes"), ("srun", "network partition")}
CELLS = [
    pytest.param(transport, BY_NAME[name], id=f"{transport}-{name.replace(' ', '_')}", marks=marks)
    for transport, names in TESTED.items()
    for name in names
    for marks in [pytest.mark.long if (transport, name) in LONG else []]
]


@pytest.fixture(scope="module", params=NEEDS)
def places(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    need(NEEDS[request.param]())
    with contextlib.ExitStack() as stack:
        yield Places(request.param, tmp_path_factory.mktemp("places") / "place", stack)


@pytest.mark.cluster
@pytest.mark.parametrize(("places", "fault"), CELLS, indirect=["places"])
def test_cell(places: Places, fault: Fault, tmp_path: Path) -> None:
    with places.place_for(fault) as place:
        place.num_flood_blocks = min(place.num_flood_blocks, 60)  # less than a second's
        # Three times as long as without other work: the benchmark measures how long it takes.
        outcome = run_fault(fault, place, tmp_path / "job", 3 * LIMIT_S)
    assert outcome.problem == ""
