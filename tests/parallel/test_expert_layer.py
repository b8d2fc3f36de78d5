"""`launcher.moe.MoE` on one process: who gets which expert, what is dropped, the balance loss, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness.train.mixtures import EXPERTS, WIDTH, Expert
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn

import launcher
from launcher.base.errors import EngineError
from launcher.moe import MoE, is_moe_param
from launcher.parallel.expert.gating import GateOptions, Routing, route
from launcher.parallel.expert.placement import placement_of


def _logits(num_tokens: int = 40, num_experts: int = EXPERTS) -> Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(5))


def _routing(k: int, capacity: int | None, *, is_training: bool = True, **options: Any) -> Routing:
    given = GateOptions(k, **{"use_rts": False, "top2_2nd_expert_sampling": False, **options})
    return route(_logits(), given, capacity=capacity, used=None, is_training=is_training)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_without_a_capacity_a_token_gets_its_best_experts(k: int) -> None:
    found = _routing(k, None, drop_tokens=False)
    gates = _logits().softmax(1)
    best = gates.topk(k, dim=1)
    assert torch.equal(found.experts.sort(1).values, best.indices.sort(1).values)
    wanted = best.values if k == 1 else best.values / best.values.sum(1, keepdim=True)
    torch.testing.assert_close(found.weights.sort(1).values, wanted.sort(1).values)
    assert torch.equal(found.counts, torch.bincount(best.indices.reshape(-1), minlength=EXPERTS))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_an_expert_takes_what_its_capacity_says_and_no_place_is_given_twice(k: int) -> None:
    capacity = 6
    found, everything = _routing(k, capacity), _routing(k, None, drop_tokens=False)
    kept = found.experts >= 0
    for expert in range(EXPERTS):
        places = found.places[found.experts == expert].tolist()
        assert sorted(places) == list(range(min(capacity, int(everything.counts[expert]))))
    assert torch.equal(found.experts[kept], everything.experts[kept])
    assert torch.equal(found.counts, everything.counts)  # before any is dropped
    assert (found.weights[~kept] == 0).all()


def test_who_is_dropped() -> None:
    wanted = _logits().argmax(1)
    of_first = (wanted == 0).nonzero()[:, 0]
    by_place = _routing(1, 3).experts[:, 0]
    assert torch.equal((by_place == 0).nonzero()[:, 0], of_first[:3])
    torch.manual_seed(1)
    drawn = {tuple((_routing(1, 3, use_rts=True).experts[:, 0] == 0).nonzero()[:, 0].tolist()) for _ in range(8)}
    assert len(drawn) > 1
    assert all(set(each) <= set(of_first.tolist()) and len(each) == 3 for each in drawn)
    by_probability, gates = _routing(3, 3), _logits().softmax(1)
    chosen = (_routing(3, None, drop_tokens=False).experts == 0).any(1)
    best = gates[:, 0].masked_fill(~chosen, -1).topk(3).indices
    assert set((by_probability.experts == 0).any(1).nonzero()[:, 0].tolist()) == set(best.tolist())


def test_the_balance_loss() -> None:
    gates = _logits().softmax(1)
    load = torch.bincount(gates.argmax(1), minlength=EXPERTS) / len(gates)
    for k in (1, 2):
        torch.testing.assert_close(_routing(k, 6).balance_loss, (gates.mean(0) * load).sum() * EXPERTS)
    of_three = torch.bincount(gates.topk(3).indices.reshape(-1), minlength=EXPERTS) / len(gates)
    torch.testing.assert_close(_routing(3, 6).balance_loss, (gates.mean(0) * of_three).sum() * EXPERTS / 3)
    even = route(torch.zeros(8, 4), GateOptions(1), capacity=None, used=None, is_training=False)
    assert float(even.balance_loss) == pytest.approx(1.0)


def test_noise_is_for_training() -> None:
    for k, options in ((1, {"noisy_gate_policy": "RSample"}), (2, {"top2_2nd_expert_sampling": True})):
        torch.manual_seed(0)
        noisy = {tuple(_routing(k, None, drop_tokens=False, **options).experts[:, -1].tolist()) for _ in range(4)}
        assert len(noisy) > 1
        quiet = [_routing(k, None, is_training=False, drop_tokens=False, **options).experts for _ in range(2)]
        assert torch.equal(quiet[0], quiet[1])
    layer = MoE(WIDTH, Expert(), num_experts=EXPERTS, noisy_gate_policy="Jitter", capacity_factor=4.0)
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(2))
    assert not torch.equal(layer(x)[1], layer(x)[1])
    layer.eval()
    assert torch.equal(layer(x)[1], layer(x)[1])


def test_capacities() -> None:
    options = GateOptions(2, 1.25, 2.0, 4)
    assert options.capacity(40, 8, is_training=True) == math.ceil(40 / 8 * 1.25 * 2)
    assert options.capacity(40, 8, is_training=False) == 20
    assert options.capacity(4, 8, is_training=True) == 4


def test_dropped_and_unused_tokens_get_nothing_of_the_mixture() -> None:
    layer = MoE(WIDTH, Expert(), num_experts=2, min_capacity=1, capacity_factor=0.2, use_rts=False)
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(4))
    output, _, counts = layer(x)
    assert int((output.reshape(10, WIDTH) != 0).any(1).sum()) == int((counts > 0).sum())  # one each
    whole = MoE(WIDTH, Expert(), num_experts=2, k=2, drop_tokens=False)
    used = torch.tensor([1, 1, 0, 1, 0] * 2)
    output, _, counts = whole(x, used)
    assert (output.reshape(10, WIDTH)[used == 0] == 0).all()
    assert int(counts.sum()) == 2 * int(used.sum())


def test_experts_that_return_a_bias_besides() -> None:
    class WithBias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return self.inner(x), None

    output, _, _ = MoE(WIDTH, WithBias(), num_experts=2, use_residual=True)(torch.ones(4, WIDTH))
    assert output.shape == (4, WIDTH)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_experts": 6, "ep_size": 4}, "4 ranks do not divide 6 experts; use one of 1, 2, 3, 6"),
        ({"num_experts": 4, "ep_size": 2}, "2 ranks of one set of experts do not divide the 1 ranks"),
        ({"num_experts": 4, "k": 5}, "cannot go to 5 of 4 experts"),
        ({"num_experts": 4, "noisy_gate_policy": "Noise"}, 'no noise "Noise"'),
        ({"use_tutel": True}, "Tutel's kernels are not supported"),
        ({"enable_expert_tensor_parallelism": True}, "not split over tensor-parallel ranks"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        MoE(WIDTH, Expert(), **arguments)


def _refused_by_the_engine(rank: int, world_size: int) -> list[str]:
    from harness.train import mixtures

    def build(model: nn.Module, **settings: Any) -> None:
        launcher.initialize(model=model, config=mixtures.config(1, 2, **settings))

    two_sizes = nn.ModuleList([MoE(WIDTH, Expert(), EXPERTS, ep_size=size) for size in (2, 1)])
    two_sizes.append(MoE(WIDTH, Expert(), EXPERTS, ep_size=2))

    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    uneven = mixtures.build("listed")
    for layer in uneven.layers:  # type: ignore[union-attr]
        layer["mlp"].experts.append(Expert())  # type: ignore[index]
    optimizer = {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}}
    mics = {"zero_optimization": {"stage": 3, "mics_shard_size": 1}}
    said = []
    for model, settings in (
        (nn.Sequential(Unknown()), {}),
        (nn.Linear(4, 4), {}),
        (mixtures.build("listed"), {"expert_parallel": {"enabled": True, "autoep_size": 2, "expert_pattern": "parts"}}),
        (mixtures.build("listed"), {"expert_parallel": {"enabled": True, "autoep_size": 4}}),
        (uneven, {}),
        (mixtures.build("listed"), optimizer),
        (mixtures.build("listed"), mics),
        (mixtures.build("listed"), {"tensor_parallel": {"autotp_size": 2}}),
    ):
        with pytest.raises(launcher.base.errors.LauncherError) as error:
            build(model, **settings)
        said.append(str(error.value))
    launcher.initialize(model=two_sizes, config=mixtures.config(1, 0))[0].destroy()
    return said


def test_models_and_settings_that_the_engine_refuses() -> None:
    for said in run_on_ranks(2, _refused_by_the_engine):
        for text, words in zip(
            said,
            (
                "0.experts: the experts of Unknown cannot be sharded: how it runs them is not known",
                "the model has no mixture of experts",
                "the experts of MixtralSparseMoeBlock cannot be sharded",
                "4 ranks of one set of experts do not divide the data axis: 2 (data) = 2 ranks; use 1 or 2",
                "2 ranks do not divide the 5 experts of layers.0.mlp.experts; use one of 1, 5",
                "Lamb needs all ranks to have the same parameters, and experts are sharded",
                "mics_shard_size is for data parallelism alone",
                "experts are sharded over ranks of the data axis alone, and this run has 1 (data) × 2 (tensor) = 2",
            ),
            strict=True,
        ):
            assert words in text


class _Scaled(Expert):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))


def _buffers(rank: int, world_size: int) -> dict[str, float]:
    layer = MoE(WIDTH, _Scaled(), num_experts=4, ep_size=2)
    for name, buffer in layer.named_buffers():  # other values on each rank, and for each expert
        buffer.fill_(100 * rank + int(next(part for part in name.split(".") if part.isdigit())))
    model = nn.Sequential(layer)
    model.register_buffer("shared", torch.full((1,), float(rank)))
    engine, _, _, _ = launcher.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})
    return {name.removeprefix("0.deepspeed_moe."): value.item() for name, value in engine.module.named_buffers()}


def test_buffers_of_experts_are_those_of_the_first_rank_with_the_same_experts() -> None:
    found = run_on_ranks(4, _buffers)
    for rank, buffers in enumerate(found):
        first = rank % 2  # ranks 0 and 2 have experts 0 and 1
        own = {number: value for name, value in buffers.items() for number in name.split(".") if number.isdigit()}
        assert own == {str(number): 100 * first + number for number in (2 * first, 2 * first + 1)}
        assert buffers["shared"] == 0


def _num_runtimes(rank: int, world_size: int) -> int:
    layers = [MoE(WIDTH, Expert(), num_experts=4, ep_size=size) for size in (2, 2, 1, 1)]
    placements = [placement_of(layer.deepspeed_moe.experts.deepspeed_experts) for layer in layers]
    return len({id(found.group.runtime) for found in placements if found is not None})


def test_layers_share_the_streams_of_their_device() -> None:
    assert run_on_ranks(2, _num_runtimes) == [1, 1]


def _listed(rank: int, world_size: int) -> dict[str, Any]:
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4, ep_size=2)
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    own = {name: torch.full_like(value, 10 * rank) for name, value in nn.Linear(WIDTH, WIDTH).state_dict().items()}
    by_place = {f"{place}.{name}": value + place for place in range(2) for name, value in own.items()}
    missing = experts.load_state_dict(by_place, strict=True)
    loaded = [float(expert.bias[0].detach()) for expert in experts]
    names = sorted({name.split(".")[0] for name, _ in experts.named_parameters()})
    whole = {f"{number}.{name}": torch.full_like(value, number) for number in range(4) for name, value in own.items()}
    experts.load_state_dict(whole, strict=True)
    experts[-1] = nn.Linear(WIDTH, WIDTH)
    for change in (experts.append, experts.extend, lambda new: experts.insert(0, new), lambda _: experts.pop(0)):
        with pytest.raises(EngineError, match="keeps the number of its experts"):
            change(nn.Linear(WIDTH, WIDTH))
    return {
        "lengths": (len(experts), len(list(experts)), len(experts[:1]), len(missing.missing_keys)),
        "loaded": loaded,
        "names": names,
        "of the whole": float(experts[0].bias[0].detach()),
        "are experts": all(is_moe_param(param) for param in experts.parameters()),
    }


def test_the_list_has_the_rank_s_own_experts_and_loads_them_by_place_or_by_number() -> None:
    for rank, found in enumerate(run_on_ranks(2, _listed)):
        assert found == {
            "lengths": (2, 2, 1, 0),
            "loaded": [10 * rank, 10 * rank + 1],
            "names": [str(2 * rank), str(2 * rank + 1)],
            "of the whole": 2 * rank,
            "are experts": True,
        }
