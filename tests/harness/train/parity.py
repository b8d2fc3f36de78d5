"""Single-process references that the engine must equal, and the small models they train.

The reference loops are plain torch and know nothing of units, shards or ranks, except that the global batch is cut into
the same micro-batches: the mean over ranks is the mean over the parts of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from harness.train.adamw import engines_adamw
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LENGTH = 37, 24, 6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A scale that overflows at the first steps, and again whenever three steps went well.
RESTLESS_SCALE = {"initial_scale_power": 22, "loss_scale_window": 3}


class TinyLM(nn.Module):
    """Blocks in a list, tied embedding and head, a frozen and (on request) unused parameters."""

    def __init__(self, *, has_unused: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        if has_unused:
            self.never = nn.Linear(WIDTH, WIDTH)
            self.blocks[1].register_parameter("spare", nn.Parameter(torch.ones(WIDTH)))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: int64 [batch, time] -> mean loss, fp32."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x) * self.scale
        logits = self.head(x)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(wide).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Case:
    """One training run."""

    stage: int
    precision: str
    accumulation: int
    num_steps: int = 12
    batch: int = 8  # samples of one micro-step over all ranks
    clipping: float = 0.5
    unit_numel: int = 500_000_000
    overlap: bool = True
    unused: bool = False  # the model has parameters that its forward does not read
    fp16: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # further top-level keys
    zero: dict[str, Any] = field(default_factory=lambda: {"stage3_param_persistence_threshold": 0})

    def config(self, world_size: int) -> dict[str, Any]:
        """Return the engine config of this run."""
        return {
            "train_micro_batch_size_per_gpu": self.batch // world_size,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "steps_per_print": 0,
            "bf16": {"enabled": self.precision == "bf16"},
            "fp16": {"enabled": self.precision == "fp16", **self.fp16},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": self.unit_numel,
                "sub_group_size": -(-self.unit_numel // world_size),  # what bounds units at stage 3
                "overlap_comm": self.overlap,
                **self.zero,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
            **self.settings,
        }

    def learning_rate(self, step: int) -> float:
        """Return the rate of optimizer step `step`, from 0: the schedule by hand."""
        return 5e-3 * min(1.0, max(0.0, (step - 1) / 4))


@dataclass
class Trajectory:
    """What two runs are compared by."""

    losses: list[float]
    weights: dict[str, Tensor]
    grad_norms: list[float]  # of every step, before clipping
    scales: list[float] = field(default_factory=list)  # the loss scale after every step


def make_model(case: Case) -> TinyLM:
    """Return the same model on every call."""
    torch.manual_seed(11)
    return TinyLM(has_unused=case.unused)


def micro_batches(case: Case) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the global micro-batches of every step: [step][micro] -> tokens, targets [batch, LENGTH]."""
    generator = torch.Generator().manual_seed(5)
    shape = (case.num_steps, case.accumulation, case.batch, LENGTH)
    tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
    targets = (tokens * 3 + 1) % VOCABULARY
    return [
        [(tokens[step, micro], targets[step, micro]) for micro in range(case.accumulation)]
        for step in range(case.num_steps)
    ]


def train_engine(rank: int, world_size: int, case: Case) -> Trajectory:
    """Train through the engine. Runs on every rank; each returns the same losses and whole weights."""
    import torch.distributed as dist

    import launcher

    engine, _, _, _ = launcher.initialize(model=make_model(case), config=case.config(world_size))
    part = slice(rank * case.batch // world_size, (rank + 1) * case.batch // world_size)
    losses, grad_norms, scales = [], [], []
    for step in micro_batches(case):
        total = torch.zeros((), dtype=torch.float64)
        for tokens, targets in step:
            loss = engine(tokens[part], targets[part])
            engine.backward(loss)
            engine.step()
            total += loss.detach().double()
        grad_norms.append(engine.get_global_grad_norm())
        scales.append(engine.optimizer.cur_scale)
        dist.all_reduce(total)
        losses.append((total / world_size / case.accumulation).item())
    return Trajectory(losses, engine.state_dict(), grad_norms, scales)


def train_fp32(case: Case, *, fused: bool | None = None, dtype: torch.dtype = torch.float32) -> Trajectory:
    """The plain loop: one process, the whole batch at once. fused: torch's kernel of AdamW; None: its own choice."""
    model = make_model(case).to(dtype)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    losses, grad_norms = [], []
    for number, step in enumerate(micro_batches(case)):
        optimizer.param_groups[0]["lr"] = case.learning_rate(number)
        total = 0.0
        for tokens, targets in step:
            loss = model(tokens, targets)
            (loss / case.accumulation).backward()
            total += loss.item()
        grad_norms.append(nn.utils.clip_grad_norm_(trained, case.clipping or math.inf).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / case.accumulation)
    return Trajectory(losses, dict(model.state_dict()), grad_norms)


class ReferenceScale:
    """The dynamic loss scale written down from its rules: an overflow halves it once hysteresis is used up, a window of
    good steps before another one doubles it and forgives."""

    def __init__(self, case: Case) -> None:
        section = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "loss_scale": 0, **case.fp16}
        self.fixed = section["loss_scale"]
        self.window = section["loss_scale_window"]
        self.full = section["hysteresis"] if case.stage else 1  # as in DeepSpeed
        self.value = float(self.fixed or 2 ** section["initial_scale_power"]) if case.precision == "fp16" else 1.0
        self.left, self.good = self.full, 0

    def note(self, *, overflow: bool) -> None:
        """Choose the scale of the next step."""
        if self.fixed or self.value == 1.0:
            return
        if overflow:
            self.good = 0
            if self.left > 1:
                self.left -= 1
            else:
                self.value = max(self.value / 2, 1.0)
            return
        if self.good and self.good % self.window == 0:
            self.value *= 2
            self.left = self.full
        self.good += 1


def train_mixed(case: Case, world_size: int, grad_norms: list[float], *, num_in_order: int | None = None) -> Trajectory:
    """The mixed-precision loop: a 16-bit model, fp32 master weights, fp32 gradient sums, a loss scale for fp16.

    Each part of the batch that a rank would see goes through the 16-bit model by itself, because 16-bit gradients of a
    larger batch round differently; everything after that is fp32, and sums run in the order the stage implies.

    grad_norms: the norms of the run under test. Each must be the loop's own to 1e-6, and is then used to clip: the
    last bit of a norm depends on the order of its sum, and would flip roundings to 16 bits for no reason of substance.
    num_in_order: after so many updates the model gets each one a step later; None: it never does.
    """
    model = make_model(case).to(DTYPES[case.precision])
    trained = [param for param in model.parameters() if param.requires_grad]
    masters = [param.detach().float().clone() for param in trained]
    optimizer = engines_adamw(masters, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scale = ReferenceScale(case)
    losses, scales, num_taken = [], [], 0
    for number, step in enumerate(micro_batches(case)):
        optimizer.param_groups[0]["lr"] = case.learning_rate(num_taken)
        total, by_micro = 0.0, []  # [micro][rank][parameter], 16-bit
        for tokens, targets in step:
            by_rank = []
            for part, target in zip(tokens.chunk(world_size), targets.chunk(world_size), strict=True):
                loss = model(part, target)
                total += loss.item()
                scaled = (loss / case.accumulation).float() * scale.value
                by_rank.append(torch.autograd.grad(scaled, trained, allow_unused=True))
            by_micro.append(by_rank)
        for index, master in enumerate(masters):
            master.grad = mean_gradient([[grads[index] for grads in ranks] for ranks in by_micro], case.stage)
        is_finite = clip_by(masters, case.clipping, grad_norms[number], scale.value)
        if num_in_order is not None:
            _write_back(trained, masters)
        if is_finite:
            num_taken += 1
            optimizer.step()
            if num_in_order is None or num_taken <= num_in_order:
                _write_back(trained, masters)
        scale.note(overflow=not is_finite)
        losses.append(total / world_size / case.accumulation)
        scales.append(scale.value)
    return Trajectory(losses, dict(model.state_dict()), grad_norms, scales)


@torch.no_grad()
def _write_back(params: list[nn.Parameter], masters: list[Tensor]) -> None:
    for param, master in zip(params, masters, strict=True):
        param.copy_(master)


def mean_gradient(grads: list[list[Tensor | None]], stage: int) -> Tensor | None:
    """Return the fp32 sum over micro-batches of the mean over ranks. grads: [micro][rank]; None: unused.

    Stages 2 and 3 sum each micro-batch over the ranks; the others sum micro-batches on each rank first.
    """
    if grads[0][0] is None:
        return None
    world_size = len(grads[0])
    table = [[grad.float() for grad in ranks if grad is not None] for ranks in grads]
    if stage < 2 or world_size == 1:
        table = [[_sum([ranks[rank] for ranks in table]) for rank in range(world_size)]]
    return _sum([_sum(ranks) * (1.0 / world_size) for ranks in table])


def _sum(terms: list[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def clip_by(params: list[Tensor], max_norm: float, norm: float, scale: float) -> bool:
    """Unscale and clip as `clip_grad_norm_` does, by a norm that is checked first; whether it is finite."""
    grads = [param.grad for param in params if param.grad is not None]
    own = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt().item() / scale
    if not math.isfinite(own):
        assert not math.isfinite(norm)
        return False
    in_fp32 = torch.stack([grad.float().norm() for grad in grads]).norm().item() / scale
    assert abs(own - norm) <= limit(1e-6, abs(in_fp32 - own) / own) * own
    coefficient = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
    for grad in grads:
        grad.mul_(coefficient / scale)
    return True


# What is compared rounds as often as the plain computation, in another order: of two such orders one is rarely so many
# times as far from the truth as the other.
_ORDERS_APART = 8


def limit(least: float, rounding: float) -> float:
    """Return how far a result in fp32 may be from a plain one whose own distance from the truth is `rounding`.

    The distance is that of the plain computation in fp32 and in fp64. It depends on the processor, on whose widths and
    threads the order of sums does, so that no number fits all. least: what is allowed wherever rounding is less.
    """
    return max(least, _ORDERS_APART * rounding)


def check_fp32(found: Trajectory, case: Case) -> Trajectory:
    """Compare a run in fp32 with the plain loop, which is returned."""
    plain, exact = train_fp32(case), train_fp32(case, dtype=torch.float64)
    assert worst_relative(found.losses, plain.losses) <= limit(1e-6, worst_relative(plain.losses, exact.losses))
    assert weight_distance(found.weights, plain.weights) <= limit(1e-6, weight_distance(plain.weights, exact.weights))
    return plain


def worst_relative(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two series; NaN where one is."""
    return largest(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def largest(values: Iterable[float]) -> float:
    """Return the largest value; NaN, which `max` may pass over, where there is one."""
    return max(values, key=lambda value: (math.isnan(value), value))


def weight_distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative 2-norm distance of any weight; NaN where one is.

    Of whole parameters: Adam makes steps of rounding where an element's gradient is nothing else.
    """
    assert found.keys() == expected.keys()
    differences = torch.stack([(found[name].double() - expected[name].double()).norm() for name in expected])
    sizes = torch.stack([expected[name].double().norm() for name in expected])
    distances = torch.where(differences == 0, 0.0, differences / sizes)  # a bias that is still all zeros has no size
    return distances.max().item()
