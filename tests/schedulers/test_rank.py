"""What mpirun, mpiexec and srun say of the processes they start."""

from __future__ import annotations

import pytest

from launcher.base.errors import UsageError
from launcher.schedulers.rank import scheduler_rank

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "761069569",
    "PMIX_RANK": "1",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_JOB_ID": "70",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
}


def variables(environ: dict[str, str]) -> dict[str, str]:
    found = scheduler_rank(environ)
    assert found is not None
    return found.variables(environ, 29500)


@pytest.mark.parametrize("environ", [OPEN_MPI, MVAPICH, HYDRA, SLURM], ids=["Open MPI", "MVAPICH2", "Hydra", "srun"])
def test_rank_and_size_are_those_of_the_scheduler(environ: dict[str, str]) -> None:
    found = variables(environ)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "4", "1")
    assert found["MASTER_ADDR"] == ("gpu08" if environ is SLURM else "127.0.0.1")


def test_ranks_of_one_job_agree_on_the_port_and_two_jobs_do_not() -> None:
    one, other = variables(OPEN_MPI), variables(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"})
    assert one["MASTER_PORT"] == other["MASTER_PORT"]
    assert one["MASTER_PORT"] != variables(OPEN_MPI | {"PMIX_NAMESPACE": "761069570"})["MASTER_PORT"]
    assert 12_000 <= int(one["MASTER_PORT"]) < 32_000
    assert variables(HYDRA)["MASTER_PORT"] == "29500"  # nothing there names the job
    assert variables(SLURM)["MASTER_PORT"] != variables(SLURM | {"SLURM_STEP_ID": "3"})["MASTER_PORT"]


def test_what_the_user_exports_wins() -> None:
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000", "LOCAL_RANK": "0"}
    assert given.items() <= variables(OPEN_MPI | given).items()


def test_several_hosts_need_an_address_unless_slurm_names_them() -> None:
    several = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(UsageError, match=r"MASTER_ADDR: .*rank 1 of 4, and the host of rank 0 is not known; export"):
        variables(several)
    assert variables(several | {"MASTER_ADDR": "node-a"})["MASTER_ADDR"] == "node-a"
    assert variables(several | {"SLURM_JOB_NODELIST": "a[3,5]b[01-02]c,z"})["MASTER_ADDR"] == "a3b01c"


def test_a_local_rank_that_is_not_known_is_asked_for() -> None:
    with pytest.raises(UsageError, match=r"LOCAL_RANK: .* its number on this host is not known"):
        variables({"PMI_RANK": "1", "PMI_SIZE": "4", "MASTER_ADDR": "node-a"})


@pytest.mark.parametrize(
    ("environ", "started_by"),
    [
        (SLURM | HYDRA, "srun"),  # srun --mpi=pmi2
        (SLURM | OPEN_MPI, "srun"),
        (SLURM | OPEN_MPI | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "mpirun (Open MPI)"),
        ({**OPEN_MPI, "SLURM_PROCID": "0", "SLURM_JOB_ID": "70"}, "mpirun (Open MPI)"),
    ],
)
def test_inside_slurm_srun_and_mpirun_are_told_apart(environ: dict[str, str], started_by: str) -> None:
    found = scheduler_rank(environ)
    assert found is not None
    assert found.started_by == started_by


@pytest.mark.parametrize(
    "environ",
    [
        {},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        SLURM | {"SLURM_STEP_ID": "4294967291"},  # a batch script
        SLURM | {"LAUNCH_JOB_ID": "calm-otter-4f2a"},  # a rank of ours, below an agent that srun has started
    ],
)
def test_one_process_is_no_rank_of_a_scheduler(environ: dict[str, str]) -> None:
    assert scheduler_rank(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, "not how many there are"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "rank 4 of 4"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "four"}, '"four" is not a number'),
        ({name: SLURM[name] for name in SLURM if name != "SLURM_PROCID"}, "SLURM_PROCID: the variable is not set"),
    ],
)
def test_contradictions_are_errors_and_never_a_world_of_one(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scheduler_rank(environ)
