"""What Llama-7B costs at stage 3 for each way to divide it into units: gathers, reductions and kernels of a step.

    python benchmarks/start_7b.py [--worlds 8,3000] [--layers 32] [--output FILE]

The model is on torch's meta device: it has shapes and no values. Units are those of the engine, so is the schedule that
gathers them, over stand-ins that only count, and so are the optimizer's spans. No process group is started.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from common import Goal, Section, argument_parser, goals_table, table
from torch import nn

from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.load import load_config
from launcher.config.policies import ZeroPolicy, zero_policy
from launcher.kernels.api import GradScale, Span
from launcher.kernels.reference import ReferenceKernel
from launcher.optim.api import ParamShard
from launcher.optim.kernel_flat import KernelFlat, KernelSet
from launcher.sharding.layout import UnitLayout, layout_unit
from launcher.zero.partition import plan_units
from launcher.zero.schedule import ParameterSchedule
from launcher.zero.states import ParameterState
from launcher.zero.unit import FlatUnit, UnitMembers

HIDDEN, FFN, VOCABULARY = 4096, 11008, 32000
AUTO_NAME = 'Hugging Face\'s `"auto"`'
ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Attention(nn.Module):
    """The parameters of attention."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN, bias=False))


class Mlp(nn.Module):
    """The parameters of the gated feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)


class Layer(nn.Module):
    """The parameters of a block, in the order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(HIDDEN), Attention()
        self.post_attention_layernorm, self.mlp = nn.RMSNorm(HIDDEN), Mlp()


class Llama(nn.Module):
    """The modules and parameters of Llama-7B, in the order of use."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)


class _Params:
    """Stands in for `UnitParameters`: what the schedule asks for is counted, and arrives at once."""

    def __init__(self, *, is_sharded: bool) -> None:
        self.state = ParameterState.SHARDED if is_sharded else ParameterState.UNSHARDED
        self.num_gathers = 0
        self.is_scheduled = self.may_be_edited = self.is_touched = False
        self.check_thread: Any = None  # set by the schedule

    def is_gathered_in(self, *, for_autocast: bool) -> bool:
        """There is one type."""
        return True

    def start_gather(self, *, for_autocast: bool) -> None:
        self.state = ParameterState.UNSHARDED
        self.num_gathers += 1

    def wait(self) -> None:
        """Nothing is in flight."""

    def release_if_idle(self) -> None:
        self.state = ParameterState.SHARDED


class _Unit:
    """Stands in for `FlatUnit`."""

    def __init__(self, index: int, members: UnitMembers, layout: UnitLayout) -> None:
        self.index = index
        self.members = members
        self.layout = layout
        self.numel = layout.padded_numel
        self.group = SimpleNamespace(device=torch.device("cpu"))  # where autocast may be on
        self.is_sharded = not members.is_persistent
        self.params = _Params(is_sharded=self.is_sharded)


def steps_of(model: nn.Module, units: list[_Unit], policy: ZeroPolicy, num_steps: int) -> tuple[int, int]:
    """Run the engine's schedule over training steps; return the gathers of the last, and the most elements whole."""
    stand_ins = cast("list[FlatUnit]", units)
    schedule = ParameterSchedule(stand_ins, policy.parameters)
    read_by: dict[nn.Module, list[FlatUnit]] = {}
    for unit in stand_ins:
        for module in unit.members.modules:
            read_by.setdefault(module, []).append(unit)
    uses: dict[nn.Module, Any] = {}

    def forward(module: nn.Module) -> None:
        read = [unit for unit in read_by.get(module, []) if unit.is_sharded]
        schedule.before_forward(list(read_by.get(module, [])))
        uses[module] = schedule.open_use(read, module, is_training=True) if read else None
        for child in module.children():
            forward(child)
        schedule.after_forward()

    def backward(module: nn.Module) -> None:
        use = uses[module]
        if use is not None:
            schedule.before_backward(use.units, use)
        for child in reversed(list(module.children())):
            backward(child)
        if use is not None:
            schedule.after_backward(use)

    before = 0
    for _ in range(num_steps):
        before = sum(unit.params.num_gathers for unit in units)
        forward(model)
        schedule.begin_backward()
        backward(model)
        schedule.end_backward()
        schedule.after_step()
    return sum(unit.params.num_gathers for unit in units) - before, schedule.peak_live_numel


class _CountingKernel(ReferenceKernel):
    """Counts what an optimizer would launch."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_spans = 0

    def update(self, spans: Sequence[Span], grad_scale: GradScale = 1.0) -> None:
        """Count one call."""
        self.num_calls += 1
        self.num_spans += len(spans)


def shards_of(unit: _Unit, rank: int) -> list[ParamShard]:
    """Return what a rank owns of each parameter of a unit, without values."""
    owned, start, found = unit.layout.chunk_range(rank), 0, []
    for slot in unit.layout.slots:
        part = slot.within(owned)
        master, grad = (torch.empty(len(part), device="meta") for _ in range(2))
        shape = torch.Size(slot.shape)
        found.append(ParamShard(slot.name, shape, part, master, grad, slot.group, unit.index, start))
        start += len(part)
    return found


@dataclass(frozen=True)
class Row:
    """What one way to divide the model costs."""

    num_units: int
    num_gathers: int
    num_reductions: int
    num_spans: int  # runs of elements in the table of the one kernel call of a step
    num_calls_offloaded: int  # kernel calls where the optimizer is offloaded: its units are updated one by one
    peak_numel: int
    padding: float  # part of what is stored
    seconds: float

    def cells(self) -> list[str]:
        """Return the columns."""
        counts = self.num_units, self.num_gathers, self.num_reductions, self.num_spans, self.num_calls_offloaded
        rest = f"{self.peak_numel / 1e6:.0f} M", f"{self.padding:.3%}", f"{self.seconds:.2f} s"
        return [*map(str, counts), *rest]


def measure(model: nn.Module, policy: ZeroPolicy, world_size: int, bound: int | None) -> Row:
    """Divide the model and count. bound: cuts blocks at so many elements; None: as the policy does."""
    start_s = time.perf_counter()
    dividing = policy
    if bound is not None:
        dividing = replace(policy, parameters=replace(policy.parameters, max_live_numel=bound))
    planned = plan_units(model, dict.fromkeys(model.parameters(), 0), dividing)
    units = [_Unit(index, members, layout_unit(infos, world_size)) for index, (members, infos) in enumerate(planned)]
    seconds = time.perf_counter() - start_s
    num_gathers, peak_numel = steps_of(model, units, policy, num_steps=3)
    kernel, one_by_one = _CountingKernel(), _CountingKernel()
    shards = [shard for unit in units for shard in shards_of(unit, 0)]
    groups = [{"params": [], **ADAM, "amsgrad": False, "maximize": False}]
    KernelFlat(torch.optim.AdamW, shards, groups, KernelSet({"meta": kernel})).step()
    offloaded = KernelFlat(torch.optim.AdamW, shards, groups, KernelSet({"meta": one_by_one}))
    for unit in units:
        offloaded.step_unit(unit.index, torch.empty(unit.numel, device="meta"), 1.0)
    stored = sum(unit.numel for unit in units)
    return Row(
        num_units=len(units),
        num_gathers=num_gathers,
        num_reductions=sum(unit.layout.is_trainable for unit in units),
        num_spans=kernel.num_spans,
        num_calls_offloaded=one_by_one.num_calls,
        peak_numel=peak_numel,
        padding=1 - sum(unit.layout.numel for unit in units) / stored,
        seconds=seconds,
    )


def policy_of(zero: dict[str, Any], world_size: int) -> ZeroPolicy:
    """Return the policy that an engine would be built with, of a config with `"auto"` in it."""
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, **zero},
    }
    facts = AutoFacts(world_size=world_size, hidden_size=HIDDEN)
    config, _ = resolve_auto(load_config(given).config, facts)
    return zero_policy(config, world_size)


def goals(found: dict[tuple[int, str], Row]) -> list[Goal]:
    """Return what was asked for, and whether it is so."""
    goals = []
    for world_size in sorted({world for world, _ in found}):
        default, auto = (found[world_size, name].num_units for name in ("default keys", AUTO_NAME))
        why = "blocks are units, whatever the buckets" if auto == default else "buckets cut blocks"
        what = f"units with {AUTO_NAME}, {world_size:,} ranks"
        goals.append(Goal(what, f"{default}, as with default keys", str(auto), auto == default, why))
    return goals


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--worlds", default="8,3000", help="numbers of ranks; default: %(default)s")
    parser.add_argument("--layers", type=int, default=32, help="blocks of the model; default: %(default)s")
    options = parser.parse_args()
    page = Section("Start of a 7 B model", "torch")
    with torch.device("meta"):
        model = Llama(options.layers)
    num_params = sum(param.numel() for param in model.parameters())
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    auto = dict.fromkeys(keys, "auto")
    rows, found = [], {}
    for world_size in (int(text) for text in options.worlds.split(",")):
        default, huggingface = policy_of({}, world_size), policy_of(auto, world_size)
        ways = {
            "default keys": (default, None),
            AUTO_NAME: (huggingface, None),
            "default keys, blocks cut by the prefetch bucket": (default, default.parameters.prefetch_numel),
            f"{AUTO_NAME}, blocks cut by hidden size²": (huggingface, HIDDEN**2),
        }
        for name, (policy, bound) in ways.items():
            row = found[world_size, name] = measure(model, policy, world_size, bound)
            rows.append([f"{world_size:,}", name, *row.cells()])
    header = [
        "ranks",
        "units",
        "number",
        "gathers",
        "reductions",
        "spans",
        "offloaded",
        "whole",
        "padding",
        "planned in",
    ]
    text = (
        f"{options.layers} blocks of hidden size {HIDDEN:,}, {num_params / 1e9:.2f} B parameters on the meta device,"
        " bf16, AdamW, stage 3, no recomputation.\nGathers and reductions of one step of one micro-batch, the third;"
        " spans of elements in the table of the optimizer's one\nkernel call, and kernel calls where the optimizer is"
        " offloaded; the most elements whole at once; the part of padding. Blocks\nthat are cut are those of releases"
        f" before this one: a unit a layer.\n\n{goals_table(goals(found))}\n\n{table(header, rows)}"
    )
    page.write("Counted, not timed", text, options.output)


if __name__ == "__main__":
    main()
