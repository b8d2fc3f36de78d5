"""Each private part of torch does what the engine takes it for."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from launcher.comm import torch_internals
from launcher.comm.torch_internals import (
    as_plain_tensors,
    is_executed,
    no_torch_function,
    records_cuda_graphs,
    wrapper_of,
)


def _in_a_backward(ask: Any) -> list[Any]:
    """Return what `ask` says within a backward pass through two leaves, of which one gets its gradient."""
    said = []
    first, second = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    product = first * 2
    product.register_hook(lambda _: said.append(ask(first, second)))
    (product + second.detach()).sum().backward()
    return said


def test_a_backward_pass_is_noticed() -> None:
    assert not torch_internals.is_in_backward()
    assert _in_a_backward(lambda *_: torch_internals.is_in_backward()) == [True]
    assert not torch_internals.is_in_backward()


def test_a_callback_runs_when_the_backward_has_ended() -> None:
    events = []
    leaf = torch.ones(1, requires_grad=True)
    product = leaf * 2
    product.register_hook(lambda _: torch_internals.after_backward(lambda: events.append("after")))
    leaf.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    product.sum().backward()
    assert events == ["gradient", "after"]


def test_nodes_that_the_backward_executes_are_told_apart() -> None:
    def ask(first: Tensor, second: Tensor) -> list[bool]:
        with torch.enable_grad():
            return [is_executed(get_gradient_edge(leaf).node) for leaf in (first, second)]

    assert _in_a_backward(ask) == [[True, False]]


def test_a_leaf_whose_shape_has_changed_gets_a_node_of_its_new_shape() -> None:
    leaf = nn.Parameter(torch.empty(0))
    hooked: list[torch.Size] = []
    leaf.register_post_accumulate_grad_hook(lambda param: hooked.append(param.shape))
    held = leaf.sum()  # a graph that keeps the node of no elements
    leaf.data = torch.ones(3)
    with pytest.raises(RuntimeError, match="invalid gradient"):
        leaf.sum().backward()
    with torch.inference_mode():
        torch_internals.drop_outdated_accumulator(leaf)
    torch_internals.drop_outdated_accumulator(leaf)
    (leaf.sum() + leaf.sum()).backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0, 2.0, 2.0]
    assert hooked == [leaf.shape]
    graph = leaf.sum()
    node = get_gradient_edge(leaf).node
    torch_internals.drop_outdated_accumulator(leaf)  # this one fits
    assert get_gradient_edge(leaf).node is node
    assert held.requires_grad
    assert graph.requires_grad


def test_a_leaf_that_is_asked_for_its_gradient_is_refused() -> None:
    leaf = torch.ones(1, requires_grad=True)
    product = leaf * 2
    said = []

    def ask(_: Tensor) -> None:
        with torch.enable_grad(), pytest.raises(RuntimeError):
            is_executed(get_gradient_edge(leaf).node)
        said.append(True)

    product.register_hook(ask)
    torch.autograd.grad(product.sum(), leaf)
    assert said == [True]


def test_transforms_of_functions_are_noticed() -> None:
    said = []

    def square(x: Tensor) -> Tensor:
        said.append(torch_internals.is_in_transform())
        return x * x

    square(torch.ones(()))
    torch.func.grad(square)(torch.ones(()))
    torch.func.vmap(square)(torch.ones(2))
    assert said == [False, True, True]


def test_torch_divides_a_backward_in_two() -> None:
    module = torch_internals.divided_backward()
    assert callable(module.stage_backward_input)
    assert callable(module.stage_backward_weight)


class _Seen(Tensor):
    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func.__name__)
        with as_plain_tensors():
            return func(*args, **kwargs or {})


def test_subclasses_are_plain_tensors_in_a_block() -> None:
    _Seen.calls.clear()
    seen = torch.ones(2).as_subclass(_Seen)
    assert type(seen + 1) is Tensor
    with as_plain_tensors():
        assert type(seen * 2) is Tensor
    assert _Seen.calls == ["add"]


class _Dispatched(Tensor):
    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LookupError(str(operation))


def test_a_wrapper_has_shape_and_type_and_no_values() -> None:
    wrapper = wrapper_of(_Dispatched, torch.ones(2, 3, dtype=torch.float16))
    assert (type(wrapper), wrapper.shape, wrapper.dtype) == (_Dispatched, (2, 3), torch.float16)
    with pytest.raises(LookupError, match="add"):
        wrapper.add(1)


def test_hooks_of_loading_are_counted() -> None:
    module = nn.Linear(1, 1)
    assert torch_internals.num_load_hooks(module) == 0
    module.register_load_state_dict_pre_hook(lambda *_: None)
    module.register_load_state_dict_post_hook(lambda *_: None)
    assert torch_internals.num_load_hooks(module) == 2


def test_hooks_around_a_module_are_listed() -> None:
    module, shared = nn.Linear(2, 2), nn.modules.module
    assert torch_internals.hooks_around(module) == []

    def hook(*_: Any) -> None:
        pass

    own = (
        *(module.register_forward_pre_hook, module.register_forward_hook),
        *(module.register_full_backward_pre_hook, module.register_full_backward_hook),
    )
    of_all = (
        *(shared.register_module_forward_pre_hook, shared.register_module_forward_hook),
        *(shared.register_module_full_backward_pre_hook, shared.register_module_full_backward_hook),
    )
    for register in (*own, *of_all):
        handle = register(hook)
        assert torch_internals.hooks_around(module) == [hook]
        handle.remove()
        assert torch_internals.hooks_around(module) == []


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="torch.nn.functional.grouped_mm is of torch 2.10")
def test_flops_of_grouped_products_are_counted() -> None:
    rows, weights, ends = torch.ones(5, 16), torch.ones(3, 24, 16), torch.tensor([2, 2, 5], dtype=torch.int32)
    for left, right, offsets, flops in (
        (rows, weights.transpose(1, 2), ends, 2 * 5 * 16 * 24),
        (torch.ones(24, 5).t().contiguous().t(), rows, ends, 2 * 5 * 16 * 24),
        (weights, torch.ones(3, 16, 8), None, 3 * 2 * 24 * 16 * 8),
    ):
        with torch_internals.FlopMode() as counted:
            nn.functional.grouped_mm(left.bfloat16(), right.bfloat16(), offs=offsets)
        assert counted.total == flops


def test_buffers_outside_of_state_dicts_are_named() -> None:
    module = nn.Module()
    module.register_buffer("saved", torch.ones(1))
    module.register_buffer("table", torch.ones(1), persistent=False)
    assert torch_internals.non_persistent_buffers(module) == {"table"}


def test_a_mode_that_records_cuda_graphs_is_found() -> None:
    modules = [nn.Linear(2, 2) for _ in range(4)]
    modules[0].compile(mode="reduce-overhead")
    modules[1].compile()
    modules[2].compile(backend="eager")
    wrapped = [torch.compile(nn.Linear(2, 2), mode=mode) for mode in ("max-autotune", "default")]
    assert [records_cuda_graphs(module) for module in (*modules, *wrapped)] == [True, *[False] * 3, True, False]


def test_the_store_of_the_default_group_is_found() -> None:
    with pytest.raises(ValueError, match="Default process group"):
        torch_internals.default_store()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch_internals.default_store().set("key", "value")
        assert torch_internals.default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_groups_that_were_made_are_counted() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        num_before = torch_internals.num_groups()
        dist.new_group([0])
        assert torch_internals.num_groups() == num_before + 1
    finally:
        dist.destroy_process_group()


def test_profilers_are_noticed() -> None:
    def state() -> tuple[bool, bool]:
        return torch_internals.is_profiler_open(), torch_internals.is_recorded()

    assert state() == (False, False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert state() == (True, True)
    assert state() == (False, False)


def test_the_flight_recorder_says_which_collectives_were_entered_in_which_group() -> None:
    """As JSON with the names and units that `launcher.compat.collectives` reads."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = dist.new_group([0], group_desc="a purpose")
        dist.all_reduce(torch.ones(2, 3, dtype=torch.float64), group=group)
        dist.all_reduce(torch.ones(4))
        members = torch_internals.ranks_of_groups()
        own = [entry for entry in torch_internals.recorded_collectives() if entry["process_group"][0] in members]
        by_purpose = {entry["process_group"][1]: entry for entry in own}
        assert set(by_purpose) == {"default_pg", "a purpose"}
        assert {tuple(ranks) for ranks in members.values()} == {(0,)}
        entry = by_purpose["a purpose"]
        assert (entry["profiling_name"], entry["collective_seq_id"], entry["is_p2p"]) == ("gloo:all_reduce", 1, False)
        assert (entry["input_sizes"], entry["input_dtypes"]) == ([[2, 3]], ["Double"])
        assert abs(time.time_ns() - entry["time_created_ns"]) < 600e9
        deadline_s = time.monotonic() + 60
        while not all(entry["retired"] for entry in torch_internals.recorded_collectives()):  # by a thread of gloo
            assert time.monotonic() < deadline_s
    finally:
        dist.destroy_process_group()


def test_a_torch_without_a_flight_recorder_has_recorded_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        monkeypatch.delattr(torch._C._distributed_c10d, name, raising=False)
    assert torch_internals.recorded_collectives() == []


def test_a_trace_is_recorded_saved_and_lost_to_another_profiler(tmp_path: Path) -> None:
    def one() -> torch_internals.TraceProfile:
        profile = torch_internals.TraceProfile(None)
        profile.start()
        torch.ones(3) + 1
        return profile

    first = one()
    assert torch_internals.is_profiler_open()
    assert first.stop()
    assert not torch_internals.is_profiler_open()
    first.save(str(tmp_path / "trace.json"))
    names = {each["name"] for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert "aten::add" in names
    lost = one()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as other:
        torch.ones(3) + 1
        assert not lost.stop(), "the other one continues"
        torch.ones(3) * 2
    assert "aten::mul" in {each.key for each in other.key_averages()}
    unstarted = torch_internals.TraceProfile(None)
    unstarted.stop()
    assert not torch_internals.is_profiler_open()
    assert one().stop()
