"""A kernel that computes wrongly is refused at start, on every rank, and the right ones are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from harness.logs import logged
from harness.train.ranks import run_on_ranks
from harness.train.shards import full_shard
from harness.train.spans import RULES
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from launcher.comm.buffers import BufferPool
from launcher.comm.groups import world_group
from launcher.engine.optimizer_plan import verified_kernel
from launcher.kernels.api import Adagrad, Adam, DeviceScale, GradScale, Kernel, Lamb, Lion, Rule, Sgd, Span
from launcher.kernels.check import SpanTypes, edits_problem, norm_problem, update_problem
from launcher.kernels.reference import ReferenceKernel
from launcher.kernels.select import kernel_for
from launcher.kernels.triton_kernels import take_edits
from launcher.optim.factory import OptimizerBackend, plan_from_config

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
EXAMPLES: dict[type[Rule], Rule] = {
    Adam: Adam(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=2),
    Adagrad: Adagrad(lr=0.01, eps=1e-8, weight_decay=0.1, lr_decay=0.0, step=2),
    Lion: Lion(lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1),
    Sgd: Sgd(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, is_nesterov=False, is_first=False),
    Lamb: Lamb(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, step=2),
}
TYPES = [
    SpanTypes(),
    SpanTypes(param=torch.bfloat16),
    SpanTypes(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    SpanTypes(grad=torch.float16, param=torch.float16),
]


class IgnoresScale(ReferenceKernel):
    name = "a kernel that ignores the scale"

    def update(self, spans: Sequence[Span], grad_scale: GradScale = 1.0) -> None:
        factor = 2.0 if isinstance(grad_scale, float) else DeviceScale(grad_scale.factor * 2, grad_scale.skip)
        super().update(spans, factor)


class NeverSkips(ReferenceKernel):
    def update(self, spans: Sequence[Span], grad_scale: GradScale = 1.0) -> None:
        super().update(spans, float(grad_scale.factor) if isinstance(grad_scale, DeviceScale) else grad_scale)


class MissesTheLast(ReferenceKernel):
    """Leaves out the last element of each span, and one in the sums."""

    def update(self, spans: Sequence[Span], grad_scale: GradScale = 1.0) -> None:
        before = [span.master[-1].clone() for span in spans]
        super().update(spans, grad_scale)
        for span, value in zip(spans, before, strict=True):
            span.master[-1] = value

    def sum_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        return super().sum_of_squares([grad[:-1] for grad in grads])


class CompilationError(Exception):
    """Like Triton's, which is no RuntimeError."""


class DoesNotCompile(ReferenceKernel):
    name = "a kernel that does not compile"

    def update(self, spans: Sequence[Span], grad_scale: GradScale = 1.0) -> None:
        raise CompilationError("no ptxas\nin sight")


def problem(kernel: Kernel, rule: Rule, types: SpanTypes) -> str | None:
    return update_problem(kernel, rule, len(rule.STATES), types, CPU)


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_right_kernels_pass(kind: type[Rule], types: SpanTypes) -> None:
    for kernel in (ReferenceKernel(), kernel_for("cpu")):
        if kernel is not None:
            assert problem(kernel, EXAMPLES[kind], types) is None
            assert norm_problem(kernel, CPU) is None


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_wrong_kernels_do_not(kind: type[Rule], types: SpanTypes) -> None:
    if kind not in (Lion, Lamb):  # where the size of a gradient hardly matters, or only in the first pass
        assert "computes other steps than the reference" in str(problem(IgnoresScale(), EXAMPLES[kind], types))
    assert "in a step that is to be skipped" in str(problem(NeverSkips(), EXAMPLES[kind], types))
    assert "computes other steps" in str(problem(MissesTheLast(), EXAMPLES[kind], types))
    assert "computes another norm" in str(norm_problem(MissesTheLast(), CPU))


def _chosen(rank: int, world_size: int) -> tuple[list[bool], list[str]]:
    """Offer good kernels, bad ones, and one that is bad on rank 1 only."""
    plan = plan_from_config("Lion", {}, nn.Linear(1, 1), None)
    shards, group = [full_shard(torch.ones(8))], world_group()
    offers: list[Kernel] = [ReferenceKernel(), DoesNotCompile(), IgnoresScale() if rank else ReferenceKernel()]
    plan_adam = plan_from_config("AdamW", {}, nn.Linear(1, 1), None)
    with logged() as lines:
        found = [verified_kernel(kernel, plan, shards, torch.float32, group) is kernel for kernel in offers[:2]]
        found.append(verified_kernel(offers[2], plan_adam, shards, torch.float32, group) is offers[2])
    return found, lines


def test_all_ranks_refuse_together_and_rank_0_says_why() -> None:
    (first, said), (second, silent) = run_on_ranks(2, _chosen)
    assert first == second == [True, False, False]
    assert silent == []
    assert said == [
        "the kernel a kernel that does not compile does not run here: no ptxas: it is not used, torch updates the"
        " parameters",
        "the kernel torch reference is missing or computes other steps than the reference on 1 other ranks: it is not"
        " used, torch updates the parameters",
    ]


def test_a_kernel_serves_where_all_is_in_fp32_too() -> None:
    """torch's fused AdamW on GPUs writes each gradient back, unscaled, where it is given a scale."""
    with FakeTensorMode():
        shard = full_shard(torch.ones(8, device="cuda"))
        backend = OptimizerBackend({"cuda": ReferenceKernel()}, BufferPool(shard.master.device))
        built = plan_from_config("AdamW", {}, nn.Linear(1, 1), None).build([shard], backend)
    assert built.label == "AdamW[torch reference]"


def _takes_all(master: Tensor, values: Tensor) -> None:
    master.copy_(values)


def _takes_nothing(master: Tensor, values: Tensor) -> None:
    pass


def _takes_edits(master: Tensor, values: Tensor) -> None:
    master.copy_(torch.where(values != master.to(values.dtype), values.float(), master))


def test_what_takes_edits_over_is_compared_with_torch() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert edits_problem(_takes_edits, dtype, CPU) is None
        for wrong in (_takes_all, _takes_nothing):
            assert edits_problem(wrong, dtype, CPU) == "takes over other values than torch"


def test_edits_are_taken_over_on_the_device_of_the_kernel_alone() -> None:
    master = torch.zeros(3)
    assert not take_edits(master, torch.ones(3).bfloat16())
    assert master.tolist() == [0.0] * 3
