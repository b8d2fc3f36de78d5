"""Process groups cannot cross: ranks that make different ones are an error on all of them, before any is made."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import scripts
from harness.train.behind import runs_behind_host
from harness.train.forked import run_ranks
from harness.train.ranks import RankPool, run_on_ranks

from launcher.base.errors import EngineError, UsageError
from launcher.comm.groups import agree_on_group, has_own_reduce_group, world_group
from launcher.comm.hosts import host_all_reduce_max, node_sizes
from launcher.comm.mesh import build_mesh, subgroup
from launcher.sharding.mesh import MeshSizes

ALL = "every rank must call dist.new_group(), initialize() and MoE layers equally often, in the same order"


def _makes(rank: int, world_size: int, purposes: list[str]) -> str:
    with pytest.raises(EngineError) as error:
        subgroup([list(range(world_size))], purposes[rank])
    subgroup([list(range(world_size))], "of the same")  # nothing is left of what was refused
    return str(error.value)


def test_groups_of_two_purposes_are_refused_on_every_rank() -> None:
    for text in run_on_ranks(3, _makes, ["hosts of experts", "hosts", "hosts"]):
        assert '"hosts of experts" of ranks [0, 1, 2] on rank 0' in text
        assert '"hosts" of ranks [0, 1, 2] on rank 1' in text
        assert ALL in text


def _makes_one_more(rank: int, world_size: int) -> str:
    if rank == 1:
        dist.new_group([rank], use_local_synchronization=False, backend="gloo")  # it waits for nobody: it is alone
    with pytest.raises(EngineError) as error:
        agree_on_group("hosts")
    return str(error.value)


def test_a_group_that_the_script_makes_on_one_rank_alone_is_told() -> None:
    pool = RankPool(2)  # of no further use
    try:
        found = pool.run(_makes_one_more)
    finally:
        pool.close()
    for text in found:
        before, after = (int(part.split(" others")[0]) for part in text.split("after ")[1:3])
        assert after == before + 1
        assert '"hosts" of all ranks on rank 0' in text


ALONE = """
    import os, torch, launcher
    import launcher.zero.order_watch as order_watch
    from launcher.base.timeouts import Timeouts
    from launcher.comm.mesh import subgroup

    order_watch.timeouts = lambda: Timeouts(order_check_s=1.0)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {}}}
    engine = launcher.initialize(model=torch.nn.Linear(8, 1), config=config)[0]
    if os.environ["RANK"] == "0":
        subgroup([[0, 1]], "hosts of experts", "gloo")
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
"""


def test_a_group_that_one_rank_makes_while_the_others_train_ends_all_of_them(tmp_path: Path) -> None:
    result = run_ranks(tmp_path, 2, scripts.write(tmp_path, ALONE))
    text = result.out + result.err
    assert result.code == 1
    assert text.count('rank 0 for the process group "hosts of experts" of ranks [0, 1]; rank 1 for ') == 2, text


def _exchange(rank: int, world_size: int) -> list[list[int]]:
    with runs_behind_host():
        group = world_group(has_reduce_group=True)
        assert group.host_process_group is not None
        if rank == 0:  # an exception has interrupted one exchange: what was sent then is never received
            group.host_process_group.send([torch.tensor([99])], 1, 0)
        found = [host_all_reduce_max(group, [rank + number]) for number in range(3)]
        without = dataclasses.replace(group, host_process_group=None)
        with pytest.raises(EngineError, match="a group of 2 ranks has no process group of their hosts"):
            host_all_reduce_max(without, [rank])
        return found


def test_what_an_interrupted_exchange_has_left_is_not_taken_for_the_next_one() -> None:
    assert run_on_ranks(2, _exchange) == [[[1], [2], [3]]] * 2


def _reductions(rank: int, world_size: int) -> list[bool]:
    """Return whether reductions have a group of their own: by default, on NCCL, and as the variable says."""
    found = []
    for backend, wanted in (("gloo", None), ("nccl", None), ("nccl", "own"), ("gloo", "shared")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("launcher.comm.groups.backend_name", lambda *_, backend=backend: backend)
            patch.delenv("LAUNCH_REDUCE_GROUP", raising=False)
            if wanted is not None:
                patch.setenv("LAUNCH_REDUCE_GROUP", wanted)
            groups = world_group(has_reduce_group=True), build_mesh(world_group(), MeshSizes(2, tensor=2)).data
            own = {
                group.reduce_group.process_group is not group.process_group for group in groups if group.process_group
            }
            found.append(own.pop())
            assert not own
    return found


def test_reductions_share_a_communicator_on_nccl_alone() -> None:
    assert run_on_ranks(4, _reductions) == [[True, False, True, False]] * 4


def _options_by_purpose(rank: int, world_size: int) -> dict[str, Any]:
    """Return what options torch gets for each process group, where the default one is NCCL's."""
    made: dict[str, Any] = {}
    new_group = dist.new_group

    def noted(*args: Any, **given: Any) -> Any:
        options = given["pg_options"]
        made[given["group_desc"]] = options and (options.is_high_priority_stream, options._timeout == given["timeout"])
        return new_group(*args, **{**given, "pg_options": None})

    def options(is_high_priority_stream: bool) -> SimpleNamespace:
        return SimpleNamespace(is_high_priority_stream=is_high_priority_stream, _timeout=None)

    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        stack.enter_context(runs_behind_host())
        stack.enter_context(mock.patch.dict("launcher.comm.groups._further_groups", clear=True))
        stack.enter_context(mock.patch.dict("launcher.comm.mesh._subgroups", clear=True))
        patch.setenv("LAUNCH_REDUCE_GROUP", "own")
        patch.setattr("launcher.comm.groups.backend_name", lambda *_: "nccl")
        patch.setattr(dist, "is_nccl_available", lambda: True)
        patch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
        patch.setattr("torch.distributed.distributed_c10d.new_group", noted)
        patch.setattr(dist, "new_group", noted)
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setenv("LOCAL_RANK", str(rank % 2))
        build_mesh(world_group(), MeshSizes(4), shard_size=2)
        build_mesh(world_group(), MeshSizes(4, expert=2))
        build_mesh(world_group(), MeshSizes(2, tensor=2))
    return made


def test_nccls_kernels_go_ahead_of_the_computing_in_every_group() -> None:
    device = ("rows", "columns", "replicas", "expert", "data", "tensor")
    reductions = ("reductions", "reductions of rows", "reductions of replicas", "reductions of data")
    hosts = ("hosts", "hosts of replicas", "hosts of expert", "hosts of data", "hosts of tensor")
    expected = dict.fromkeys(device + reductions, (True, True)) | dict.fromkeys(hosts)
    assert run_on_ranks(4, _options_by_purpose) == [expected] * 4


def test_another_word_for_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH_REDUCE_GROUP", "both")
    with pytest.raises(UsageError, match="'both' is neither own nor shared"):
        has_own_reduce_group(torch.device("cpu"))


def _hosts_of(rank: int, world_size: int, sizes: MeshSizes) -> list[str]:
    with runs_behind_host():
        mesh = build_mesh(world_group(), sizes)
        names = ["data", "pipeline", "model", "expert"] + (["of_experts"] if mesh.of_experts else [])
        groups = {name: getattr(mesh, name) for name in names}
        groups["of_experts"] = None if mesh.of_experts is None else mesh.of_experts.data
        for group in filter(None, groups.values()):
            assert host_all_reduce_max(group, [1]) == [1]
    return [name for name, group in groups.items() if group is not None and group.world_size > 1]


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        (MeshSizes(4), ["data"]),
        (MeshSizes(2, pipeline=2), ["data", "pipeline", "model"]),
        (MeshSizes(2, tensor=2), ["data", "model"]),
        (MeshSizes(1, pipeline=2, tensor=2), ["pipeline", "model"]),
        (MeshSizes(4, expert=2), ["data", "expert", "of_experts"]),
    ],
)
def test_groups_that_exchange_facts_of_a_step_have_one_for_their_hosts(sizes: MeshSizes, names: list[str]) -> None:
    assert run_on_ranks(4, _hosts_of, sizes) == [names] * 4


def _sizes_of_nodes(rank: int, world_size: int, local_ranks: list[int], mesh: dict[str, int]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setenv("LOCAL_RANK", str(local_ranks[rank]))
        try:
            build_mesh(world_group(), MeshSizes(world_size), **mesh)
            return node_sizes(world_group())
        except EngineError as error:
            return str(error)


def test_ranks_of_a_node_follow_each_other() -> None:
    assert run_on_ranks(4, _sizes_of_nodes, [0, 1, 0, 1], {"node_size": 2}) == [[2, 2]] * 4
    for found in run_on_ranks(4, _sizes_of_nodes, [0, 0, 1, 1], {"node_size": 2}):
        assert "ranks 0 to 1 are the numbers 0, 0 of their nodes (LOCAL_RANK)" in found
        assert "srun --distribution=block" in found
