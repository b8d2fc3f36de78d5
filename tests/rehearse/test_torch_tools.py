"""What a rehearsal takes of torch's private tools is there, and does what it is taken for."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.train.forked import run_ranks
from torch import Tensor

from launcher.comm.torch_internals import flops_of
from launcher.rehearse import torch_tools


def test_a_storage_keeps_its_object_as_long_as_it_lives() -> None:
    found: torch_tools.StorageMap[int] = torch_tools.StorageMap()
    ended: list[int] = []
    tensor = torch.zeros(4)
    found[tensor.untyped_storage()] = 7
    weakref.finalize(tensor.untyped_storage(), ended.append, 1)
    gc.collect()
    view = tensor[1:]
    del tensor
    assert found.get(view.untyped_storage()) == 7
    assert view.untyped_storage() in found
    assert not ended
    del view
    gc.collect()
    assert ended == [1]
    assert len(found) == 0


def _groups() -> None:
    torch_tools.start_fake_group(3, 8)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (3, 8, "fake")
    for (owner, name), replacement in torch_tools.fake_groups().items():
        setattr(owner, name, replacement)
    assert dist.get_backend(dist.new_group([2, 3], backend="gloo")) == "fake"
    seen = []

    class Seeing(torch_tools.DispatchMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
        ) -> object:
            if getattr(func, "namespace", "") != "c10d":
                return func(*args, **(kwargs or {}))  # type: ignore[operator]
            group = torch_tools.group_of(args[1])
            seen.append((group.size(), torch_tools.reduction_of_caller() == dist.ReduceOp.SUM))
            return args[0], torch_tools.finished_work()

    with Seeing():
        tensor: Tensor = torch.ones(2)
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        work.wait()
    assert seen == [(8, True), (8, False)]
    assert torch_tools.group_of(dist.group.WORLD.group_name) is dist.group.WORLD
    print("right")


def test_process_groups_without_peers(tmp_path: Path) -> None:
    result = run_ranks(tmp_path, 0, _groups)
    assert result.out == "right\n", result.err


class _Counting(torch_tools.DispatchMode):
    """Counts the floating-point operations of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, result)
        return result


def test_flops_of_products_and_of_attention_on_a_cpu() -> None:
    weight = torch.ones(8, 16, requires_grad=True)
    with _Counting() as mode:
        (torch.ones(4, 8, requires_grad=True) @ weight).sum().backward()
    assert mode.flops == 3 * 2 * 4 * 8 * 16
    query = torch.ones(2, 3, 32, 8, requires_grad=True)
    with _Counting() as mode:
        torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    forward = 2 * 2 * 2 * 3 * 32 * 32 * 8  # scores, and what they weigh
    assert mode.flops == forward + 2.5 * forward  # backward computes the scores once more
