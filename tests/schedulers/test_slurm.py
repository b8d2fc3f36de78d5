"""Slurm's environment: node lists, counts, GPUs, tasks; and that no input ends in a traceback."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import HostfileError, UsageError
from launcher.schedulers import slurm
from launcher.schedulers.detect import in_allocation
from launcher.schedulers.rank import parse_counts, scheduler_rank

BATCH = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3"}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
GRES_DETAIL = """\
JobId=4 JobName=x
   NumNodes=3 NumCPUs=3 NumTasks=3 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
     Nodes=n[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:a100:4(IDX:0-3),shard:0(0/0,0/0)
     Nodes=n3 CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0-1)
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
"""


def slots(environ: dict[str, str], **options: int) -> list[tuple[str, int]]:
    return [(host.name, len(host.slots)) for host in slurm.read_allocation(environ, **options).hosts]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("gpu[01-03,7],login2", ["gpu01", "gpu02", "gpu03", "gpu7", "login2"]),
        ("r[1-2]c[1-2],x", ["r1c1", "r1c2", "r2c1", "r2c2", "x"]),
        ("a[1-2]-ib,b.example.org", ["a1-ib", "a2-ib", "b.example.org"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert list(slurm.parse_nodelist(text)) == names


@pytest.mark.parametrize("text", ["", ",", "n[1-", "n1,n1", "n[3-1]", "a b", "-x", "$(id)", "n[1-999999999]"])
def test_bad_node_lists_are_named(text: str) -> None:
    with pytest.raises(HostfileError):
        slurm.parse_nodelist(text)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, [1, 1, 1]),
        ({"SLURM_TASKS_PER_NODE": "2(x2),1"}, [2, 2, 1]),
        ({"SLURM_TASKS_PER_NODE": "4", "SLURM_STEP_ID": "0"}, [1, 1, 1]),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_TASKS_PER_NODE": "1(x3)"}, [4, 4, 4]),
        ({"SLURM_GPUS_PER_NODE": "a100:8", "SLURM_GPUS_ON_NODE": "8"}, [8, 8, 8]),
        ({"SLURM_GPUS_PER_NODE": "a100:2,v100:1"}, [3, 3, 3]),
        ({"SLURM_JOB_GPUS": "2,5"}, [2, 2, 2]),
    ],
)
def test_slots_of_an_allocation(extra: dict[str, str], expected: list[int]) -> None:
    assert slots({**BATCH, **extra}) == list(zip(("n1", "n2", "n3"), expected, strict=True))


def test_the_scheduler_knows_gpus_that_differ_between_nodes() -> None:
    by_node = slurm.parse_job_detail(GRES_DETAIL)
    assert by_node == {"n1": 4, "n2": 4, "n3": 2}
    cluster = slurm.read_allocation({**BATCH, "SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS": "10"}, gpus_by_node=by_node)
    assert [len(host.slots) for host in cluster.hosts] == [4, 4, 2]


def test_gpus_of_several_types_on_a_node_are_added() -> None:
    lines = ("Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0-1)", "Nodes=n1 CPU_IDs=1 Mem=0 GRES=gpu:v100:1(IDX:2)")
    assert slurm.parse_job_detail("".join(f"     {line}\n" for line in lines)) == {"n1": 3, "n2": 2}


def test_gpus_that_differ_between_nodes_are_never_guessed() -> None:
    with pytest.raises(UsageError, match="10 GPUs on 3 nodes, 4 of them on this one"):
        slurm.read_allocation({**BATCH, "SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS": "10"})


def test_the_number_of_cpu_ranks_can_be_chosen() -> None:
    assert slots({**BATCH, "SLURM_TASKS_PER_NODE": "1(x3)"}, num_slots=2) == [("n1", 2), ("n2", 2), ("n3", 2)]


def test_contradictions_are_named() -> None:
    with pytest.raises(UsageError, match="has 3 nodes, SLURM_JOB_NUM_NODES says 4"):
        slurm.read_allocation({**BATCH, "SLURM_JOB_NUM_NODES": "4"})
    with pytest.raises(UsageError, match="contradict"):
        scheduler_rank({**STEP, "SLURM_LOCALID": "2"})


def test_one_task_of_srun_is_one_rank() -> None:
    task = scheduler_rank(STEP)
    assert task is not None
    assert task.variables(STEP, 29500) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "5",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_SIZE": "2",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "3",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": str(12_000 + 77 * 31),
    }


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH,
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {**STEP, "SLURM_STEP_ID": "4294967291"},  # the batch script
        {**STEP, "SLURM_STEP_ID": "4294967290"},  # salloc's interactive step
        {**STEP, "LAUNCH_JOB_ID": "calm-otter-4f2a"},  # a rank that starts `launch`
    ],
)
def test_these_are_no_task_of_srun(environ: dict[str, str]) -> None:
    assert scheduler_rank(environ) is None


NAMES = sorted({*STEP, "SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_JOB_GPUS"})
ODD = st.text(alphabet="0129naé[]-,(x): \n\0$'", max_size=14) | st.sampled_from(
    ["99999999999", "1(x99999999)", "n[0-9"]
)


@given(st.dictionaries(st.sampled_from(NAMES), ODD), st.dictionaries(st.sampled_from(["n1", "n2"]), st.integers(0, 9)))
def test_no_environment_ends_in_a_traceback(odd: dict[str, str], by_node: dict[str, int]) -> None:
    environ = {**STEP, **odd}
    for read in (
        lambda: slurm.read_allocation(environ, gpus_by_node=by_node),
        lambda: scheduler_rank(environ),
    ):
        with contextlib.suppress(HostfileError, UsageError):
            read()


@given(st.text(alphabet="Nodes=n[1-3] GRES=gpu:a2,()\n", max_size=60))
def test_no_job_description_ends_in_a_traceback(text: str) -> None:
    with contextlib.suppress(HostfileError):
        assert all(count >= 0 for count in slurm.parse_job_detail(text).values())


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30))
def test_counts_come_back_as_they_were(counts: list[int]) -> None:
    assert parse_counts(",".join(map(str, counts)), "X") == tuple(counts)
    assert parse_counts(f"{counts[0]}(x{len(counts)})", "X") == (counts[0],) * len(counts)


@pytest.mark.parametrize("environ", [{"SLURM_HET_SIZE": "2"}, {**BATCH, "SLURM_HET_SIZE": "2"}])
def test_a_job_of_several_parts_is_inside_slurm_and_refused(environ: dict[str, str]) -> None:
    assert in_allocation(environ)
    with pytest.raises(UsageError, match="SLURM_HET_SIZE: this Slurm job is heterogeneous"):
        slurm.read_allocation(environ)
    with pytest.raises(UsageError, match="heterogeneous"):
        slurm.refuse_heterogeneous({**STEP, **environ})
