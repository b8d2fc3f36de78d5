"""The GPT that the steps train, a plain loop as the truth, and the same training through the engine."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import ROOT
from harness.ports import free_port
from harness.train.parity import DTYPES, Case, micro_batches
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(ROOT / "examples"))
from train_gpt import GPT, VOCABULARY_SIZE, GPTConfig

Recompute = Callable[..., Tensor]  # as `torch.utils.checkpoint.checkpoint`
_SAME_ON_ALL_DEVICES_NUMEL = 20_000_000


@dataclass(frozen=True)
class Size:
    """The shape of a model."""

    config: GPTConfig
    vocabulary: int = 50304

    @functools.cached_property
    def numel(self) -> int:
        """Its parameters."""
        with torch.device("meta"):
            return sum(param.numel() for param in Model(self).parameters())

    def flops_a_token(self) -> float:
        """Return FLOPs of forward and backward: PaLM (Chowdhery et al. 2022), appendix B; no mask is taken off."""
        layers, width = self.config.num_layers, self.config.hidden_size
        products = layers * 12 * width**2 + self.vocabulary * width
        return 6.0 * products + 12.0 * layers * width * self.config.context


SIZES = {
    "tiny": Size(GPTConfig(4, 64, 4, 32), VOCABULARY_SIZE),
    "22m": Size(GPTConfig(12, 384, 12, 256), 512),
    "350m": Size(GPTConfig(24, 1024, 16, 1024)),
    "1.3b": Size(GPTConfig(24, 2048, 16, 1024)),
    "6.7b": Size(GPTConfig(32, 4096, 32, 1024)),
    "13b": Size(GPTConfig(40, 5120, 40, 1024)),
}


class Model(GPT):
    """The GPT of the example with a vocabulary of any size, whose blocks are recomputed on request."""

    def __init__(self, size: Size, recompute: Recompute | None = None) -> None:
        super().__init__(size.config)
        self.recompute = recompute
        if size.vocabulary != VOCABULARY_SIZE:
            self.token_embedding = nn.Embedding(size.vocabulary, size.config.hidden_size)
            nn.init.normal_(self.token_embedding.weight, std=0.02)
            self.head = nn.Linear(size.config.hidden_size, size.vocabulary, bias=False)
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens, targets: int64 [batch, time]. Returns the mean loss, fp32."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden) if self.recompute is None else self.recompute(block, hidden)
        logits = self.head(self.norm(hidden))
        assert targets is not None
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build(
    size: Size,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    recompute: Recompute | None = None,
) -> Model:
    """Return the model of a size; a small one has the same weights on every device."""
    torch.manual_seed(7)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cpu" if size.numel < _SAME_ON_ALL_DEVICES_NUMEL else device):
            model = Model(size, recompute)
    finally:
        torch.set_default_dtype(before)
    return model.to(device)


STAGE_3 = {
    "stage3_param_persistence_threshold": 100,
    "stage3_prefetch_bucket_size": 60_000,
    "stage3_max_reuse_distance": 100_000,
}


def case_of(
    precision: str,
    stage: int = 0,
    zero: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    accumulation: int = 1,
    clipping: float = 0.5,
) -> Case:
    """Return a run of ten steps in units that are a part of the small model each."""
    return Case(
        stage,
        precision,
        accumulation,
        num_steps=10,
        clipping=clipping,
        unit_numel=60_000,
        fp16={"loss_scale": 1024},
        settings=settings or {},
        zero=(STAGE_3 if stage == 3 else {}) | (zero or {}),
    )


@dataclass
class Run:
    """What two runs are compared by."""

    losses: list[float]
    weights: dict[str, Tensor]  # fp32 masters, whole, in host memory


def train_plain(case: Case, device: str, world_size: int = 1) -> Run:
    """Train without an engine: fp32 masters beside the model; the mean over ranks is that over parts of the batch."""
    model = build(SIZES["tiny"], device).to(DTYPES[case.precision])
    params = list(model.parameters())
    masters = [param.detach().float().clone() for param in params]
    optimizer = torch.optim.AdamW(masters, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=False, fused=False)
    scale = float(case.fp16["loss_scale"]) if case.precision == "fp16" else 1.0
    losses = []
    for number, step in enumerate(micro_batches(case)):
        optimizer.param_groups[0]["lr"] = case.learning_rate(number)
        sums, total = [torch.zeros_like(master) for master in masters], 0.0
        for tokens, targets in step:
            for part, target in zip(tokens.chunk(world_size), targets.chunk(world_size), strict=True):
                loss = model(part.to(device), target.to(device))
                grads = torch.autograd.grad(loss / case.accumulation * scale, params)
                for each, grad in zip(sums, grads, strict=True):
                    each.add_(grad.float(), alpha=1.0 / world_size)
                total += loss.item() / world_size / case.accumulation
        norm = math.sqrt(sum(each.double().square().sum().item() for each in sums)) / scale
        factor = (min(1.0, case.clipping / (norm + 1e-6)) if case.clipping else 1.0) / scale
        for master, each in zip(masters, sums, strict=True):
            master.grad = each.mul_(factor)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
        losses.append(total)
    names = [name for name, _ in model.named_parameters()]
    return Run(losses, {name: master.detach().cpu() for name, master in zip(names, masters, strict=True)})


def start(case: Case, world_size: int = 1, recompute: Recompute | None = None) -> Any:
    """Return an engine around the small model. Every rank must call it."""
    import launcher

    return launcher.initialize(model=build(SIZES["tiny"], "cpu", recompute=recompute), config=case.config(world_size))[
        0
    ]


def train_engine(engine: Any, case: Case, first: int = 0, last: int | None = None) -> Run:
    """Train through an engine, steps `first` to `last`. Every rank must call it; each returns the same."""
    from launcher.zero.access import safe_get_full_fp32_param

    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    part = slice(rank * case.batch // world_size, (rank + 1) * case.batch // world_size)
    steps = []
    for step in micro_batches(case)[first:last]:
        losses = []
        for tokens, targets in step:
            loss = engine(tokens[part].to(engine.device), targets[part].to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().float())
        steps.append(torch.stack(losses).mean())
    losses_of_ranks: list[Any] = [torch.stack(steps).tolist()]
    if world_size > 1:
        losses_of_ranks *= world_size
        dist.all_gather_object(losses_of_ranks, losses_of_ranks[0])
    weights = {}
    for name, param in engine.module.named_parameters():
        weight = safe_get_full_fp32_param(param)
        assert weight is not None, name
        weights[name] = weight.cpu()
    return Run(torch.tensor(losses_of_ranks, dtype=torch.float64).mean(0).tolist(), weights)


def trained(case: Case, world_size: int = 1, recompute: Recompute | None = None) -> Run:
    """Train through an engine of its own, which ends."""
    engine = start(case, world_size, recompute)
    run = train_engine(engine, case)
    engine.destroy()
    return run


def distance(found: Run, expected: Run) -> float:
    """Return how far all weights are apart, relative to their 2-norm; 0: they have the same bits.

    Not by parameter: where a gradient is rounding alone, as of the biases of keys, Adam makes whole steps of it.
    """
    pairs = [(found.weights[name].double(), weight.double()) for name, weight in expected.weights.items()]
    apart = sum(float((one - other).square().sum()) for one, other in pairs)
    return math.sqrt(apart / sum(float(other.square().sum()) for _, other in pairs))


@contextlib.contextmanager
def same_bits(device: str) -> Iterator[None]:
    """Have kernels that give the same bits in every run. cuBLAS reads $CUBLAS_WORKSPACE_CONFIG when it starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    if device != "cuda":
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.backends.cuda.matmul.allow_tf32 = False
    with sdpa_kernel(SDPBackend.MATH):
        yield


def alone_in_a_group() -> None:
    """Start a process group of this process alone, as `launch --num_gpus 1` does: by NCCL on a GPU."""
    import launcher

    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(rank, MASTER_PORT=str(free_port()))
    launcher.init_distributed()
