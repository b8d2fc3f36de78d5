"""A mixture of experts as a layer: DeepSpeed's `deepspeed.moe.layer.MoE`, with the names of its modules."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.base.errors import EngineAssertionError, EngineError
from launcher.comm.device import DeviceRuntime, local_device
from launcher.comm.groups import RankGroup, init_distributed, world_group
from launcher.comm.hosts import host_all_reduce_max
from launcher.comm.mesh import expert_group
from launcher.comm.torch_internals import is_in_backward, outside_graphs
from launcher.config.equations import divisors
from launcher.parallel.expert.exchange import at_experts, output_of, run_each, swap_chunks
from launcher.parallel.expert.gating import GateOptions, Routing, jittered, route
from launcher.parallel.expert.grouped import are_groupable, run_grouped
from launcher.parallel.expert.placement import ExpertPlacement, local_experts, placement_of, set_placement
from launcher.sharding.mesh import MeshSizes
from launcher.zero.marks import mark_expert

_POLICIES = (None, "None", "Jitter", "RSample")


class MoE(nn.Module):
    """A layer whose experts are sharded over `ep_size` neighbouring ranks, each with `num_experts / ep_size` of them.

    Every rank must build it, in the same order, and every rank's forward must run: tokens travel between the ranks.
    Rajbhandari et al., "DeepSpeed-MoE", https://arxiv.org/abs/2201.05596; with `use_residual` section 4.1 of it.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """hidden_size: of inputs and outputs. expert: a module from [..., hidden_size] to the same; each expert starts
        as a copy of it. k: experts of a token. capacity_factor: an expert takes up to
        ceil(tokens / num_experts * capacity_factor * k) tokens of each rank, and `min_capacity` at least;
        eval_capacity_factor: the same outside of training; drop_tokens: False: it takes all. use_rts: of k = 1, which
        tokens are dropped is random. noisy_gate_policy: "Jitter" or "RSample", in training. use_residual: `expert`
        itself sees every token, and is weighed against the mixture. top2_2nd_expert_sampling: of k = 2, the second
        expert is drawn in training.

        Raises: EngineError for sizes that do not divide, and for `use_tutel` and `enable_expert_tensor_parallelism`.
        """
        super().__init__()
        _refuse(use_tutel=use_tutel, enable_expert_tensor_parallelism=enable_expert_tensor_parallelism)
        _check(num_experts, ep_size, k, noisy_gate_policy)
        self.num_experts, self.ep_size = num_experts, ep_size
        self.num_local_experts = num_experts // ep_size
        self.use_residual = use_residual
        self.expert_group_name = f"ep_size_{ep_size}"
        options = GateOptions(
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling,
        )
        placement = ExpertPlacement(_group_of_experts(ep_size), num_experts)
        self.deepspeed_moe = MOELayer(TopKGate(hidden_size, num_experts, options), Experts(expert, placement))
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, the balance loss of this rank's tokens, and how many chose each expert.

        hidden_states: [..., hidden_size]. used_token: one number a token, 0 for tokens that no expert gets. Returns
        [..., hidden_size], a scalar fp32, int64 [num_experts].
        """
        output, loss, counts = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            share = self.coefficient(hidden_states).softmax(dim=-1)
            output = output * share[..., :1] + output_of(self.mlp, hidden_states) * share[..., 1:]
        return output, loss, counts


class TopKGate(nn.Module):
    """The router: one linear layer, in fp32 whatever the model's precision is."""

    def __init__(self, hidden_size: int, num_experts: int, options: GateOptions) -> None:
        super().__init__()
        self.wg = nn.Linear(hidden_size, num_experts, bias=False)
        self.options = options

    def forward(self, x: Tensor, used: Tensor | None = None, *, capacity: int | None = None) -> Routing:
        """Return the routing of tokens. x: [tokens, hidden_size]. used: see `route`."""
        x = x.float()
        if self.options.noisy_gate_policy == "Jitter" and self.training:
            x = jittered(x)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x, self.wg.weight.float())
        return route(logits, self.options, capacity=capacity, used=used, is_training=self.training)


class ExpertList(nn.ModuleList):
    """The experts of this rank, by their place on it: `experts[0]` is its first.

    Names of parameters and state dicts have an expert's number in the whole layer; a state dict with places on this
    rank in their stead, as DeepSpeed's, loads as well.
    """

    @property
    def _own(self) -> list[nn.Module]:
        placement = placement_of(self)
        modules: Any = self._modules
        return [modules[str(number)] for number in (placement.local if placement is not None else range(len(modules)))]

    def __len__(self) -> int:
        return len(self._own)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._own)

    def __getitem__(self, index: Any) -> Any:
        return nn.ModuleList(self._own[index]) if isinstance(index, slice) else self._own[index]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        placement = placement_of(self)
        assert placement is not None
        for param in module.parameters():
            mark_expert(param, placement.group.world_size)  # or it would be averaged over all ranks
        setattr(self, str(placement.local[index]), module)

    def append(self, module: nn.Module) -> NoReturn:
        raise _fixed_number()

    def insert(self, index: int, module: nn.Module) -> NoReturn:
        raise _fixed_number()

    def extend(self, modules: Any) -> NoReturn:
        raise _fixed_number()

    def __delitem__(self, index: int | slice) -> NoReturn:
        raise _fixed_number()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        placement = placement_of(self)
        names = {key: key.removeprefix(prefix).split(".", 1) for key in state_dict if key.startswith(prefix)}
        places = {parts[0] for parts in names.values()}
        if placement is not None and places == set(map(str, range(placement.num_local))):
            values = {key: state_dict.pop(key) for key in names}
            for key, (place, name) in names.items():
                state_dict[f"{prefix}{placement.local[int(place)]}.{name}"] = values[key]
        super()._load_from_state_dict(state_dict, prefix, *others)


class Experts(nn.Module):
    """The experts of a layer. Each rank has its own under their numbers in the whole layer, and None for the others."""

    def __init__(self, expert: nn.Module, placement: ExpertPlacement) -> None:
        super().__init__()
        self.num_local_experts = placement.num_local
        self._run_grouped: dict[tuple[Any, ...], bool] = {}  # by what is cast: the last forward that was no repetition
        self.deepspeed_experts = ExpertList()
        modules: dict[str, Any] = self.deepspeed_experts._modules  # torch's annotation leaves None out
        without_values = copy.deepcopy(expert).to("meta")
        for number in range(placement.num_experts):
            is_own = number in placement.local
            copied = copy.deepcopy(expert if is_own else without_values)
            if not is_own:
                placement.remote[number] = copied
            modules[str(number)] = copied if is_own else None
        for param in self.deepspeed_experts.parameters():
            mark_expert(param, placement.group.world_size)
        set_placement(self.deepspeed_experts, placement)

    @property
    def placement(self) -> ExpertPlacement:
        """How they are sharded."""
        found = placement_of(self.deepspeed_experts)
        assert found is not None
        return found

    def forward(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Run this rank's experts: see `run_each`. At once where that gives the same: see `run_grouped`."""
        experts = local_experts(self.deepspeed_experts)
        # A forward that checkpointing repeats in backward runs as the first one did, though a hook has come or gone
        # since: the two forms save different tensors. Torch takes those of the repetition for those of the forward by
        # their number and shape, and ends the training where they differ. It restores autocast for the repetition.
        casts = torch.is_autocast_enabled(rows.device.type)
        kind = rows.dtype, casts and torch.get_autocast_dtype(rows.device.type)
        if kind not in self._run_grouped or not is_in_backward():
            self._run_grouped[kind] = are_groupable(experts, rows)
        return (run_grouped if self._run_grouped[kind] else run_each)(experts, rows, sizes)


class MOELayer(nn.Module):
    """Router and experts: tokens to their experts, and back."""

    def __init__(self, gate: TopKGate, experts: Experts) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts

    @outside_graphs
    def forward(self, x: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """See `MoE.forward`."""
        tokens = x.reshape(-1, x.shape[-1])
        options, placement, capacity = self.gate.options, self.experts.placement, None
        if options.drop_tokens:
            num_tokens = _largest(placement.group, len(tokens))  # or ranks with fewer would send smaller chunks
            capacity = options.capacity(num_tokens, placement.num_experts, is_training=self.training)
        routing: Routing = self.gate(tokens, used_token, capacity=capacity)
        if capacity is not None:
            output = self._with_capacity(tokens, routing, capacity)
        else:
            output = self._without_drops(tokens, routing)
        return output.view(x.shape), routing.balance_loss, routing.counts

    def _without_drops(self, x: Tensor, routing: Routing) -> Tensor:
        placement = self.experts.placement
        trains = any(param.requires_grad for param in self.experts.parameters())

        def run(rows: Tensor, _: Tensor, sizes: Sequence[int], weights: Tensor) -> Tensor:
            outputs: Tensor = self.experts(rows, sizes)
            return outputs * weights[:, None]

        return at_experts(x, routing.experts, routing.weights, placement, run, trains=trains)

    def _with_capacity(self, x: Tensor, routing: Routing, capacity: int) -> Tensor:
        """Send every expert `capacity` places, filled or not: all sizes are known."""
        placement, width = self.experts.placement, x.shape[-1]
        num_places = placement.num_experts * capacity
        # The last place is one more, for what is dropped.
        place = torch.where(routing.experts >= 0, routing.experts * capacity + routing.places, num_places)
        token = torch.arange(len(x), device=x.device)[:, None].expand_as(place)
        token_at = place.new_full((num_places + 1,), len(x)).scatter_(0, place.reshape(-1), token.reshape(-1))
        filled = torch.cat([x, x.new_zeros(1, width)])[token_at[:-1]]
        num_ranks, num_local = placement.group.world_size, placement.num_local
        received = swap_chunks(filled, placement.group).view(num_ranks, num_local, capacity, width)
        rows = received.transpose(0, 1).reshape(-1, width)  # expert by expert
        outputs = self.experts(rows, [num_ranks * capacity] * num_local)
        outputs = outputs.view(num_local, num_ranks, capacity, width).transpose(0, 1)
        returned = swap_chunks(outputs.reshape(num_places, width), placement.group)
        found = torch.cat([returned, returned.new_zeros(1, width)])[place]  # [tokens, k, width]
        return (found * routing.weights[..., None]).sum(1).to(x.dtype)


def _fixed_number() -> EngineError:
    return EngineError(
        "a layer keeps the number of its experts: routers and all ranks count on it",
        where="deepspeed_moe.experts.deepspeed_experts",
        hint="build another layer with MoE(num_experts=...)",
    )


_runtime = functools.cache(DeviceRuntime)  # all layers share it: each runtime takes streams, of which torch has 32


def _group_of_experts(ep_size: int) -> RankGroup:
    """Return the `ep_size` neighbouring ranks that this one belongs to. Collective. Raises: EngineError."""
    if ep_size > 1:
        init_distributed()
    world = world_group(runtime=_runtime(local_device()))
    if ep_size == 1:
        return RankGroup(0, 1, None, world.runtime)
    if world.world_size % ep_size:
        raise EngineError(
            f"{ep_size} ranks of one set of experts do not divide the {world.world_size} ranks of this job",
            where="MoE(ep_size=...)",
            hint=f"use one of {_listed(divisors(world.world_size))}",
        )
    return expert_group(world, MeshSizes(world.world_size, expert=ep_size))


def _largest(group: RankGroup, number: int) -> int:
    """Return the largest of all ranks' numbers; no device is waited for. Collective."""
    if group.runtime.is_async_device:
        return host_all_reduce_max(group, [number])[0]
    return int(max(group.communicator.gather_scalars(float(number))))


def _refuse(*, use_tutel: bool, enable_expert_tensor_parallelism: bool) -> None:
    if use_tutel:
        raise EngineError("Tutel's kernels are not supported", where="MoE(use_tutel=...)", hint="leave use_tutel out")
    if enable_expert_tensor_parallelism:
        raise EngineError(
            "experts are not split over tensor-parallel ranks",
            where="MoE(enable_expert_tensor_parallelism=...)",
            hint="leave it out, and use more ranks of one set of experts: ep_size",
        )


def _check(num_experts: int, ep_size: int, k: int, noisy_gate_policy: str | None) -> None:
    if ep_size < 1 or num_experts < 1 or num_experts % ep_size:
        raise EngineAssertionError(
            f"{ep_size} ranks do not divide {num_experts} experts",
            where="MoE(num_experts=..., ep_size=...)",
            hint=f"use one of {_listed(divisors(max(num_experts, 1)))} for ep_size",
        )
    if not 1 <= k <= num_experts:
        raise EngineError(
            f"a token cannot go to {k} of {num_experts} experts", where="MoE(k=...)", hint=f"use 1 to {num_experts}"
        )
    if noisy_gate_policy not in _POLICIES:
        raise EngineAssertionError(
            f'there is no noise "{noisy_gate_policy}"',
            where="MoE(noisy_gate_policy=...)",
            hint='"Jitter", "RSample" or None',
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
