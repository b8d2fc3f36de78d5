"""What DeepSpeed's files have of an optimizer: fp32 weights, states, groups, loss scale, at each stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from launcher.checkpoint.deepspeed_files.pickled import Foreign
from launcher.checkpoint.deepspeed_files.plan import Flat, Group, Member, Plan, joined, whole
from launcher.checkpoint.formats.native import NativeSource
from launcher.checkpoint.formats.source import WEIGHT
from launcher.optim.catalog import BY_NAME

DS_VERSION = "0.19.8"
# Types of the config that DeepSpeed updates by a kernel of its own, which counts steps as an int; torch's as a tensor.
_OWN_KERNELS = ("adam", "adamw", "lamb", "lion", "onebitadam", "onebitlamb", "zerooneadam")
_FUSED = ("adam", "adamw")  # and without ZeRO keeps a group in one tensor
_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_SCALE_FACTOR = 2.0


class OptimizerStates:
    """Reads what files have of the optimizer, one tensor of a rank at a time."""

    def __init__(self, plan: Plan) -> None:
        """Raises: CheckpointError for states that DeepSpeed cannot divide."""
        self._plan, self._source = plan, plan.source
        source = self._source
        if isinstance(source, NativeSource):
            name = next((name for name in source.params if source.whole_states(name)), None)
            if name is not None:
                states = ", ".join(source.whole_states(name))
                message = f"the state {states} of {name} has no value for each element, as DeepSpeed's files need it"
                raise plan.error(message, "remove checkpoint.format, or export the weights: --format hf")
        section = source.state.config.get("optimizer")
        section = section if isinstance(section, Mapping) else {}
        options = section.get("params")
        is_torchs = isinstance(options, Mapping) and bool(options.get("torch_adam"))
        kind = "" if is_torchs else str(section.get("type", "")).lower()
        self._counts_by_int, self._is_fused = kind in _OWN_KERNELS, kind in _FUSED

    # ---- values ----

    def read(self, key: str, flat: Flat) -> Tensor:
        """Return a tensor of a rank. key: "weight" for fp32 weights, or a state; a parameter without it has zeros."""
        values = torch.zeros(flat.numel, dtype=self._dtype(key, flat.members))
        for piece in flat.pieces:
            stored = self._source.params[piece.member.stored]
            if key == WEIGHT or key in stored.states:
                out = values[piece.at : piece.at + len(piece.elements)]
                self._source.read(key, piece.member.stored, piece.elements.start, out)
        return values

    def _dtype(self, key: str, members: Sequence[Member]) -> torch.dtype:
        params = [self._source.params[member.stored] for member in members]
        found = (each.master_dtype if key == WEIGHT else each.states.get(key) for each in params)
        dtype: torch.dtype = getattr(torch, next(filter(None, found), "float32"))
        return dtype

    def states(self, members: Iterable[Member]) -> list[str]:
        """Return the states by element that any of some parameters have."""
        params = [self._source.params[member.stored] for member in members]
        return list(dict.fromkeys(state for stored in params for state in stored.states))

    def scalars(self, members: Iterable[Member]) -> dict[str, Any]:
        """Return the states of one value, as the first parameter that has them says."""
        found: dict[str, Any] = {}
        for member in members:
            for state, value in self._source.params[member.stored].scalars.items():
                found.setdefault(state, self._step(value) if state == "step" else value)
        return found

    def _step(self, value: Any) -> Any:
        return int(value) if self._counts_by_int else torch.tensor(float(value))

    def state(self, flat: Flat, shape: tuple[int, ...] | None = None) -> dict[str, Any]:
        """Return the states of one tensor of a rank. shape: of each; None: 1-D."""
        shape = (-1,) if shape is None else shape
        values = {name: self.read(name, flat).view(shape) for name in self.states(flat.members)}
        return {**self.scalars(flat.members), **values}

    # ---- groups ----

    def groups(self, groups: Sequence[Group], sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Return groups as a torch optimizer saves them. sizes: how many tensors each has."""
        found, first = [], 0
        for group, size in zip(groups, sizes, strict=True):
            found.append({**self.options(group), "params": list(range(first, first + size))})
            first += size
        return found

    def options(self, group: Group) -> dict[str, Any]:
        """Return hyper-parameters, all that the class has: a state dict that is loaded replaces them."""
        kind: Any = BY_NAME.get(self._source.state.optimizer or "")
        rate = group.options.get("lr", 0.0)
        defaults = {} if kind is None else kind([torch.empty(1)], lr=float(rate)).defaults
        return {**defaults, "bias_correction": True, **group.options}

    def scaler(self) -> Foreign:
        """Return the loss scale as an object of DeepSpeed's."""
        state, section = self._source.state.loss_scaler, self._source.state.config.get("fp16")
        section = section if isinstance(section, Mapping) else {}
        if state is None:
            return Foreign(_SCALER, "LossScaler", {"cur_scale": 1.0, "dynamic": False})
        if section.get("loss_scale"):
            return Foreign(_SCALER, "LossScaler", {"cur_scale": float(state["scale"]), "dynamic": False})
        hysteresis = section.get("hysteresis", 2)
        fields = {
            "cur_scale": float(state["scale"]),
            "cur_iter": int(state["num_steps"]),
            "last_overflow_iter": int(state["last_overflow"]),
            "scale_factor": _SCALE_FACTOR,
            "scale_window": section.get("loss_scale_window", 1000),
            "min_scale": section.get("min_loss_scale", 1),
            "delayed_shift": hysteresis,
            "cur_hysteresis": int(state["hysteresis"]),
            "consecutive_hysteresis": section.get("consecutive_hysteresis", False),
            "raise_error_at_min_scale": True,
            "dynamic": True,
            "dtype": torch.float16,
        }
        return Foreign(_SCALER, "DynamicLossScaler", fields)

    def common(self) -> dict[str, Any]:
        """Return what the files of ZeRO have at every stage."""
        scaler = self.scaler()
        clip = self._source.state.config.get("gradient_clipping")
        return {
            "loss_scaler": scaler,
            "dynamic_loss_scale": scaler.fields["dynamic"],
            "overflow": False,
            **({"clip_grad": float(clip)} if isinstance(clip, int | float) else {}),
            "zero_stage": self._plan.stage,
            "ds_version": DS_VERSION,
        }

    # ---- whole optimizers ----

    def partitioned(self, rank: int) -> dict[str, Any]:
        """Return the optimizer of a rank at stage 1 or 2."""
        groups = self._plan.groups(rank)
        flats = [self._plan.flats(group)[0] for group in groups]
        return {
            **self.common(),
            "base_optimizer_state": {
                "state": self._numbered(flats),
                "param_groups": self.groups(groups, [1] * len(groups)),
            },
            "single_partition_of_fp32_groups": [self.read(WEIGHT, flat)[: flat.lean_numel].clone() for flat in flats],
            "group_paddings": [flat.numel - flat.lean_numel for flat in flats],
            "param_alignment_paddings": [list(flat.gaps) for flat in flats],
            "partition_count": [group.num_parts for group in groups],
            "param_slice_mappings": [_mapping(flat) for flat in flats],
        }

    def partitioned_by_param(self, rank: int) -> dict[str, Any]:
        """Return the optimizer of a rank at stage 3."""
        groups = self._plan.groups(rank)
        of_groups = [self._plan.flats(group) for group in groups]
        flats = [flat for of_group in of_groups for flat in of_group]
        return {
            **self.common(),
            "partition_count": self._plan.num_ranks,
            "optimizer_state_dict": {
                "state": self._numbered(flats),
                "param_groups": self.groups(groups, [len(of_group) for of_group in of_groups]),
            },
            "fp32_flat_groups": [self.read(WEIGHT, flat) for flat in flats],
        }

    def unpartitioned(self, rank: int, *, is_half: bool) -> dict[str, Any]:
        """Return the optimizer of a rank without ZeRO. is_half: it is one that keeps fp32 weights beside others."""
        groups = self._plan.groups(rank)
        if is_half and self._is_fused:
            flats = [joined(group.members) for group in groups]
            inner = {"state": self._numbered(flats), "param_groups": self.groups(groups, [1] * len(groups))}
            masters = [self.read(WEIGHT, flat) for flat in flats]
            return {**self._scale(), "optimizer_state_dict": inner, "fp32_groups_flat": masters, **self._clip()}
        members = [member for group in groups for member in group.members]
        states = {number: self.state(whole(member), member.shape) for number, member in enumerate(members)}
        inner = {
            "state": {number: state for number, state in states.items() if state},
            "param_groups": self.groups(groups, [len(group.members) for group in groups]),
        }
        if not is_half:
            return inner
        of_groups = [
            [self.read(WEIGHT, whole(member)).view(member.shape) for member in group.members] for group in groups
        ]
        return {**self._scale(), "optimizer_state_dict": inner, "fp32_groups": of_groups}

    def _numbered(self, flats: Sequence[Flat]) -> dict[int, dict[str, Any]]:
        states = ((number, self.state(flat)) for number, flat in enumerate(flats))
        return {number: state for number, state in states if state}

    def _scale(self) -> dict[str, Any]:
        fields = self.scaler().fields
        kept = ("last_overflow_iter", "scale_factor", "scale_window")
        return {
            "dynamic_loss_scale": fields["dynamic"],
            "cur_scale": fields["cur_scale"],
            "cur_iter": fields.get("cur_iter", self._source.state.global_steps),
            **{key: fields[key] for key in kept if key in fields},
        }

    def _clip(self) -> dict[str, Any]:
        return {"clip_grad": self.common().get("clip_grad", 0.0)}


def _mapping(flat: Flat) -> dict[str, Foreign]:
    """Return where a rank's parameters are in its part of a group, as DeepSpeed's converters read it."""
    return {
        piece.member.name: Foreign(
            "deepspeed.utils.tensor_fragment", "fragment_address", {"numel": len(piece.elements), "start": piece.at}
        )
        for piece in flat.pieces
    }
