"""Sections beside training itself: those without effect, in one table; checkpoints, profilers, monitors, elasticity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from launcher.config.fields import (
    AUTO,
    AnyInt,
    Anything,
    Count,
    CountList,
    Flag,
    IntList,
    NonNegative,
    Number,
    OptCountList,
    OptFlag,
    OptInt,
    OptMapping,
    OptText,
    PositiveInt,
    Section,
    Text,
    TextList,
    Unused,
    choice,
    inert,
    key,
    unsupported,
)

# ---- without effect ----


def _is_off(technique: Any) -> bool:
    """Whether a part of `compression_training` is switched off, which it is unless it says otherwise."""
    if not isinstance(technique, Mapping):
        return False
    shared = technique.get("shared_parameters", technique)
    return isinstance(shared, Mapping) and shared.get("enabled", False) is False


_REMOVE = unsupported("not in this release; remove the section")
ZEROPP = unsupported("quantized communication is not in this release; remove the key")


def _off(name: str, /, **keys: Any) -> Unused:
    """Return a row of a section that its first key, which is refused, would switch on."""
    return Unused(name, inert(f"{name} is off"), _REMOVE, **keys)


# Each section: why nothing comes of it, or what to do instead; and its keys, see `Unused`.
NEBULA = _off(
    "nebula", enabled=False, enable_nebula_load=True, nebula_load_path=OptText, persistent_storage_path=OptText,
    persistent_time_interval=100, num_of_version_in_retention=2,
)  # fmt: skip
DATA_EFFICIENCY = _off(
    "data_efficiency", enabled=False, seed=(Count, 1234),
    data_sampling=Unused(
        "data_sampling", inert("data_efficiency is off"), enabled=False, num_epochs=1000, num_workers=0,
        pin_memory=False, curriculum_learning={}, dynamic_batching={},
    ),
    data_routing=Unused("data_routing", inert("data_efficiency is off"), enabled=False, random_ltd={}),
)  # fmt: skip
CURRICULUM_LEARNING = _off(
    "curriculum_learning", enabled=False, curriculum_type="seqlen", min_difficulty=(Count, 1),
    max_difficulty=(Count, 1), schedule_type="fixed_linear", schedule_config={},
)  # fmt: skip
PROGRESSIVE_LAYER_DROP = _off("progressive_layer_drop", enabled=False, theta=1.0, gamma=(NonNegative, 0.001))
AUTOTUNING = _off(
    "autotuning", enabled=False, fast=True, results_dir="autotuning_results", exps_dir="autotuning_exps",
    overwrite=True, start_profile_step=3, end_profile_step=5, metric="throughput", metric_path=OptText,
    tuner_type=("gridsearch", "random", "model_based"), tuner_early_stopping=5, tuner_num_trials=50,
    arg_mappings=OptMapping, max_train_batch_size=OptInt, min_train_batch_size=1,
    max_train_micro_batch_size_per_gpu=1024, min_train_micro_batch_size_per_gpu=1, num_tuning_micro_batch_sizes=3,
    mp_size=1, model_info={}, model_info_path=OptText,
)  # fmt: skip
HYBRID_ENGINE = _off(
    "hybrid_engine", enabled=False, max_out_tokens=512, inference_tp_size=1, release_inference_cache=False,
    pin_parameters=True, tp_gather_partition_size=8, enable_cuda_graph=False,
)  # fmt: skip
COMPILE = Unused(
    "compile", inert("deepcompile is off"), unsupported("use torch.compile(model)"), deepcompile=False,
    free_activation=False, free_activation_threshold=10 * 2**20, offload_activation=False,
    offload_activation_pin_memory=True, offload_opt_states=False, double_buffer=True, symmetric_memory=False,
    debug_log=False, offload_parameters=False, sync_before_reduce=False, sync_after_reduce=False,
    sync_before_allgather=False, sync_after_allgather=False, keep_int_input_tensors=True,
    keep_all_input_tensors=False, passes=Anything, autoep_non_moe=False,
)  # fmt: skip
COMPRESSION_TRAINING = Unused(
    "compression_training", unsupported("not in this release; remove the section", is_off=_is_off),
    weight_quantization=OptMapping, activation_quantization=OptMapping, sparse_pruning=OptMapping,
    row_pruning=OptMapping, head_pruning=OptMapping, channel_pruning=OptMapping, layer_reduction=OptMapping,
)  # fmt: skip
WEIGHT_QUANTIZATION = Unused(  # of inference
    "weight_quantization", _REMOVE, _REMOVE, enabled=True, num_bits=8, q_type=OptText, q_groups=1,
    quantized_initialization={}, post_init_quant={},
)  # fmt: skip
QUANTIZE_TRAINING = Unused("quantize_training", _REMOVE, eigenvalue=OptMapping)
SPARSE_ATTENTION = Unused(
    "sparse_attention", unsupported("use torch.nn.attention.flex_attention; remove the section"),
    mode=("fixed", "dense", "variable", "bigbird", "bslongformer"), block=16, different_layout_per_head=False,
    num_local_blocks=4, num_global_blocks=1, attention=("bidirectional", "unidirectional"),
    horizontal_global_attention=False, num_different_global_patterns=1, num_random_blocks=0,
    local_window_blocks=[4], global_block_indices=(CountList, [0]), global_block_end_indices=OptCountList,
    num_sliding_window_blocks=3,
)  # fmt: skip
ZENFLOW = Unused(
    "zenflow",
    unsupported("use offload_optimizer.super_offload, which changes no result; remove the section"),
    topk_ratio=0.1, select_strategy=("auto", "step", "epoch"),
    select_interval=(PositiveInt, AUTO), update_interval=(PositiveInt, AUTO), overlap_step=False, offload=False,
    auto_ratio=0.99, full_warm_up_rounds=0, pt_reserved_cores_perc=0.5,
)  # fmt: skip
ZEROPP_LOCO_PARAM = Unused("zeropp_loco_param", ZEROPP, err_beta=0.8, reset_T=1024)
PARALLEL_WRITE = Unused(
    "parallel_write", inert("every rank writes a file of its own at the same time"), pipeline_stage=False
)
CHECKPOINT_WRITER = Unused(
    "writer", inert("every rank writes its file itself, with buffers of its own"), type=("FAST", "MOCK", "PYTHON"),
    io_buffer_size=64 * 2**20, io_buffer_double=True, io_multiplier=1, show_statistics=False, decoupled=False,
    data_parallel=(None, "replica", "socket", "machine"),
)  # fmt: skip


# ---- checkpoints ----


class Checkpoint(Section):
    """`checkpoint`: how checkpoints are written and read, and when the engine saves by itself."""

    folder: OptText = key(None, "where the engine saves by itself, and continues from: see docs/checkpoints.md")
    save_every: OptInt = key(None, "optimizer steps between saves into folder")
    keep_last: OptInt = key(None, "newest checkpoints of folder to keep; null: all")
    keep_every: OptInt = key(None, "keep those of steps that are multiples of this, too")
    asynchronous: Flag = key(False, "training waits for a copy in host memory only", alias=("async",))
    tag_validation: Annotated[str, choice("Ignore", "Warn", "Fail")] = key(
        "Warn", "check that tags, and folders, agree"
    )
    format: Annotated[str, choice("launch", "deepspeed")] = key("launch", "deepspeed: its files too, beside ours")
    exact_resume: OptFlag = key(
        None, "load_checkpoint restores random numbers and the position in the data; null: not of deepspeed.initialize"
    )
    load_universal: Flag = key(False, "read the universal form", inert("every checkpoint loads at any world size"))
    use_node_local_storage: Flag = key(False, "every node writes to its own disk")
    parallel_write: Annotated[Section, PARALLEL_WRITE] = key(PARALLEL_WRITE, "writing at the same time")
    checkpoint_serialization: Flag = key(
        True, "serialise as torch does", inert("checkpoints are safetensors and JSON; see pickle_client_state")
    )
    pickle_client_state: Flag = key(
        False, "pickle what else is in a client state; reading it runs code, so load only checkpoints that you trust"
    )
    writer: Annotated[Section | None, CHECKPOINT_WRITER] = key(None, "engine that writes")


class ActivationCheckpointing(Section):
    """`activation_checkpointing`: what is recomputed, and what `launcher.checkpointing.checkpoint` does with the inputs
    it keeps.
    """

    blocks: Flag = key(False, "the engine has every block of the model recomputed in backward (not a key of DeepSpeed)")
    partition_activations: Flag = key(False, "each rank of the model-parallel group of configure(mpu_) keeps its part")
    number_checkpoints: OptInt = key(None, "checkpoints of one forward: rows of the contiguous buffers")
    contiguous_memory_optimization: Flag = key(False, "copy them to buffers for number_checkpoints of them")
    cpu_checkpointing: Flag = key(False, "keep them in page-locked host memory")
    synchronize_checkpoint_boundary: Flag = key(False, "wait for the GPU before and after each checkpointed function")
    profile: Flag = key(False, "log the times of checkpointed forwards and of recomputations")


# ---- profilers and monitors ----


class FlopsProfiler(Section):
    """`flops_profiler`."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "count floating-point operations")
    recompute_fwd_factor: Number = key(0.0, "cost of recomputation", inert("recomputation is counted as it runs"))
    profile_step: PositiveInt = key(1, "optimizer step to count; the one after it is timed")
    step: OptInt = key(None, "optimizer step to count", inert("profile_step says which, as in DeepSpeed"))
    module_depth: AnyInt = key(-1, "depth to print; -1: all")
    top_modules: PositiveInt = key(1, "modules to print of each depth")
    detailed: Flag = key(True, "print every module")
    output_file: OptText = key(None, "file to print to")


class CommsLogger(Section):
    """`comms_logger`."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "measure collectives, for launcher.comm.log_summary(); they block meanwhile")
    verbose: Flag = key(False, "log each of them")
    prof_all: Flag = key(True, "log all kinds")
    debug: Flag = key(False, "log where they were called")
    prof_ops: TextList = key([], "kinds to log")


class Monitor(Section):
    """`tensorboard` and `csv_monitor`."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "write events")
    output_path: Text = key("", "folder")
    job_name: Text = key("DeepSpeedJobName", "name of the run")


class Wandb(Section):
    """`wandb`."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "write events to W&B")
    group: OptText = key(None, "group of the run")
    team: OptText = key(None, "team of the run")
    project: Text = key("deepspeed", "project of the run")


class Comet(Section):
    """`comet`."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "write events to Comet")
    samples_log_interval: PositiveInt = key(100, "samples between events")
    project: OptText = key(None, "project")
    workspace: OptText = key(None, "workspace")
    api_key: OptText = key(None, "key")
    experiment_name: OptText = key(None, "name")
    experiment_key: OptText = key(None, "id")
    online: OptFlag = key(None, "send at once")
    mode: Annotated[str | None, choice("get", "create", "get_or_create", null=True)] = key(None, "new or existing")


class Mlflow(Section):
    """`mlflow`. Not a section of DeepSpeed."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "write events to MLflow (not a section of DeepSpeed)")
    tracking_uri: OptText = key(None, "server or store; null: what MLFLOW_TRACKING_URI says")
    experiment_name: Text = key("Default", "experiment of the run; it is made where there is none")
    run_name: OptText = key(None, "name of the run; null: MLflow makes one")


class Trackio(Section):
    """`trackio`. Not a section of DeepSpeed."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "write events to Trackio (not a section of DeepSpeed)")
    project: Text = key("launch", "project of the run")
    run_name: OptText = key(None, "name of the run, which a restart continues; null: Trackio makes one")
    space_id: OptText = key(
        None, "Hugging Face Space that shows them; null: this machine, or what TRACKIO_SPACE_ID says"
    )


class ThroughputTimer(Section):
    """`timers.throughput`."""

    enabled: Flag = key(True, "measure samples per second", inert("it costs nothing and is always on"))
    synchronized: Flag = key(True, "wait for the device", inert("wall time between steps is measured"))


class Timers(Section):
    """`timers`."""

    throughput: ThroughputTimer = key(ThroughputTimer, "samples per second")


# ---- scaling out ----


class Elasticity(Section):
    """`elasticity`: one batch that fits many world sizes; `config.elastic` chooses it."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "choose the batch for many world sizes")
    max_train_batch_size: PositiveInt = key(2000, "largest batch; required")
    micro_batch_sizes: IntList = key([2, 4, 6], "micro-batches to choose from; required")
    min_gpus: PositiveInt = key(1, "smallest world, in ranks")
    max_gpus: PositiveInt = key(10_000, "largest world, in ranks")
    min_time: Count = key(0, "minutes a world must last", inert("no world is timed"))
    prefer_larger_batch: Flag = key(True, "the larger of batches that fit equally many worlds")
    ignore_non_elastic_batch_info: Flag = key(False, "let it override the batch keys")
    num_gpus_per_node: PositiveInt = key(1, "worlds are whole nodes of this many ranks (version 0.2)")
    model_parallel_size: PositiveInt = key(
        1, "ranks of one model", unsupported("elasticity counts data-parallel ranks only; remove the key")
    )
    version: Number = key(0.2, "0.1 or 0.2")
