"""Ranks that mpirun or its like has started are one world, whatever started them: real processes that all-reduce."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT
from harness.train.forked import run_ranks

SUM_OF_RANKS = """
    import sys, torch, launcher
    launcher.init_distributed(**eval(sys.argv[1]) if len(sys.argv) > 1 else {})
    total = torch.tensor([torch.distributed.get_rank() + 1 if torch.distributed.is_initialized() else 1])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
    sys.stdout.write(f"TOTAL {int(total)}\\n")  # in one write: mpirun mixes those of its ranks
"""
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LAUNCH_JOB_ID")


def environment(**variables: str) -> dict[str, str]:
    outside = {name: value for name, value in os.environ.items() if name not in _NAMES}
    return {**outside, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def variables_of_open_mpi(rank: int, job: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": job,
    }


def test_processes_with_the_variables_of_mpirun_are_one_world(tmp_path: Path) -> None:
    job = uuid.uuid4().hex
    become = f"""
    import os
    variables = {[variables_of_open_mpi(rank, job) for rank in range(2)]}[int(os.environ["RANK"])]
    for name in {_NAMES}:
        os.environ.pop(name, None)
    os.environ.update(variables)
    """
    result = run_ranks(tmp_path, 2, scripts.write(tmp_path, become + SUM_OF_RANKS))
    assert result.code == 0, result.err
    assert result.out == "TOTAL 3\nTOTAL 3\n"


def test_a_real_mpirun_makes_one_world(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (apt-get install openmpi-bin)")
    script = scripts.write(tmp_path, SUM_OF_RANKS)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, script]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.stdout == "TOTAL 3\nTOTAL 3\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (
            "{'auto_mpi_discovery': False}",
            environment(**variables_of_open_mpi(0, "x")),
            "auto_mpi_discovery or dist_init_required is False",
        ),
        ("{'dist_init_required': False}", environment(**variables_of_open_mpi(0, "x")), "each rank would train alone"),
        ("{}", environment(WORLD_SIZE="2"), "the environment of this rank lacks RANK"),
    ],
)
def test_a_world_that_cannot_form_is_an_error(
    monkeypatch: pytest.MonkeyPatch, arguments: str, variables: dict[str, str], message: str
) -> None:
    import launcher
    from launcher.base.errors import EngineError

    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineError, match=message):
        launcher.init_distributed(**eval(arguments))


def test_a_port_in_use_is_one_clear_error(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        variables = environment(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        result = run_ranks(tmp_path, 0, scripts.write(tmp_path, SUM_OF_RANKS), env=variables)
    assert f"MASTER_PORT={port}: the port on which rank 0 waits for the others is in use" in result.err
    assert "During handling" not in result.err
