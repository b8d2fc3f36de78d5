"""What a run reports about itself: times, memory, FLOPs, state, collectives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.logs import logged
from harness.scripts import write
from harness.train.forked import run_ranks
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import launcher
from launcher.base.errors import EngineError
from launcher.comm import observe
from launcher.comm.observe import bandwidths_gbps
from launcher.monitor.curves import Curves
from launcher.monitor.flops import peak_flops_of
from launcher.monitor.meters import memory_use

WIDTH, BATCH, TIME = 16, 4, 8


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).unsqueeze(1).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(query, key, value).squeeze(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attending(), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


# 2 FLOP a multiply-add; attention has two products of [TIME, WIDTH] by [WIDTH, TIME].
MIX = 2 * BATCH * TIME * WIDTH * 3 * WIDTH
ATTENTION = 2 * 2 * BATCH * TIME * TIME * WIDTH
LINEAR = 2 * BATCH * TIME * WIDTH * WIDTH
HEAD = 2 * BATCH * TIME * WIDTH * 2


def train(num_steps: int = 4, **more: Any) -> tuple[Any, list[str]]:
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": 2,
        "optimizer": {"type": "SGD", "params": {}},
        **more,
    }
    torch.manual_seed(0)
    with logged() as lines:
        engine, *_ = launcher.initialize(model=Net(), config=config)
        for _ in range(num_steps * config.get("gradient_accumulation_steps", 1)):
            engine.backward(engine(torch.ones(BATCH, TIME, WIDTH)))
            engine.step()
    return engine, lines


def test_nothing_is_said_unless_asked() -> None:
    _, lines = train()
    assert [line for line in lines if line.startswith(("time", "memory", "FLOPs", "config"))] == []
    assert observe.begin(torch.device("cpu")) is None


def test_times_of_the_phases() -> None:
    _, lines = train(wall_clock_breakdown=True)
    found = [line for line in lines if line.startswith("time at step")]
    assert [line.split()[3] for line in found] == ["2:", "4:"]
    for name in ("forward", "backward", "step"):
        match = re.search(rf"\b{name} ([\d.]+) ms", found[-1])
        assert match is not None
        assert 0 < float(match[1]) < 10_000


def test_memory_of_the_phases() -> None:
    _, lines = train(memory_breakdown=True)
    found = [line for line in lines if line.startswith("memory at step")]
    assert len(found) == 2
    assert re.search(r"after forward [\d.]+ GiB · after backward .* · after step .* · peak [\d.]+ GiB", found[0])


def test_memory_in_use_is_what_was_allocated() -> None:
    device = torch.device("cpu")
    before = memory_use(device)
    block = torch.ones(32 * 2**20)  # 128 MiB
    after = memory_use(device)
    assert after.used_bytes - before.used_bytes == pytest.approx(block.nbytes, rel=0.1)
    assert after.peak_bytes >= after.used_bytes


def test_flops_are_those_of_the_formulas(tmp_path: Path) -> None:
    path = tmp_path / "new" / "flops.txt"
    section = {"enabled": True, "profile_step": 2, "output_file": str(path), "top_modules": 2}
    engine, lines = train(flops_profiler=section, gradient_accumulation_steps=2)
    assert any("FLOPs of step 2 are in" in line for line in lines)
    text = path.read_text()
    forward = MIX + ATTENTION + LINEAR + HEAD
    assert engine.flops_profiler.flops == 2 * engine.flops_profiler.macs == pytest.approx(forward, rel=1e-2)
    assert engine.flops_profiler.params == sum(param.numel() for param in engine.module.parameters())
    assert train()[0].flops_profiler is None
    assert flops_of(text, "forward") == pytest.approx(forward, rel=1e-2)
    # Backward: twice the products, less the input's gradient of the first; attention is recomputed: 5 products for 2.
    assert flops_of(text, "backward") == pytest.approx(MIX + 2.5 * ATTENTION + 2 * LINEAR + 2 * HEAD, rel=1e-2)
    assert flops_of(text, "0 Attending") == pytest.approx(MIX + ATTENTION, rel=1e-2)
    assert flops_of(text, "blocks ModuleList") == pytest.approx(MIX + ATTENTION + LINEAR, rel=1e-2)
    assert "depth 2: blocks.0 " in text
    assert re.search(r"head Linear +34 params +2.05 kFLOP", text)


# As CUDA names devices, with the TFLOP/s of their data sheets in dense 16 bits.
DEVICES = {
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 989,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb": None,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "A100-SXM4-40GB": 312,
    "NVIDIA A800-SXM4-80GB": 312,
    "NVIDIA L40S": 362,
    "NVIDIA L40": 181,
    "NVIDIA L4": 121,
    "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "Tesla V100-SXM2-32GB": 125,
    "Tesla T4": 65,
    "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA RTX A1000": None,
    "NVIDIA RTX A1000 Laptop GPU": None,
    "NVIDIA RTX A10000": None,
    "NVIDIA T400 4GB": None,
    "NVIDIA T4G": None,
    "NVIDIA GeForce RTX 3090": None,
    "AMD Instinct MI300X": None,
}


def test_the_peak_of_a_device_goes_by_whole_words_of_its_name() -> None:
    peaks = {name: peak_flops_of(name) for name in DEVICES}
    assert peaks == {name: None if peak is None else peak * 1e12 for name, peak in DEVICES.items()}


def test_a_short_profile(tmp_path: Path) -> None:
    section = {"enabled": True, "module_depth": 1, "detailed": False}
    _, lines = train(flops_profiler=section)
    text = next(line for line in lines if line.startswith("FLOPs of step 1"))
    assert "depth 1: blocks " in text
    assert "depth 2" not in text
    assert "by module" not in text


def flops_of(text: str, title: str) -> float:
    match = re.search(rf"^ +{title}\b.*? ([\d.]+) (k?|M)FLOP", text, re.MULTILINE)
    assert match is not None, text
    return float(match[1]) * {"": 1.0, "k": 1e3, "M": 1e6}[match[2]]


def test_the_state_is_dumped_without_secrets() -> None:
    comet = {"api_key": "hidden", "enabled": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.engine.watch.open_curves", lambda settings, rank: Curves([]))
        _, lines = train(dump_state=True, comet=comet, gradient_clipping=0.5)
    text = next(line for line in lines if line.startswith("config in force"))
    assert "gradient_clipping = 0.5" in text
    assert 'comet.api_key = "***"' in text
    assert "hidden" not in text
    assert "optimizer.params.lr = 0.001" in text
    assert "csv_monitor" not in text
    assert "unit 0: 5 parameters from blocks.0.mix.weight to head.bias" in text


def dumped(**config: Any) -> list[str]:
    _, lines = train(0, dump_state=True, **config)
    return next(line for line in lines if line.startswith("config in force")).splitlines()


def test_the_dump_has_the_values_in_force() -> None:
    kept = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    adam = {"type": "AdamW", "params": {"lr": "auto", "fp32_optimizer_states": True}}
    lines = dumped(bf16=kept, optimizer=adam, gradient_accumulation_steps=2, zero_optimization={"stage": 3})
    for line in (
        f"train_batch_size = {2 * BATCH}",
        f"train_micro_batch_size_per_gpu = {BATCH}",
        "gradient_accumulation_steps = 2",
        "optimizer.params.lr = 0.001",
        "zero_optimization.stage3_max_live_parameters = 1000000000",
        "bf16.bf16_optimizer_states = true",
    ):
        assert f"  {line}" in lines
    at = lines.index("precision in force:")
    assert lines[at + 1 : at + 5] == [
        "  parameters: bf16",
        "  master weights: the parameters, bf16",
        "  gradient sums: bf16",
        "  optimizer states: bf16",
    ]
    assert not [line for line in lines if "fp32_optimizer_states" in line or ".nvme_path" in line]


def test_keys_of_another_stage_are_not_dumped() -> None:
    lines = dumped(bf16={"enabled": True})
    assert not [line for line in lines if "stage3_" in line or line.startswith("  aio.")]
    assert {"  master weights: fp32", "  gradient sums: fp32", "  optimizer states: fp32"} <= set(lines)


# ---- collectives ----


def _train_logged(rank: int, world_size: int, stage: int, rules: dict[str, Any]) -> tuple[str, list[str], Any]:
    engine, lines = train(3, zero_optimization={"stage": stage}, comms_logger={"enabled": True, **rules})
    with logged() as said:
        table = launcher.comm.log_summary(show_straggler=True)
    totals = observe._logs[-1].totals()
    engine.destroy()
    return table, lines + said, totals


def _with_another_engine(rank: int, world_size: int) -> list[tuple[int, bool]]:
    """Return how many collectives a step adds to the first engine's log, and whether waits are measured."""
    config = {"zero_optimization": {"stage": 2}, "comms_logger": {"enabled": True}, "wall_clock_breakdown": True}
    found: list[tuple[int, bool]] = []
    engine, _ = train(1, **config)
    own = observe._logs[-1]

    def step() -> None:
        before = sum(count for count, _ in own.totals().values())
        engine.backward(engine(torch.ones(BATCH, TIME, WIDTH)))
        engine.step()
        found.append((sum(count for count, _ in own.totals().values()) - before, observe.wait_span() is not None))

    step()
    other, _ = train(1)
    step()
    other.destroy()
    step()
    other, _ = train(1, **config)
    step()
    del other  # an engine that is dropped ends its own
    step()
    engine.destroy()
    assert observe._logs == []
    assert observe.wait_span() is None
    return found


def test_another_engine_leaves_log_and_spans_of_the_first_alone() -> None:
    for rank, found in enumerate(run_on_ranks(2, _with_another_engine)):
        assert found[0][0] > 0
        assert found == [(found[0][0], rank == 0)] * 5


def padded_bytes() -> int:
    """Bytes of the one unit of the model over two ranks."""
    numel = WIDTH * 3 * WIDTH + WIDTH * WIDTH + WIDTH + 2 * WIDTH + 2
    return -(-numel // 128) * 128 * 4


@pytest.mark.parametrize(("stage", "kinds"), [(0, {"all_reduce"}), (2, {"reduce_scatter", "all_gather"})])
def test_collectives_are_counted(stage: int, kinds: set[str]) -> None:
    results = run_on_ranks(2, _train_logged, stage, {})
    table, lines, totals = results[0]
    large = {key: value for key, value in totals.items() if key[1] > 256 and key[0] != "broadcast"}  # not facts
    assert {kind for kind, _ in large} == kinds
    for kind in kinds:
        sent = sum(num_bytes * count for (name, num_bytes), (count, _) in large.items() if name == kind)
        assert sent == 3 * padded_bytes()
    assert all(total_s > 0 for _, total_s in totals.values())
    assert "straggler ms" in table
    assert sum(line.startswith("collectives of rank 0") for line in lines) == 1
    assert not any(line.startswith("collectives") for line in results[1][1])


def test_only_the_named_collectives_with_their_callers() -> None:
    rules = {"prof_all": False, "prof_ops": ["all_gather"], "debug": True, "verbose": True}
    _, lines, totals = run_on_ranks(2, _train_logged, 2, rules)[0]
    assert {kind for kind, _ in totals} == {"all_gather (write_back)", "all_gather (complete_sums)"}
    assert any(re.match(r"comm op: all_gather .* \| time: [\d.]+ ms \| message: \d+ bytes", line) for line in lines)


def _train_waited(rank: int, world_size: int) -> list[str]:
    return train(4, zero_optimization={"stage": 2}, wall_clock_breakdown=True)[1]


def test_waits_for_collectives_are_part_of_the_times() -> None:
    reporting, silent = run_on_ranks(2, _train_waited)
    line = [line for line in reporting if line.startswith("time at step")][-1]
    for name in ("reduce", "gather"):
        match = re.search(rf"{name} ([\d.]+) ms", line)
        assert match is not None
        assert float(match[1]) > 0
    assert not any(line.startswith("time") for line in silent)


def test_bandwidths() -> None:
    """1 GB in 1 s over 4 ranks: 8 Gbit/s; an all-reduce sends 2 · 3/4 of it over each link."""
    assert bandwidths_gbps("all_reduce", 10**9, 4, 1.0) == pytest.approx((8.0, 12.0))
    assert bandwidths_gbps("all_gather", 10**9, 4, 1.0) == pytest.approx((8.0, 6.0))
    assert bandwidths_gbps("broadcast", 10**9, 4, 1.0) == pytest.approx((8.0, 8.0))


def test_a_summary_of_nothing_is_an_error() -> None:
    with pytest.raises(EngineError, match="no collectives are logged"):
        launcher.comm.log_summary()


PROFILED = """
import launcher, torch
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1}}
engine, *_ = launcher.initialize(model=model, config=config)
schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=4)
with torch.profiler.profile(schedule=schedule) as profiler:
    for _ in range(20):
        engine.backward(engine(torch.ones(4, 16)).mean())
        engine.step()
        profiler.step()
print("trained")
"""


def test_a_profiler_of_torch_may_stop_after_any_step(tmp_path: Path) -> None:
    result = run_ranks(tmp_path, 2, write(tmp_path, PROFILED))
    assert result.code == 0, result.err
    assert result.out.count("trained") == 2
