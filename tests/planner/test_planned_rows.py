"""Which rows a plan has, and in which order."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from launcher.base.errors import UsageError
from launcher.config.check import check
from launcher.config.load import load_config, patched
from launcher.config.schema import Config
from launcher.planner.computing import Script, Transformer
from launcher.planner.estimate import Machines
from launcher.planner.hardware import gpu_named, gpu_names, hardware_of, scaled
from launcher.planner.ladder import EngineFacts
from launcher.planner.memory import Workload
from launcher.planner.model import ModelFacts, Parameter, TransformerShape, parse_count, typical_model, typical_shape
from launcher.planner.plan import Question, guide_says, meshes, micro_batches, plan, save_of
from launcher.planner.rehearsal import DeviceWork, RankRehearsal
from launcher.planner.settings import in_precision, resolve, setting_of


def question(
    size: str = "7B", num_nodes: int = 1, global_batch: int = 256, gpu: str = "H100", **others: Any
) -> Question:
    num_params = parse_count(size) or 0
    shape, device = typical_shape(num_params), gpu_named(gpu)
    machines = Machines(num_nodes, 8, device.memory_gb * 10**9)
    base = resolve(in_precision(Config(), "bf16"), machines.world_size, shape.hidden_size)
    computes = Transformer(shape, Workload(1, 4096))
    own = Question(
        typical_model(num_params, shape), computes, machines, hardware_of(device, 8), base, global_batch
    )  # fmt: skip
    return replace(own, **others)


def test_the_quickest_that_fits_is_first() -> None:
    found = plan(question())
    limit = found.question.machines.gpu_memory_bytes or 0
    assert found.best is found.rows[0]
    assert all(row.memory.device <= limit for row in found.fitting)
    assert [row.seconds for row in found.fitting] == sorted(row.seconds for row in found.fitting)
    misfits = found.rows[len(found.fitting) :]
    assert misfits
    assert all("needs" in str(row.misfit(found.question.machines)) for row in misfits)


def test_every_row_trains_on_the_same_batch_and_is_a_config_that_the_engine_takes() -> None:
    found = plan(question("1.3B", 2, 64))
    kinds = found.of_each_kind()
    assert len(kinds) > 20
    for row in kinds:
        keys = row.config()
        assert keys["train_batch_size"] == 64 == row.micro_batch * row.num_micro_batches * row.setting.sizes.data
        checked = check(keys, 16)
        assert not checked.errors, (keys, checked.errors)
        assert checked.config is not None
        built = setting_of(checked.config, 16)
        assert (built.stage, built.sizes.shape) == (row.setting.stage, row.setting.sizes.shape)
        assert built.policy.mesh == row.setting.policy.mesh


def test_axes_and_sizes_that_are_possible() -> None:
    alone = list(meshes(question(axes=frozenset())))
    assert [sizes.shape for sizes in alone] == [(1, 8, 1, 1)]
    shapes = {sizes.shape for sizes in meshes(question(num_nodes=2))}
    assert (1, 2, 1, 8) in shapes
    assert (16, 1, 1, 1) in shapes
    assert all(tensor * sequence <= 8 for _, _, sequence, tensor in shapes), "they stay in a node"
    assert all(pipeline == 1 or sequence == 1 for pipeline, _, sequence, _ in shapes)
    with pytest.raises(UsageError, match="multiple of 8"):
        plan(question(global_batch=12, axes=frozenset()))


def test_experts_are_spread_over_ranks_of_one_data_axis() -> None:
    shape = TransformerShape(4, 256, 4, vocab_size=1000, num_experts=8, num_active_experts=2)
    params = tuple(
        Parameter(name, numel)
        for index in range(4)
        for name, numel in ((f"h.{index}.attn.w", 262_144), (f"h.{index}.mlp.experts.w", 8 * 524_288))
    )
    own = question(model=ModelFacts("mixture", "test", params, shape), computes=Transformer(shape, Workload(1, 128)))
    assert {sizes.expert for sizes in meshes(own) if sizes.data == 8} == {1, 2, 4, 8}
    found = plan(own)
    spread = min((row for row in found.rows if row.setting.sizes.expert == 8), key=lambda row: row.seconds)
    assert spread.time.parts["model parallel"] > 0
    assert spread.config()["expert_parallel"]["autoep_size"] == 8


def test_micro_batches_divide_the_samples_of_a_rank() -> None:
    assert micro_batches(12) == [1, 2, 3, 4, 6, 12]
    many = micro_batches(720_720)
    assert len(many) <= 12
    assert (many[0], many[-1]) == (1, 720_720)
    assert all(720_720 % size == 0 for size in many)


def test_more_memory_is_never_slower_and_a_smaller_gpu_needs_more_tricks() -> None:
    large, small = plan(question("13B")), plan(question("13B", gpu="A100-40GB"))
    assert large.best is not None
    assert small.best is not None
    twice = replace(large.question.machines, gpu_memory_bytes=160 * 10**9)
    better = plan(replace(large.question, machines=twice)).best
    assert better is not None
    assert better.seconds <= large.best.seconds
    assert small.best.memory.device <= 0.95 * 40e9


def test_what_does_not_fit_anywhere() -> None:
    found = plan(question("175B", axes=frozenset(), machines=Machines(1, 8, 80 * 10**9, 10**12)))
    assert found.best is None
    assert any("of a host's 931.3 GiB" in str(row.misfit(found.question.machines)) for row in found.rows)
    assert found.days(1e9) is None
    assert found.rows[0].memory.device == min(row.memory.device for row in found.rows)


def test_a_disk_is_chosen_where_there_is_one() -> None:
    own = question("30B", axes=frozenset())
    zero = own.base.zero_optimization
    named = {"nvme_path": "/local_nvme"}
    zero = zero.model_copy(
        update={
            "offload_optimizer": zero.offload_optimizer.model_copy(update=named),
            "offload_param": zero.offload_param.model_copy(update=named),
        }
    )
    base = own.base.model_copy(update={"zero_optimization": zero})

    def offloads(found: Question) -> set[str]:
        return {row.setting.policy.offload.optimizer.value for row in plan(found).rows}

    assert offloads(own) == {"none", "cpu"}
    assert offloads(replace(own, base=base)) == {"none", "cpu", "nvme"}


def test_ten_thousand_ranks_take_seconds() -> None:
    """benchmarks/plan.py has the time: here it is only far from minutes."""
    begun_s = time.process_time()
    found = plan(question("70B", 1250, 10_000))
    assert found.question.machines.world_size == 10_000
    assert found.best is not None
    assert time.process_time() - begun_s < 60


def test_days_follow_from_the_step() -> None:
    found = plan(question())
    assert found.best is not None
    tokens = 1e12
    assert found.days(tokens) == pytest.approx(tokens / (256 * 4096) * found.best.seconds / 86_400)


def test_a_checkpoint_is_written_by_all_nodes() -> None:
    """14 bytes of each element: bf16, its fp32 master and two states of Adam."""
    num_bytes, seconds = save_of(question("7B", 2))
    assert num_bytes == pytest.approx(14 * 7e9 / 2, rel=1e-6)
    assert seconds == pytest.approx(num_bytes / 6e9, rel=1e-6)


# ---- a script ----


def rehearsed(num_micro_batches: int = 2, again: float = 0.0) -> RankRehearsal:
    return RankRehearsal(
        0, 2, 2,
        work={"forward": DeviceWork(2e9, 1e6, 4e6, 100), "backward": DeviceWork(4e9 + again, 2e6, 8e6, 200)},
        peaks={"forward": {"parameters": 7, "activations": 600}, "backward": {"activations": 500, "temporary": 400}},
        engine=EngineFacts(device="cuda", stage=1, micro_batch=2, accumulation=num_micro_batches),
    )  # fmt: skip


def test_a_script_is_planned_by_what_its_rehearsals_have_counted() -> None:
    params = tuple(Parameter(f"layers.{index}.w", 1000) for index in range(4))
    computes = Script(Workload(1, 1), {False: rehearsed(), True: rehearsed(again=2e9)})
    base = load_config({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}).config
    machines = Machines(1, 2, None, None, 0)
    own = question(
        model=ModelFacts("s", "rehearsed", params), computes=computes, machines=machines, base=base, global_batch=8
    )
    found = plan(own)
    assert {row.setting.sizes.shape for row in found.rows} == {(1, 2, 1, 1)}
    row = next(row for row in found.rows if row.micro_batch == 4 and not row.is_checkpointed)
    assert row.memory.activations == 1800
    flops = own.hardware.matmul_flops[row.setting.policy.precision.compute]
    assert row.time.parts["compute"] >= 6e9 / flops
    assert {row.is_checkpointed for row in found.rows} == {False, True}


# ---- machines, guides ----


@pytest.mark.parametrize("name", [*gpu_names(), "h100", "H100 80GB", "rtx-4090", "a100_40gb"])
def test_gpus_by_name(name: str) -> None:
    assert gpu_named(name).memory_gb >= 16


def test_a_gpu_that_is_not_known() -> None:
    with pytest.raises(UsageError, match=r"no GPU 'H1000'.*H100-80GB"):
        gpu_named("H1000")


def test_figures_are_scaled() -> None:
    own = hardware_of(gpu_named("H100"), 8)
    assert scaled(own, "network", 2).network_bytes_per_s == 2 * own.network_bytes_per_s
    assert scaled(own, "matmul", 0.5).matmul_flops == {key: each / 2 for key, each in own.matmul_flops.items()}
    with pytest.raises(UsageError, match="no figure"):
        scaled(own, "colour", 2)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (question("1B"), "the model fits a GPU"),
        (question("7B"), "does not fit a GPU: a pipeline"),
        (question("7B", 4), "a fast network"),
        (question("7B", 4, hardware=hardware_of(gpu_named("H100"), 8, 1e9)), "a slow network"),
        (question("1B", machines=Machines(1, 1, 80 * 10**9)), "train as usual"),
        (question("30B", machines=Machines(1, 1, 80 * 10**9)), "offload"),
    ],
)
def test_what_the_guides_say(own: Question, says: str) -> None:
    assert says in guide_says(own)


def test_a_row_patches_a_config_that_has_other_keys() -> None:
    row = plan(question("1.3B")).fitting[0]
    merged = patched({"gradient_clipping": 0.5, "zero_optimization": {"overlap_comm": False}}, row.config())
    assert merged["gradient_clipping"] == 0.5
    assert merged["zero_optimization"]["overlap_comm"] is False
    assert merged["zero_optimization"]["stage"] == row.setting.stage
