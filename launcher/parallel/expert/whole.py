"""The whole state dict of a model whose experts are sharded, where a library asks the model itself for it.

Libraries call `model.state_dict()` on every rank and save what rank 0 gets: Hugging Face's Trainer below stage 3. A
rank that asks alone gets an error after a while, and no part of the weights under the names of the whole.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launcher.base.errors import EngineError
from launcher.base.timeouts import timeouts
from launcher.comm.groups import RankGroup
from launcher.comm.torch_internals import default_store
from launcher.parallel.expert.placement import counterparts, values_of_other_ranks
from launcher.parallel.tensor.functions import full_values
from launcher.zero.marks import Mark, is_moe_param, split_of
from launcher.zero.parameters import unit_params_of

_NUMBERS = itertools.count()  # of models, alike on every rank: they are sharded by all of them together


class _WholeState:
    """A hook on the state dict of one model, which puts in what other ranks have."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._prefix = f"launch/state_dict/{next(_NUMBERS)}"
        self._num_calls = 0
        self.is_paused = False  # while the engine puts the state together itself

    def __deepcopy__(self, _: Any) -> _WholeState:
        return self  # a process group has no copy

    def __call__(self, model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if self.is_paused or any(_is_sharded(param) for param in model.parameters()):
            return
        self._meet()
        for name, param in model.named_parameters(remove_duplicate=False):
            if is_moe_param(param) and split_of(param) is not None and prefix + name in state:
                state[prefix + name] = full_values(param, self._group).cpu()
        for own in counterparts(model):
            values = values_of_other_ranks(own.tensor, own.placement)
            if prefix + own.names[own.placement.group.rank] in state:
                state.update({prefix + name: value.cpu() for name, value in zip(own.names, values, strict=True)})

    def _meet(self) -> None:
        """Wait until all ranks of the set of experts have called. Raises: EngineError where one does not in time."""
        store = default_store()
        assert self._group.process_group is not None
        ranks = dist.get_process_group_ranks(self._group.process_group)  # of the world, whose store it is
        keys = [f"{self._prefix}/{self._num_calls}/{rank}" for rank in ranks]
        store.set(keys[self._group.rank], "")
        try:
            store.wait(keys, datetime.timedelta(seconds=timeouts().other_ranks_s))
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                store.delete_key(keys[self._group.rank])
            raise EngineError(
                "the model's experts are sharded over ranks, and not all of them asked for its state dict",
                hint="call engine.state_dict(), engine.save_16bit_model() or model.state_dict() on every rank",
            ) from None
        # All ranks are past the call before this one: they have called this one.
        if self._num_calls:
            store.delete_key(f"{self._prefix}/{self._num_calls - 1}/{ranks[self._group.rank]}")
        self._num_calls += 1


def _is_sharded(param: nn.Parameter) -> bool:
    found = unit_params_of(param)
    return found is not None and found.is_sharded


_HOOK: Mark[_WholeState] = Mark("whole_state")


def return_whole_state(model: nn.Module, group: RankGroup) -> None:
    """Have `model.state_dict()` return the experts of all ranks of `group`; from then on it is collective."""
    if _HOOK.of(model) is None:
        hook = _WholeState(group)
        _HOOK.put(model, hook)
        model.register_state_dict_post_hook(torch.no_grad()(hook))


@contextlib.contextmanager
def own_state(model: nn.Module) -> Iterator[None]:
    """Have `model.state_dict()` return what this rank has within the block, without other ranks."""
    hook = _HOOK.of(model)
    if hook is None:
        yield
        return
    hook.is_paused = True
    try:
        yield
    finally:
        hook.is_paused = False
