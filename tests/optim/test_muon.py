"""Muon under every stage and world size is the algorithm of a plain loop over whole matrices on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.logs import logged
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import launcher
from launcher.base.errors import ConfigError, EngineError
from launcher.comm import observe
from launcher.config.load import load_config
from launcher.optim.muon import matrices
from launcher.optim.muon.muon import Iteration, Muon, orthogonalized
from launcher.optim.muon.plan import hidden_matrices
from launcher.zero.tiling import tile_large_layers

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLES, STEPS, TOKENS = 8, 4, 11
WIDE, NARROW = 36, 20
PARAMS = {"lr": 0.02, "adam_lr": 3e-3, "weight_decay": 0.1}
needs_torch_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")


class Net(nn.Module):
    """Matrices of every form, a convolution, and what Muon leaves to AdamW; one part is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, NARROW)
        self.conv = nn.Conv1d(NARROW, WIDE, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))
        self.down = nn.Linear(WIDE, NARROW)
        self.norm = nn.LayerNorm(NARROW)
        self.spare = nn.Linear(NARROW, NARROW)
        self.lm_head = nn.Linear(NARROW, TOKENS)
        self.uses_spare = True

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(self.tokens(x[:, :-1]).mT)).mT
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        h = self.norm(self.down(h))
        if self.uses_spare:
            h = h + self.spare(h)
        return F.cross_entropy(self.lm_head(h).float().flatten(0, 1), x[:, 1:].flatten())


def make_net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(TOKENS, (SAMPLES, 6), generator=generator) for _ in range(STEPS)]


def is_matrix(name: str) -> bool:
    return name.endswith("weight") and name.split(".")[0] in ("conv", "blocks", "down", "spare")


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """As torch users write them: each says `use_muon`; two rates of matrices inside one block."""
    matrices = [param for name, param in model.named_parameters() if is_matrix(name)]
    rest = [param for name, param in model.named_parameters() if not is_matrix(name)]
    return [
        {"params": matrices[::2], "use_muon": True, "lr": 0.05, "weight_decay": 0.0},
        {"params": matrices[1::2], "use_muon": True, "momentum": 0.8},
        {"params": rest, "use_muon": False, "betas": (0.8, 0.9)},
    ]


class Plain:
    """The write-up's algorithm, https://kellerjordan.github.io/posts/muon/, parameter by parameter."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        self.groups = list(groups)
        self.states: dict[Tensor, Any] = {}
        self.steps: dict[Tensor, int] = {}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.steps[param] = self.steps.get(param, 0) + 1
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.sub_(group["lr"] * (self.muon if group["use_muon"] else self.adam)(param, group))
                    param.grad = None

    def muon(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        momentum, grad = self.states.get(param, torch.zeros_like(param)), param.grad
        momentum = group["momentum"] * momentum + (1 - group["momentum"]) * grad
        self.states[param] = momentum
        x = ((1 - group["momentum"]) * grad + group["momentum"] * momentum).reshape(len(param), -1)
        rows, columns = x.shape
        x = x / x.norm()
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
        return max(1.0, rows / columns) ** 0.5 * x.reshape(param.shape)

    def adam(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        first, second = self.states.get(param, (torch.zeros_like(param), torch.zeros_like(param)))
        beta1, beta2 = group["betas"]
        first, second = beta1 * first + (1 - beta1) * param.grad, beta2 * second + (1 - beta2) * param.grad**2
        self.states[param] = first, second
        n = self.steps[param]
        return first / (1 - beta1**n) / ((second / (1 - beta2**n)).sqrt() + group["eps"])


def plain_groups(model: nn.Module, grouped: bool = False) -> list[dict[str, Any]]:
    groups = groups_of(model)
    if not grouped:
        groups = [
            {"params": [*groups[0]["params"], *groups[1]["params"]], "use_muon": True},
            {"params": groups[2]["params"], "use_muon": False},
        ]
    rates = {True: {"lr": 0.02, "momentum": 0.95}, False: {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-10}}
    return [{"weight_decay": 0.1, **rates[group["use_muon"]], **group} for group in groups]


def train_plain(grouped: bool = False, max_norm: float = 0.0) -> dict[str, Tensor]:
    model = make_net()
    optimizer = Plain(plain_groups(model, grouped))
    for step, x in enumerate(data()):
        model.uses_spare = step % 2 == 0
        model(x).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return dict(model.state_dict())


def start(rank: int, world_size: int, stage: int, **more: Any) -> Any:
    model = more.pop("model", None) or make_net()
    parameters = groups_of(model) if more.pop("grouped", False) else None
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Muon", "params": {**PARAMS, **more.pop("params", {})}},
        "zero_optimization": zero,
        **more,
    }
    return launcher.initialize(model=model, model_parameters=parameters, config=config)[0]


def run(engine: Any, rank: int, world_size: int, steps: range = range(STEPS)) -> None:
    part = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    for step in steps:
        engine.module.uses_spare = step % 2 == 0
        engine.backward(engine(data()[step][part]))
        engine.step()


def train(rank: int, world_size: int, stage: int, more: dict[str, Any]) -> dict[str, Tensor]:
    engine = start(rank, world_size, stage, **more)
    run(engine, rank, world_size)
    return {name: value.float() for name, value in engine.state_dict().items()}


def assert_equal(found: list[dict[str, Tensor]], expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    for weights in found:
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance, msg=name)


# ---- parity ----


# Each two of them together, and all three in the soak.
SETTINGS = [
    pytest.param(method, world_size, stage, marks=pytest.mark.soak if (is_gram + place + stage) % 2 else [])
    for is_gram, method in enumerate(("standard", "gram"))
    for place, world_size in enumerate((1, 2, 4))
    for stage in (0, 1, 2, 3)
]


@pytest.mark.parametrize(("method", "world_size", "stage"), SETTINGS)
def test_weights_are_the_plain_loops(world_size: int, stage: int, method: str) -> None:
    found = run_on_ranks(world_size, train, stage, {"params": {"ns_method": method}})
    assert_equal(found, train_plain())
    for weights in found[1:]:  # of one sum of gradients, whoever orthogonalised
        assert all(torch.equal(weights[name], value) for name, value in found[0].items())


@pytest.mark.parametrize("stage", [0, 3])
def test_groups_have_their_own_options(stage: int) -> None:
    assert_equal(run_on_ranks(2, train, stage, {"grouped": True}), train_plain(grouped=True))


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_are_clipped(stage: int) -> None:
    """Momentum averages gradients: clipping some steps and not others changes its direction."""
    expected = train_plain(max_norm=0.8)
    assert not torch.allclose(expected["down.weight"], train_plain()["down.weight"], atol=1e-3)
    assert_equal(run_on_ranks(2, train, stage, {"gradient_clipping": 0.8}), expected)


def test_bf16_with_fp32_masters() -> None:
    """Alone as a plain loop over fp32 copies; sharded over ranks as whole on ranks.

    The loop takes 3 steps: masters that differ in the last place soon round to other bf16 weights.
    """
    model = make_net(torch.bfloat16)
    copies = make_net(torch.bfloat16).float()
    optimizer = Plain(plain_groups(copies))
    for step, x in enumerate(data()[:3]):
        model.uses_spare = step % 2 == 0
        model(x).backward()
        for param, master in zip(model.parameters(), copies.parameters(), strict=True):
            master.grad, param.grad = None if param.grad is None else param.grad.float(), None
        optimizer.step()
        model.load_state_dict(copies.state_dict())
    assert_equal(run_on_ranks(1, masters, 1, 3), dict(copies.named_parameters()))
    expected = run_on_ranks(2, masters, 0, STEPS)
    for stage in (1, 2, 3):
        assert_equal(run_on_ranks(2, masters, stage, STEPS), expected[0])


def masters(rank: int, world_size: int, stage: int, num_steps: int) -> dict[str, Tensor]:
    engine = start(rank, world_size, stage, model=make_net(torch.bfloat16), bf16={"enabled": True})
    run(engine, rank, world_size, range(num_steps))
    named = engine.module.named_parameters()
    return {name: launcher.zero.safe_get_full_fp32_param(param) for name, param in named}


@pytest.mark.parametrize(
    ("stage", "key"),
    [(1, "offload_optimizer"), (2, "offload_optimizer"), (3, "offload_optimizer"), (3, "offload_param")],
)
def test_offload_goes_unit_by_unit(stage: int, key: str) -> None:
    assert_equal(run_on_ranks(2, train, stage, {"zero": {key: {"device": "cpu"}}}), train_plain())


@pytest.mark.parametrize("stays", [False, True])
def test_from_disk_momentum_may_stay_in_memory(tmp_path: Path, stays: bool) -> None:
    zero = {
        "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
        "save_muon_momentum_buffer_in_memory": stays,
    }
    for weights, in_memory in run_on_ranks(2, train_and_look, zero):
        assert_equal([weights], train_plain())
        assert in_memory == {("momentum_buffer", stays), ("exp_avg", False), ("exp_avg_sq", False)}


def train_and_look(rank: int, world_size: int, zero: dict[str, Any]) -> tuple[dict[str, Tensor], set[tuple[str, bool]]]:
    """Return the weights, and whether states have memory between steps."""
    engine = start(rank, world_size, 3, zero=zero)
    run(engine, rank, world_size)
    flat = engine.optimizer.flat
    last = flat.shards[-1].unit  # its states may still be on their way
    states = [item for shard in flat.shards if shard.unit != last for item in shard.state.items() if item[0] != "step"]
    in_memory = {(name, state.untyped_storage().nbytes() > 0) for name, state in states}
    return engine.state_dict(), in_memory


@pytest.mark.parametrize("stage", [0, 1])
def test_many_exchanges_are_as_one(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    whole, cut = (run_on_ranks(2, train_in_batches, stage, numel) for numel in (2**25, 100))
    for a, b in zip(whole, cut, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def train_in_batches(rank: int, world_size: int, stage: int, numel: int) -> dict[str, Tensor]:
    before = matrices.BATCH_NUMEL, matrices.REPLICATED_BATCH_NUMEL
    matrices.BATCH_NUMEL = matrices.REPLICATED_BATCH_NUMEL = numel
    try:
        return train(rank, world_size, stage, {})
    finally:
        matrices.BATCH_NUMEL, matrices.REPLICATED_BATCH_NUMEL = before


# ---- what travels, what is kept ----


def test_a_rank_sends_parts_and_updates_and_no_more() -> None:
    """At stage 0 each update to the other rank; from 1 on what its worker does not own of a matrix, both ways."""
    in_matrices = sum(param.numel() for name, param in make_net().named_parameters() if is_matrix(name))
    assert sum(run_on_ranks(2, sent_by_muon, 0)) == 4 * in_matrices
    assert 0 < sum(run_on_ranks(2, sent_by_muon, 1)) < 4 * in_matrices


def sent_by_muon(rank: int, world_size: int, stage: int) -> int:
    engine = start(rank, world_size, stage)
    engine.backward(engine(data()[0][: SAMPLES // world_size]))
    flat = engine.optimizer.flat
    before = observe.sent_bytes()
    flat.step()
    return observe.sent_bytes() - before


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_matrix_has_one_state_and_the_rest_two(stage: int) -> None:
    states, numels = zip(*run_on_ranks(2, kept_states, stage), strict=True)
    expected = sum((1 if is_matrix(name) else 2) * param.numel() for name, param in make_net().named_parameters())
    assert sum(numels) == expected * (2 if stage == 0 else 1)
    assert states[0] == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}


def kept_states(rank: int, world_size: int, stage: int) -> tuple[set[str], int]:
    engine = start(rank, world_size, stage)
    run(engine, rank, world_size, range(1))
    flat = engine.optimizer.flat
    states = flat.state_dict()["states"]
    return {name for pieces in states.values() for piece in pieces for name in piece["state"]}, flat.state_numel()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_state_continues_where_it_was(stage: int) -> None:
    for whole, continued in run_on_ranks(2, interrupted, stage):
        assert all(torch.equal(whole[name], continued[name]) for name in whole)


def interrupted(rank: int, world_size: int, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = start(rank, world_size, stage)
    run(engine, rank, world_size, range(3))
    weights, state = engine.state_dict(), copy.deepcopy(engine.optimizer.state_dict())
    run(engine, rank, world_size, range(3, STEPS))
    whole = engine.state_dict()
    model = make_net()
    model.load_state_dict({name: value.clone() for name, value in weights.items()})
    other = start(rank, world_size, stage, model=model)
    other.optimizer.load_state_dict(state)
    run(other, rank, world_size, range(3, STEPS))
    return whole, other.state_dict()


# ---- which parameters ----


def test_hidden_matrices_are_muons_unless_the_parameter_says_otherwise() -> None:
    model = make_net()
    model.down.weight.use_muon = False  # type: ignore[assignment]
    model.lm_head.weight.use_muon = True  # type: ignore[assignment]
    model.conv.weight.requires_grad_(False)
    with logged() as lines:
        engine = start(0, 1, 1, model=model)
    names = {param: name for name, param in model.named_parameters()}
    of_muon = {names[param] for param in engine.optimizer.param_groups[0]["params"] if param.requires_grad}
    assert of_muon == {"blocks.0.weight", "blocks.1.weight", "spare.weight", "lm_head.weight"}
    assert any(
        "Muon updates 4 matrices (3,212 elements), AdamW the other 10 parameters (1,139)" in line for line in lines
    )


def test_tiles_are_what_their_parameter_was() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(40, 8), "up": nn.Linear(8, 40), "down": nn.Linear(40, 8)})
    model["down"].weight.use_muon = False  # type: ignore[assignment]
    tile_large_layers(model, 100)
    is_muons = hidden_matrices(model)
    names = {name for name, param in model.named_parameters() if is_muons(param)}
    assert names == {f"up.tiles.{number}.weight" for number in range(len(names))}
    assert len(names) > 1


def test_zero_init_hides_no_shape() -> None:
    for names in run_on_ranks(2, names_under_init):
        assert names == {name for name, _ in make_net().named_parameters() if is_matrix(name)}


def names_under_init(rank: int, world_size: int) -> set[str]:
    with launcher.zero.Init():
        model = make_net()
    engine = start(rank, world_size, 3, model=model)
    names = {param: name for name, param in model.named_parameters()}
    return {names[param] for param in engine.optimizer.param_groups[0]["params"]}


@pytest.mark.parametrize(
    ("params", "rates"),
    [
        ({}, [0.02, 3e-4]),
        ({"lr": 0.1}, [0.1, 0.1]),
        ({"lr": 0.1, "muon_lr": 0.2}, [0.2, 0.1]),
        ({"adam_lr": 1e-3}, [0.02, 1e-3]),
    ],
)
def test_rates(params: dict[str, float], rates: list[float]) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "muon", "params": params}}
    optimizer = launcher.initialize(model=make_net(), config=config)[1]
    assert [group["lr"] for group in optimizer.param_groups] == rates


def test_what_is_no_matrix_is_refused() -> None:
    model = make_net()
    model.norm.weight.use_muon = True  # type: ignore[assignment]
    with pytest.raises(EngineError, match=r"uses Muon for a parameter of shape \(20,\), which is not a matrix"):
        start(0, 1, 1, model=model)
    with pytest.raises(EngineError, match="does not say whether Muon updates it"):
        Muon([{"params": list(model.parameters())}])
    with pytest.raises(ConfigError, match="ns_method"):
        load_config({"optimizer": {"type": "Muon", "params": {"ns_method": "svd"}}})


# ---- objects ----

CLIENTS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "ours": lambda model: Muon(plain_groups(model)),
    "torch": lambda model: torch.optim.Muon(matrices_of(model), lr=0.02, adjust_lr_fn="match_rms_adamw"),
    "torch, other options": lambda model: torch.optim.Muon(
        matrices_of(model), lr=0.02, nesterov=False, momentum=0.5, ns_steps=3, weight_decay=0.0
    ),
}


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """The matrices, and nothing else trained: torch's class takes no other parameters."""
    for name, param in model.named_parameters():
        param.requires_grad_(is_matrix(name) and param.dim() == 2)
    return [param for param in model.parameters() if param.requires_grad]


def train_client(rank: int, world_size: int, stage: int, client: str) -> dict[str, Tensor]:
    model = make_net()
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = launcher.initialize(model=model, optimizer=CLIENTS[client](model), config=config)[0]
    run(engine, rank, world_size)
    return engine.state_dict()


@needs_torch_muon
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("client", CLIENTS)
def test_client_objects(client: str, stage: int) -> None:
    """Torch's own class orthogonalises in bf16: a gradient summed in another order may round to another number."""
    model = make_net()
    optimizer = CLIENTS[client](model)
    for step, x in enumerate(data()):
        model.uses_spare = step % 2 == 0
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    tolerance = 2e-5 if client == "ours" else 4e-3
    assert_equal(run_on_ranks(2, train_client, stage, client), dict(model.state_dict()), tolerance)


# ---- the iteration ----


@pytest.mark.parametrize("shape", [(5, 5), (4, 30), (30, 4), (1, 7), (64, 200)])
@pytest.mark.parametrize("is_gram", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_come_near_1(shape: tuple[int, int], is_gram: bool, dtype: torch.dtype) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    matrix = left @ torch.diag(torch.linspace(1.0, 0.05, len(values))) @ right
    found = orthogonalized(1e-6 * matrix.to(dtype), Iteration(dtype, is_gram))
    assert found.dtype == dtype
    inner = left.T @ found.float() @ right.T
    assert inner.diagonal().min() > 0.6
    assert inner.diagonal().max() < 1.3
    assert (inner - torch.diag(inner.diagonal())).abs().max() < (1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("is_gram", [False, True])
def test_zeros_stay_zeros(is_gram: bool) -> None:
    assert not orthogonalized(torch.zeros(3, 5), Iteration(torch.float32, is_gram)).any()
