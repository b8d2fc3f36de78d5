"""Parts that scripts take from `deepspeed` by themselves: gates, tiles, optimizer classes, values and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import launcher
from launcher.base.errors import EngineError
from launcher.compat import files, gating, optimizers, tiled, ulysses, zero

TOKENS, EXPERTS = 12, 4

# ---- gates ----


def gated(k: int, logits: Tensor, *, is_sparse: bool = False, **options: Any) -> Any:
    if k == 1:
        return gating.top1gating(logits, 1.0, 0, use_rts=False, sparse_routes=is_sparse, **options)
    if k == 2:
        return gating.top2gating(logits, 1.0, 0, top2_2nd_expert_sampling=False, sparse_routes=is_sparse, **options)
    return gating.topkgating(logits, k, 1.0, 0, sparse_routes=is_sparse, **options)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_gate_that_drops_nothing_weighs_the_most_probable_experts(k: int) -> None:
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(k))
    _, weights, mask, counts = gated(k, logits, drop_tokens=False)
    values, chosen = logits.softmax(1).topk(k)
    expected = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, values if k == 1 else values / values.sum(1, True))
    torch.testing.assert_close(weights.sum(2), expected)
    assert (mask.sum(0) <= 1).all()  # no place is taken twice
    assert counts.tolist() == (expected > 0).sum(0).tolist()
    assert mask.shape[2] == counts.max()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_sparse_routes_are_the_same_ones(k: int) -> None:
    logits, x = torch.randn(TOKENS, EXPERTS), torch.randn(TOKENS, 5)
    _, weights, mask, _ = gated(k, logits)
    _, capacity, num_experts, experts, places, values, _ = gated(k, logits, is_sparse=True)
    slots = gating._route_slots(experts, places, num_experts, int(capacity))
    at_experts = gating._sparse_encode(x, slots, num_experts, int(capacity))
    torch.testing.assert_close(at_experts, torch.einsum("sec,sm->ecm", mask.float(), x))
    returned = gating._sparse_decode(at_experts.flatten(0, 1), slots, values, TOKENS)
    torch.testing.assert_close(returned, torch.einsum("sec,ecm->sm", weights, at_experts))


def test_full_experts_keep_the_largest_weights_or_the_first_tokens() -> None:
    logits = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0]])
    kept = {
        policy: gating.topkgating(logits, 1, 1.0, 0, drop_policy=policy)[2][:, 0].any(1).tolist()
        for policy in ("probs", "position")
    }
    assert kept == {"probs": [False, True, True], "position": [True, True, False]}
    with pytest.raises(ValueError, match='unknown drop_policy "last"'):
        gating.topkgating(logits, 1, 1.0, 0, drop_policy="last")


def test_a_gate_trains_its_router() -> None:
    gate = gating.TopKGate(8, EXPERTS, k=2, min_capacity=0)
    loss, weights, _, _ = gate(torch.randn(TOKENS, 8), None)
    (loss + weights.square().sum()).backward()
    assert gate.wg.weight.grad is not None
    assert gate.wg.weight.grad.abs().sum() > 0


def test_experts_have_an_equal_part_each() -> None:
    experts = gating.Experts(nn.Linear(3, 3), 2, "ep_size_1")
    x = torch.randn(1, 6, 3)
    with torch.no_grad():
        experts.deepspeed_experts[1].weight.zero_()
    torch.testing.assert_close(experts(x)[:, :3], experts.deepspeed_experts[0](x[:, :3]))
    torch.testing.assert_close(experts(x)[:, 3:], experts.deepspeed_experts[1].bias.expand(1, 3, 3))


# ---- tiles ----


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mlp, self.head, self.kind = Mlp(), nn.Linear(6, 9), kind

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).view(-1, 9), y.view(-1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.kind == "whole":
            return self.loss(self.mlp(x), y)
        if self.kind == "mlp":
            x = tiled.TiledMLP.apply(lambda mlp, part: mlp(part), self.mlp, x, 3, list(self.mlp.parameters()))
        else:
            x = tiled.sequence_tiled_compute(
                lambda x, mlp: mlp(x), 10, 3, {"x": x}, {"mlp": self.mlp}, "x", output_reduction=None
            )
        return tiled.TiledFusedLogitsLoss.apply(Model.loss, self, x, y, None, 2, [self.head.weight], "mean")


def _trained(rank: int, _world: int, kind: str, stage: int) -> list[Tensor]:
    torch.manual_seed(0)
    zero_section = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": zero_section,
        "gradient_clipping": 0.0,
    }
    engine, *_ = launcher.initialize(model=Model(kind), config=config)
    data = torch.Generator().manual_seed(rank)
    x, y = torch.randn(2, 10, 6, generator=data), torch.randint(9, (2, 10), generator=data)
    for _ in range(2):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
    with launcher.zero.GatheredParameters(engine.module.parameters()):
        return [loss.detach(), *(param.detach().clone() for param in engine.module.parameters())]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["mlp", "any"])
def test_tiles_train_as_the_whole_does(kind: str, stage: int) -> None:
    (found, _), (expected, _) = (run_on_ranks(2, _trained, each, stage) for each in (kind, "whole"))
    torch.testing.assert_close(found, expected)


def test_what_cannot_be_tiled_is_refused() -> None:
    x = torch.ones(2, 4, 3)
    with pytest.raises(ValueError, match=r"y has shape \(2, 3\)"):
        tiled.TiledFusedLogitsLoss.apply(lambda *_: x.sum(), None, x, torch.ones(2, 3), None, 2)
    with pytest.raises(EngineError, match="must have seqlen 5"):
        tiled.sequence_tiled_compute(torch.sin, 5, 2, {"input": x}, {}, "input")


def test_rotary_positions_turn_pairs_of_elements() -> None:
    angle = torch.linspace(0, 3, 10, dtype=torch.float64).view(5, 1, 2)
    x = torch.randn(5, 2, 6, dtype=torch.float64)
    tables = (torch.cat([each, each], -1) for each in (angle.cos(), angle.sin()))
    turned = ulysses.apply_rotary_pos_emb(x, *tables)
    as_complex = torch.complex(x[..., :2], x[..., 2:4]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(turned[..., :4], torch.cat([as_complex.real, as_complex.imag], -1))
    assert torch.equal(turned[..., 4:], x[..., 4:])


# ---- optimizer classes ----

CLASSES = [
    "DeepSpeedOptimizer",
    "ZeROOptimizer",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "BF16_Optimizer",
    "FP16_Optimizer",
    "FP16_UnfusedOptimizer",
]
BF16 = {"bf16": {"enabled": True}}
ADAM = {"optimizer": {"type": "AdamW", "params": {}}}


def _classes(_rank: int, _world: int, config: dict[str, Any], stage: int) -> set[str]:
    whole = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, **config}
    _, optimizer, *_ = launcher.initialize(model=nn.Linear(4, 4), config=whole)
    return {name for name in CLASSES if isinstance(optimizer, getattr(optimizers, name))}


@pytest.mark.parametrize(
    ("stage", "config", "classes"),
    [
        (0, ADAM, ""),
        (1, ADAM, "ZeROOptimizer DeepSpeedZeroOptimizer"),
        (2, ADAM | BF16, "ZeROOptimizer DeepSpeedZeroOptimizer"),
        (3, ADAM, "ZeROOptimizer DeepSpeedZeroOptimizer_Stage3"),
        (1, ADAM | BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}, "ZeROOptimizer BF16_Optimizer"),
        (0, ADAM | BF16, "FP16_Optimizer"),
        (0, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}} | BF16, "FP16_UnfusedOptimizer"),
    ],
)
def test_the_optimizer_is_of_the_class_that_deepspeed_has(stage: int, config: dict[str, Any], classes: str) -> None:
    expected = {*classes.split(), *(["DeepSpeedOptimizer"] if classes else [])}
    assert run_on_ranks(1, _classes, config, stage) == [expected]


def test_a_class_that_stands_for_the_engines_cannot_be_built() -> None:
    with pytest.raises(EngineError, match="FP16_Optimizer cannot be built by a script"):
        optimizers.FP16_Optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))


# ---- values and files ----


def test_bias_that_comes_beside_the_output_is_joined() -> None:
    class Beside(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return F.linear(x, self.weight), self.bias

    whole = nn.Linear(6, 5)
    layer = zero.TiledLinearReturnBias(6, 5, True, 2, 2, linear_cls=Beside, init_linear=whole)
    output, bias = layer(x := torch.randn(3, 6))
    torch.testing.assert_close(output + bias, whole(x))
    assert (layer.in_parts, layer.out_parts) == ([0, 3, 6], [0, 3, 5])


def test_a_step_of_muon_is_orthogonal() -> None:
    grad, momentum = torch.randn(6, 4), torch.zeros(6, 4)
    update = zero.muon_update(grad.clone(), momentum, beta=0.9)
    torch.testing.assert_close(momentum, 0.1 * grad)
    assert (torch.linalg.svdvals(update / 1.5**0.5) - 1).abs().max() < 0.35
    conv = zero.muon_update(torch.randn(4, 3, 2, 2), torch.zeros(4, 3, 2, 2))
    assert conv.shape == (4, 12)


def test_sparse_rows_add_up() -> None:
    dense = torch.zeros(5, 3)
    dense[1], dense[4] = 2.0, torch.tensor([1.0, -1.0, 0.0])  # a row whose sum is zero is not empty
    sparse = files.SparseTensor(dense)
    assert sparse.indices is not None
    assert sparse.indices.tolist() == [1, 4]
    assert sparse.sparse_size() == (8, 15)
    sparse.add(files.SparseTensor(dense.to_sparse(1)))
    torch.testing.assert_close(sparse.to_dense(), 2 * dense)
    torch.testing.assert_close(sparse.to_coo_tensor().to_dense(), 2 * dense)


def test_files_of_ranks_are_found_in_their_order(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        Path(files.get_zero_ckpt_name_for_rank(tmp_path, rank, 0)).touch()
    assert [Path(path).name.split("_")[3] for path in files.get_optim_files(tmp_path)] == ["0", "2", "10"]
    with pytest.raises(FileNotFoundError, match=r"mp_rank_00_model_states\.pt"):
        files.get_model_state_file(tmp_path, 2)
    engine = files.TorchCheckpointEngine()
    engine.save({"a": torch.ones(1)}, files.get_model_ckpt_name_for_rank(tmp_path, "00"))
    assert engine.load(files.get_model_state_file(tmp_path, 2))["a"] == 1
