"""docs/guides.md tells the truth: configs of the guides load, and what the page prints is what is printed."""

from __future__ import annotations

import re
import shlex
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from harness.launch.command import ROOT, run_launch

from launcher.base.errors import ConfigError, EngineError
from launcher.cli.main import cli
from launcher.compat.names import REFUSED
from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.load import load_config
from launcher.optim.scaling import MAX_OVERFLOWS_AT_MINIMUM, LossScaler, LossScaleRules
from launcher.zero.order import EVALUATION_HINT

PAGE = (ROOT / "docs" / "guides.md").read_text()
AUTO = "auto"
FP16 = {
    "enabled": AUTO,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
ADAMW = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
WARMUP = {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO}
DISK = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}
STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO,
    "stage3_param_persistence_threshold": AUTO,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
REST = {
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "steps_per_print": 2000,
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "wall_clock_breakdown": False,
}
AIO = {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True}
HIDDEN = 2048
# The settings that the guides print, with `aio` where they have it.
CONFIGS: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_optimization": {"stage": 1}},
    "optimizer": {"optimizer": ADAMW},
    "untested optimizer": {"zero_allow_untested_optimizer": True},
    "any optimizer on the CPU": {"zero_force_ds_cpu_optimizer": False},
    "fp32": {"fp16": {"enabled": False}},
    "fp16": {"fp16": FP16},
    "Apex": {"amp": {"enabled": AUTO, "opt_level": AUTO}},
    "batch sizes": {"train_micro_batch_size_per_gpu": AUTO, "train_batch_size": AUTO},
    "accumulation": {"gradient_accumulation_steps": AUTO},
    "clipping": {"gradient_clipping": AUTO},
    "what travels": {"communication_data_type": "fp32"},
    "disks of the hosts": {"checkpoint": {"use_node_local_storage": True}},
    "gathered weights": {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}},
    "everything on disk": {
        "fp16": FP16,
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
        "zero_optimization": {
            **STAGE_3,
            "offload_optimizer": {**DISK, "buffer_count": 4, "fast_init": False},
            "offload_param": {**DISK, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
            "aio": AIO,
        },
        **REST,
    },
    "inference without a Trainer": {
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": HIDDEN * HIDDEN,
            "stage3_prefetch_bucket_size": 0.9 * HIDDEN * HIDDEN,
            "stage3_param_persistence_threshold": 10 * HIDDEN,
        },
        "steps_per_print": 2000,
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "wall_clock_breakdown": False,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_the_guides_loads(name: str) -> None:
    load_config(CONFIGS[name])


@pytest.mark.parametrize("path", sorted((ROOT / "examples/configs").glob("hf_*.json")), ids=lambda path: path.stem)
def test_an_example_leaves_to_the_trainer_what_it_knows(path: Path) -> None:
    loaded = load_config(path)
    assert loaded.config.train_micro_batch_size_per_gpu == loaded.config.gradient_clipping == AUTO
    assert path.name in PAGE


def test_what_auto_becomes_without_a_trainer() -> None:
    given = {**CONFIGS["everything on disk"], "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": AUTO}}
    found, _ = resolve_auto(load_config(given).config, AutoFacts(world_size=4, hidden_size=16))
    assert (found.train_batch_size, found.gradient_accumulation_steps, found.gradient_clipping) == (8, 1, 1.0)
    assert (found.fp16.enabled, found.bf16.enabled) == (False, False)
    zero = found.zero_optimization
    sizes = (zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size, zero.stage3_param_persistence_threshold)
    assert sizes == (16**2, int(0.9 * 16**2), 160)
    assert found.scheduler is not None
    assert found.scheduler.params["warmup_num_steps"] == 1000
    params = {**WARMUP, "total_num_steps": AUTO}
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps"):
        resolve_auto(
            load_config({"train_batch_size": 4, "scheduler": {"type": "WarmupDecayLR", "params": params}}).config,
            AutoFacts(world_size=4, hidden_size=None),
        )


def test_the_lines_of_a_hang_are_in_the_code() -> None:
    code = "".join(
        (ROOT / "launcher/job" / name).read_text() for name in ("controller.py", "hang.py", "collectives.py")
    )
    shown = printed("asking all ranks")
    assert f"in a forward without gradients: {EVALUATION_HINT}" in shown
    for words in ("s: asking all ranks for their stacks", "hangs: ", "waits in a circle: ", "no progress for "):
        assert words in code
        assert words in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--num_gpus=2", "world 2"),
        ("--num_gpus 8 --num_nodes 2 --hostfile hostfile --master_addr hostname1 --master_port=9901", "world 16"),
        ("--nnodes 2 --node_rank 0 --master_addr hostname1 --master_port 9901 --num_gpus 8", "world 16"),
    ],
)
def test_the_commands_of_the_guides_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hostfile").write_text("hostname1 slots=8\nhostname2 slots=8\n")
    Path("train.py").touch()
    Path("ds_config.json").write_text("{}")
    assert options.removesuffix(" --num_gpus 8") in PAGE
    result = CliRunner().invoke(cli, ["--dry-run", *options.split(), "train.py", "--deepspeed", "ds_config.json"])
    assert result.exit_code == 0, result.output
    assert words in result.output


def printed(word: str) -> str:
    """Return the block of printed lines with a word in it."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return str(next(block for block in blocks if word in block))


def test_the_lines_of_an_overflow() -> None:
    scaler = LossScaler(LossScaleRules(2.0**16))
    said = [scaler.update(overflow=True) for _ in range(2)]
    lines = printed("OVERFLOW").splitlines()
    assert [line.partition(" (step")[0] for line in lines] == said


def test_the_error_of_a_scale_at_its_minimum() -> None:
    scaler = LossScaler(LossScaleRules(1.0, hysteresis=1))
    for _ in range(MAX_OVERFLOWS_AT_MINIMUM - 1):
        scaler.update(overflow=True)
    with pytest.raises(EngineError) as raised:
        scaler.update(overflow=True)
    assert printed("at its minimum").strip() == str(raised.value)


def test_the_error_of_a_batch_that_does_not_fit() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, world_size=2)
    message, _, hint = printed("is not divisible").strip().partition("  ")
    assert message in str(raised.value)
    assert hint in str(raised.value)


def test_a_port_in_use(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run_launch(tmp_path, "--num_gpus", "1", "--master_port", str(port), "train.py")
    assert printed("29811 is in use").replace("29811", str(port)).strip() in result.err


def test_the_batch_script() -> None:
    command, _, script = printed("#SBATCH").partition("\n")
    result = CliRunner().invoke(cli, shlex.split(command)[2:])
    assert result.output.startswith(script), result.output


def test_the_error_of_settings_that_differ_is_still_that_of_transformers() -> None:
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "integrations" / "deepspeed.py").read_text()
    shown = printed("Please correct")
    for words in (
        "Please correct the following DeepSpeed config values",
        "The easiest method is to set these DeepSpeed",
    ):
        assert words in source
        assert words in shown


def test_every_refused_module_is_on_the_page() -> None:
    page = (ROOT / "docs" / "huggingface.md").read_text()
    shortened = [path.removeprefix("runtime.").removeprefix("ops.").rpartition("universal_")[2] for path in REFUSED]
    missing = [name for name in shortened if name.rpartition("partition_parameters.")[2] not in page]
    assert missing == []
