"""What people type, or find in the environment, who come from torchrun, accelerate, mpirun or Kubernetes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from harness.launch.command import run_launch

from launcher.base.errors import UsageError
from launcher.cli.main import cli
from launcher.cli.options.output import OutputOptions, streams
from launcher.schedulers.detect import scheduler_node
from launcher.schedulers.rank import scheduler_rank

KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
    # What PyTorchJob sets as well, of another meaning.
    "MASTER_ADDR": "job-master-0",
    "WORLD_SIZE": "8",
    "RANK": "1",
}
MPI_NODE = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "MASTER_ADDR": "node-0",
}
MPI_RANK = MPI_NODE | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.fixture(autouse=True)
def _cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text("")
    Path("hosts").write_text("node-[1-3] slots=2\n")


def plan(*words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["run", "--dry-run", "--json", *words, "t.py"], env=env)
    assert result.exit_code == 0, result.exception or result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def error(*words: str, env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(cli, ["run", *words, "t.py"], env=env)
    assert isinstance(result.exception, UsageError), result.output
    return str(result.exception)


def test_torchrun_s_line_for_one_of_several_nodes() -> None:
    line = "--nnodes 2 --nproc_per_node 4 --node_rank 1 --rdzv_backend c10d --rdzv_endpoint a:1234 --rdzv_id job7"
    found = plan(*line.split(), "--monitor_interval", "5", "--rdzv_conf", "timeout=9", "--run-path")
    assert (found["world_size"], found["nodes"][0]["ranks"]) == (8, [4, 5, 6, 7])
    assert (found["master_addr"], found["master_port"], found["run_id"]) == ("a", 1234, "job7")


def test_torchrun_s_endpoint_on_one_machine_is_a_port() -> None:
    assert plan("--rdzv-endpoint", "localhost:4321")["master_port"] == 4321
    assert "does not say which node this is" in error("--rdzv-endpoint=a:1", "--nnodes=1:4")
    assert plan("--rdzv-endpoint=localhost:0", "--nnodes=1:4")["master_port"] is None


@pytest.mark.parametrize(
    ("endpoint", "master"),
    [
        ("a", ("a", 29500)),
        ("a:7", ("a", 7)),
        ("[::1]:7", ("::1", 7)),
        ("[::1]", ("::1", 29500)),
        ("2001:db8::7", ("2001:db8::7", 29500)),
    ],
)
def test_an_endpoint_may_be_an_ipv6_address(endpoint: str, master: tuple[str, int]) -> None:
    found = plan("--rdzv-endpoint", endpoint, "--nnodes", "2", "--node-rank", "0")
    assert (found["master_addr"], found["master_port"]) == master
    found = plan(env={"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_RDZV_ENDPOINT": endpoint})
    assert (found["master_addr"], found["master_port"]) == master


def test_accelerate_s_line_for_one_of_several_machines() -> None:
    line = "--num_machines 2 --machine_rank 1 --main_process_ip a --main_process_port 5 --multi_gpu"
    found = plan(*line.split())
    assert (found["world_size"], found["master_addr"], found["master_port"]) == (2, "a", 5)


def test_options_without_effect_say_so() -> None:
    result = CliRunner().invoke(cli, ["run", "--dry-run", "--start-method", "spawn", "t.py"])
    assert "--start-method has no effect: every rank is a program of its own" in result.output
    result = CliRunner().invoke(cli, ["run", "--dry-run", "--hostfile", "hosts", "--rdzv-endpoint", "a", "t.py"])
    assert "--rdzv-endpoint has no effect" in result.output


@pytest.mark.parametrize(("nodes", "world_size"), [("1:2", 4), ("2:9", 6), ("3", 6)])
def test_an_elastic_number_of_nodes_takes_what_there_is(nodes: str, world_size: int) -> None:
    assert plan("--hostfile", "hosts", "--nnodes", nodes)["world_size"] == world_size


def test_too_few_hosts_for_an_elastic_number() -> None:
    assert "--num-nodes is 4, but there are only 3 hosts" in error("--hostfile", "hosts", "--nnodes", "4:9")


def test_kubeflow_s_variables_are_what_torchrun_reads() -> None:
    found = plan(env=KUBEFLOW)
    assert (found["world_size"], found["nodes"][0]["ranks"]) == (8, [4, 5, 6, 7])
    assert (found["master_addr"], found["master_port"]) == ("job-master-0", 23456)
    assert plan("--standalone", env=KUBEFLOW)["world_size"] == 1
    assert plan("--nproc-per-node", "1", env=KUBEFLOW)["world_size"] == 2
    assert plan("--hostfile", "hosts", env=KUBEFLOW)["world_size"] == 6
    assert plan(env={"PET_NPROC_PER_NODE": "3"})["world_size"] == 3
    alone = {"PET_NNODES": "1", "MASTER_PORT": "4444"}
    assert plan(env=alone)["master_port"] is None, "torchrun leaves MASTER_PORT out there, too"
    assert plan(env=alone | {"PET_MASTER_PORT": "13792"})["master_port"] == 13792
    assert plan(env=alone | {"PET_RDZV_ENDPOINT": "localhost:13793"})["master_port"] == 13793


def test_a_rank_of_another_launcher_is_told_that_it_starts_a_job_of_its_own() -> None:
    environ = {"MASTER_ADDR": "a", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    line = "this is rank 1 of 4 of another launcher: this `launch` is a job of its own"
    assert line in CliRunner().invoke(cli, ["run", "--dry-run", "t.py"], env=environ).output
    for other in ({"LAUNCH_JOB_ID": "a"}, {"WORLD_SIZE": "1"}):  # a rank of ours; a world of one
        assert line not in CliRunner().invoke(cli, ["run", "--dry-run", "t.py"], env=environ | other).output
    assert line not in CliRunner().invoke(cli, ["run", "--dry-run", "--standalone", "t.py"], env=environ).output


def test_what_was_recognised_is_said() -> None:
    result = CliRunner().invoke(cli, ["run", "--dry-run", "t.py"], env=KUBEFLOW)
    assert "PET_* variables: this is node 1 of 2, ranks: 4; --standalone: use this machine only" in result.output


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"NODE_RANK": "1", "NNODES": "3"}, (1, 3, 29500, None)),
        ({"GROUP_RANK": "1", "WORLD_SIZE": "3", "MASTER_PORT": "7"}, (1, 3, 7, None)),
        ({"NODE_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (1, 2, 29500, 4)),
        ({"NODE_RANK": "1", "NNODES": "2", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (1, 2, 29500, 4)),
        ({"NODE_RANK": "1", "NNODES": "2", "WORLD_SIZE": "8", "RANK": "4"}, (1, 2, 29500, None)),
        ({"NODE_RANK": "1", "NNODES": "2", "RANK": "1"}, (1, 2, 29500, None)),
        ({"NODE_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "5"}, (1, 2, 29500, 4)),
        ({"RANK": "2", "WORLD_SIZE": "3"}, (2, 3, 29500, None)),
        ({"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}, None),  # a rank of another launcher
        ({"NODE_RANK": "0", "WORLD_SIZE": "3", "LAUNCH_JOB_ID": "a"}, None),  # a rank of ours
        ({"RANK": "0"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    ],
)
def test_master_addr_and_a_node_s_number(environ: dict[str, str], expected: object) -> None:
    node = scheduler_node(environ | {"MASTER_ADDR": "a"}, None)
    found = node and (node.node_rank, node.num_nodes, node.master_port, node.num_ranks)
    assert found == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"NODE_RANK": "1", "GROUP_RANK": "2", "NNODES": "3"}, "NODE_RANK=1 and GROUP_RANK=2 contradict each other"),
        (KUBEFLOW | {"NODE_RANK": "0"}, "PET_NODE_RANK=1 and NODE_RANK=0 contradict each other"),
        ({"NODE_RANK": "1", "RANK": "0", "NNODES": "2"}, "NODE_RANK=1 and RANK=0 contradict each other"),
        ({"NODE_RANK": "1", "NNODES": "2", "WORLD_SIZE": "3"}, "3 ranks are not a multiple of 2 nodes"),
        ({"NODE_RANK": "3", "NNODES": "3"}, "this is node 3 of 3, counted from 0"),
        ({"NODE_RANK": "1"}, "not how many there are"),
        ({"NODE_RANK": "x", "NNODES": "3"}, '"x" is not a number'),
        ({"NODE_RANK": "0", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "4"}, "7 ranks are not a multiple of 4"),
        (
            {"NODE_RANK": "0", "NNODES": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"},
            "NNODES, LOCAL_WORLD_SIZE, WORLD_SIZE: 2 nodes with 2 ranks each are not 3 ranks",
        ),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0", "MASTER_ADDR": ""}, "the address of node 0 is not known"),
        ({"NODE_RANK": "0", "NNODES": "2", "MASTER_PORT": "70000"}, "MASTER_PORT: port 70000 is not from 1 to 65535"),
        (KUBEFLOW | {"PET_MASTER_PORT": "x"}, 'PET_MASTER_PORT: "x" is not a number'),
        (KUBEFLOW | {"PET_MASTER_PORT": "", "PET_RDZV_ENDPOINT": "a:x"}, 'PET_RDZV_ENDPOINT: "x" is not a number'),
        ({"PET_NNODES": "2"}, "the number of this one is not known"),
        (KUBEFLOW | {"PET_NNODES": "1:3"}, "an elastic job has its nodes numbered by torchrun's rendezvous"),
    ],
)
def test_contradictions_are_one_clear_error(environ: dict[str, str], message: str) -> None:
    assert message in error(env={"MASTER_ADDR": "a"} | environ)


def test_one_process_of_mpirun_on_each_node_starts_the_ranks_of_its_node() -> None:
    found = plan("--num-gpus", "2", env=MPI_NODE)
    assert (found["world_size"], found["nodes"][0]["ranks"], found["master_addr"]) == (4, [2, 3], "node-0")
    assert "the address of node 0 is not known" in error(env=MPI_NODE | {"MASTER_ADDR": ""})


def test_several_processes_of_mpirun_on_a_host_are_one_rank_each(tmp_path: Path) -> None:
    assert "--num-gpus has no meaning here: mpirun has started 2 processes" in error(
        "--num-gpus", "2", env=MPI_RANK | {"OMPI_COMM_WORLD_RANK": "0"}
    )
    Path("job.yaml").write_text("script: t.py\noptions: {grace: 7}\n")
    result = CliRunner().invoke(cli, ["run", "job.yaml"], env=MPI_RANK | {"OMPI_COMM_WORLD_RANK": "0"})
    assert "--grace has no meaning here" in str(result.exception)
    (tmp_path / "t.py").write_text(
        "import os, sys; print(sys.argv[1], *(os.environ[n] for n in sys.argv[2].split(',')))"
    )
    names = "RANK,WORLD_SIZE,LOCAL_RANK,MASTER_ADDR,MASTER_PORT,NODE_RANK"
    result = run_launch(tmp_path, "--master-port", "4444", "t.py", "got", names, env=MPI_RANK)
    assert result.out == "got 1 2 1 node-0 4444 0\n", result.err
    started = scheduler_rank(MPI_RANK)
    assert started is not None
    assert scheduler_node(MPI_RANK, started) is None


def test_redirects_and_tee_have_torchrun_s_meaning() -> None:
    def shown(**options: Any) -> list[tuple[int, str]]:
        output = OutputOptions(**options)
        return [(rank, stream) for rank in (0, 1) for stream in ("stdout", "stderr") if output.shows(rank, stream)]

    every = [(0, "stdout"), (0, "stderr"), (1, "stdout"), (1, "stderr")]
    assert shown() == every
    assert shown(redirects=streams("3")) == []
    assert shown(redirects=streams("0:1,1:3")) == [(0, "stderr")]
    assert shown(redirects=streams("3"), tee=streams("1:2")) == [(1, "stderr")]
    assert shown(tee=streams("0:3")) == every
    assert shown(local_ranks_filter=(1,)) == every[2:]
    assert shown(local_ranks_filter=(1,), redirects=streams("1")) == [(1, "stderr")]


def test_what_is_redirected_is_in_the_logs_only(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(
        "import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)"
    )
    result = run_launch(tmp_path, "--num-gpus", "2", "--redirects", "0:1,1:2", "-q", "t.py")
    assert result.code == 0, result.err
    assert (result.out, result.err) == ("[1] out 1\n", "[0] err 0\n")
    logs = [path.read_text() for path in sorted((tmp_path / "runs").glob("*/rank_*.log"))]
    assert [sorted(text.split("\n")) for text in logs] == [["", "err 0", "out 0"], ["", "err 1", "out 1"]]
