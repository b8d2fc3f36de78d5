"""The files of a checkpoint of DeepSpeed: their names, and what is in each, read when it is written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from launcher.checkpoint.deepspeed_files.optimizer import DS_VERSION, OptimizerStates
from launcher.checkpoint.deepspeed_files.plan import Expert, Member, Plan, whole
from launcher.checkpoint.formats.source import HALVES, WEIGHT, most_used_dtype

Content = Callable[[], object]
UNIVERSAL_INFO = {"universal_checkpoint_version": 0.2}  # without which DeepSpeed's converter refuses a checkpoint
# Keys beside which a client state is saved.
_RESERVED = ("checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts", "module", "optimizer")


class DeepSpeedFiles:
    """What each rank of DeepSpeed would have written. One file's tensors are in memory at a time."""

    def __init__(self, plan: Plan) -> None:
        """Raises: CheckpointError for what DeepSpeed's files cannot hold."""
        self.plan, self._source = plan, plan.source
        self.states = OptimizerStates(plan)
        taken = [key for key in _RESERVED if key in self._source.state.client_state]
        if taken:
            raise plan.error(f"the client state has the key {taken[0]}, which DeepSpeed's files need", "rename it")
        self.precision = most_used_dtype(self._source)
        self._has_optimizer = self._source.state.optimizer is not None and bool(self._source.state.groups)

    def of_rank(self, rank: int) -> Iterator[tuple[str, Content]]:
        """Yield name and content of the files that a rank writes; those of all ranks are the checkpoint."""
        plan = self.plan
        if plan.stage == 3:
            yield f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", functools.partial(self.model_states, rank)
        elif rank == 0:
            yield "mp_rank_00_model_states.pt", functools.partial(self.model_states, rank)
        if plan.stage > 0 and self._has_optimizer:
            prefix = "bf16_" if self.precision == "bfloat16" else ""
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            yield name, functools.partial(self._zero, rank)
        elif plan.layers and rank < plan.expert_size:
            name = f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
            yield name, functools.partial(self._optimizer_of_experts, rank)
        for layer, (key, count) in enumerate(plan.layers.items()):
            for number in range(rank, count, plan.num_ranks):
                name = f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"
                yield name, functools.partial(self._expert, key, number)

    # ---- content ----

    def model_states(self, rank: int) -> dict[str, Any]:
        """Return what a rank's file of the model has."""
        plan, state = self.plan, self._source.state
        is_zero = plan.stage > 0 and self._has_optimizer
        groups = plan.groups(rank) if is_zero else []
        flats = [flat for group in groups for flat in plan.flats(group)]
        shapes = [{member.name: torch.Size(member.shape) for member in flat.members} for flat in flats]
        has_fragments = plan.stage >= 2
        frozen = plan.frozen() if has_fragments else []
        return {
            "module": self._module(),
            "buffer_names": list(state.buffers),
            "optimizer": None if is_zero else self._optimizer(rank),
            "param_shapes": shapes if is_zero else None,
            "frozen_param_shapes": {each.name: torch.Size(each.shape) for each in frozen} if has_fragments else None,
            "shared_params": dict(plan.tied) if is_zero else None,
            "frozen_param_fragments": self._fragments(rank) if has_fragments else None,
            "lr_scheduler": state.lr_scheduler,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": state.skipped_steps,
            "global_steps": state.global_steps,
            "global_samples": state.global_samples,
            "dp_world_size": plan.num_ranks,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": state.config,
            "ds_version": DS_VERSION,
            "universal_checkpoint_info": dict(UNIVERSAL_INFO),
            **({"num_experts": plan.num_experts} if plan.layers else {}),
            **state.client_state,
        }

    def _module(self) -> dict[str, Any]:
        """Return the state dict of the model without experts, which have files of their own."""
        names = [name for name in self.plan.names if Expert.of(name) is None]
        found: dict[str, Any] = {**self._source.state.buffers}
        found |= {name: self._weight(name) for name in names}
        found |= {name: found[first] for name, first in self.plan.tied.items() if first in found}
        return {**found, **self._source.state.extra_state}

    def _weight(self, name: str) -> Tensor:
        stored = self._source.params[name]
        dtype: torch.dtype = getattr(torch, stored.dtype)
        if self.plan.stage == 3:
            return torch.empty(0, dtype=dtype)
        return self._read(name, dtype, range(stored.numel)).view(stored.shape)

    def _read(self, name: str, dtype: torch.dtype, elements: range, numel: int | None = None) -> Tensor:
        values = torch.zeros(len(elements) if numel is None else numel, dtype=dtype)
        if elements:
            self._source.read(WEIGHT, name, elements.start, values[: len(elements)])
        return values

    def _fragments(self, rank: int) -> dict[str, Tensor]:
        """Return a rank's part of each frozen parameter, at stage 2 all of it."""
        found = {}
        for member in self.plan.frozen():
            dtype: torch.dtype = getattr(torch, self._source.params[member.stored].dtype)
            if self.plan.stage < 3:
                found[member.name] = self._read(member.stored, dtype, range(member.numel)).view(member.shape)
                continue
            part = -(-member.numel // self.plan.num_ranks)
            elements = range(min(rank * part, member.numel), min((rank + 1) * part, member.numel))
            found[member.name] = self._read(member.stored, dtype, elements, part)
        return found

    def _optimizer(self, rank: int) -> dict[str, Any] | None:
        is_half = self.precision in HALVES
        return self.states.unpartitioned(rank, is_half=is_half) if self._has_optimizer else None

    def _optimizer_of_experts(self, rank: int) -> dict[str, Any]:
        return {"optimizer": self._optimizer(rank)}

    def _zero(self, rank: int) -> dict[str, Any]:
        states = self.states
        optimizer = states.partitioned_by_param(rank) if self.plan.stage == 3 else states.partitioned(rank)
        return {"optimizer_state_dict": optimizer, "ds_config": self._source.state.config, "ds_version": DS_VERSION}

    def _expert(self, layer: str, number: int) -> dict[str, Any]:
        begin = f"{layer}{number}."
        return {name: self._weight(name) for name in self.plan.names if name.startswith(begin)}


# ---- DeepSpeed's universal form ----
# DeepSpeed reads neither buffers nor frozen parameters from it, and at stage 3 one group's hyper-parameters for all.


# By stage, below 3 and at 3. Without weights: DeepSpeed takes counters, schedule and client state from it.
_MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def universal_files(files: DeepSpeedFiles) -> Iterator[tuple[str, Content]]:
    """Yield name and content of the files; the content of one tensor is in memory at a time.

    files: of stage 3 and one rank. Raises: CheckpointError for experts, which DeepSpeed has no universal form of.
    """
    plan = files.plan
    if plan.layers:
        raise plan.error("DeepSpeed's universal checkpoints have no experts", "use --format deepspeed")
    for name in _MODEL_STATES:
        yield name, functools.partial(files.model_states, 0)
    yield "zero/optimizer_state.pt", functools.partial(_optimizer_state, files)
    for group in plan.groups(0):
        scalars = files.states.scalars(group.members)
        names = files.states.states(group.members)
        for member in group.members:
            folder = f"zero/{member.name}"
            yield f"{folder}/fp32.pt", functools.partial(_tensor, files, WEIGHT, member)
            for name in names:
                yield f"{folder}/{name}.pt", functools.partial(_tensor, files, name, member)
            if "step" in scalars:
                yield f"{folder}/step.pt", functools.partial(scalars.__getitem__, "step")


def _tensor(files: DeepSpeedFiles, key: str, member: Member) -> dict[str, Any]:
    return {"param": files.states.read(key, whole(member)).view(member.shape)}


def _optimizer_state(files: DeepSpeedFiles) -> dict[str, Any]:
    """Return what is common to all parameters, where each stage looks for it."""
    states, groups = files.states, files.plan.groups(0)
    saved = states.groups(groups, [1] * len(groups))
    scalars = states.scalars([member for group in groups for member in group.members])
    # Stage 3 gives the first group's values to all groups: what differs is left out, and stays as the script has it.
    common = {
        key: value for key, value in saved[0].items() if all(key in each and each[key] == value for each in saved)
    }
    inner = {"state": {0: {"step": scalars.get("step", 0)}}, "param_groups": [{**common, "params": [0]}]}
    return {**states.common(), "param_groups": saved, "optimizer_state_dict": inner}
