"""Sections beside training itself: checkpoints, monitors, profilers, data, compression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from launcher.config.fields import (
    AnyInt,
    Anything,
    Count,
    CountList,
    Flag,
    Fraction,
    IntList,
    Mapping_,
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
    choice,
    inert,
    key,
    unsupported,
)

_REMOVE = unsupported("not in this release; remove the section")


# ---- checkpoints ----


class ParallelWrite(Section):
    """`checkpoint.parallel_write`."""

    status = inert("every rank writes a file of its own at the same time")

    pipeline_stage: Flag = key(False, "pipeline stages write at the same time")


class CheckpointWriter(Section):
    """`checkpoint.writer`."""

    status = inert("every rank writes its file itself, with buffers of its own")

    type: Annotated[str, choice("FAST", "MOCK", "PYTHON")] = key("FAST", "engine that writes")
    io_buffer_size: PositiveInt = key(64 * 2**20, "bytes of a buffer")
    io_buffer_double: Flag = key(True, "use two buffers")
    io_multiplier: PositiveInt = key(1, "growth of the buffers")
    show_statistics: Flag = key(False, "print what was written")
    decoupled: Flag = key(False, "write beside the training")
    data_parallel: Annotated[str | None, choice("replica", "socket", "machine", null=True)] = key(None, "who writes")


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
    load_universal: Flag = key(False, "read the universal form", inert("every checkpoint loads at any world size"))
    use_node_local_storage: Flag = key(False, "every node writes to its own disk")
    parallel_write: ParallelWrite = key(ParallelWrite, "writing at the same time")
    checkpoint_serialization: Flag = key(
        True, "serialise as torch does", inert("checkpoints are safetensors and JSON; see pickle_client_state")
    )
    pickle_client_state: Flag = key(
        False, "pickle what else is in a client state; reading it runs code, so load only checkpoints that you trust"
    )
    writer: CheckpointWriter | None = key(None, "engine that writes")


class Nebula(Section):
    """`nebula`: Azure's asynchronous checkpoints."""

    status = inert("nebula is off")
    switch = ("enabled", False)

    enabled: Flag = key(False, "use Nebula", _REMOVE)
    enable_nebula_load: Flag = key(True, "read through Nebula")
    nebula_load_path: OptText = key(None, "where to read from")
    persistent_storage_path: OptText = key(None, "where to write to")
    persistent_time_interval: PositiveInt = key(100, "seconds between writes")
    num_of_version_in_retention: PositiveInt = key(2, "checkpoints to keep")


class ActivationCheckpointing(Section):
    """`activation_checkpointing`: what `launcher.checkpointing.checkpoint` does with the inputs it keeps."""

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


class ThroughputTimer(Section):
    """`timers.throughput`."""

    enabled: Flag = key(True, "measure samples per second", inert("it costs nothing and is always on"))
    synchronized: Flag = key(True, "wait for the device", inert("wall time between steps is measured"))


class Timers(Section):
    """`timers`."""

    throughput: ThroughputTimer = key(ThroughputTimer, "samples per second")


# ---- data ----


class DataSampling(Section):
    """`data_efficiency.data_sampling`."""

    status = inert("data_efficiency is off")

    enabled: Flag = key(False, "choose samples by difficulty")
    num_epochs: PositiveInt = key(1000, "passes over the data")
    num_workers: Count = key(0, "loader processes")
    pin_memory: Flag = key(False, "page-lock batches")
    curriculum_learning: Mapping_ = key({}, "metrics and schedules")
    dynamic_batching: Mapping_ = key({}, "batches by length")


class DataRouting(Section):
    """`data_efficiency.data_routing`."""

    status = inert("data_efficiency is off")

    enabled: Flag = key(False, "drop tokens by layer")
    random_ltd: Mapping_ = key({}, "random layer-wise token dropping")


class DataEfficiency(Section):
    """`data_efficiency`."""

    status = inert("data_efficiency is off")
    switch = ("enabled", False)

    enabled: Flag = key(False, "curriculum and routing", _REMOVE)
    seed: Count = key(1234, "seed of the sampling")
    data_sampling: DataSampling = key(DataSampling, "which samples")
    data_routing: DataRouting = key(DataRouting, "which tokens")


class CurriculumLearning(Section):
    """`curriculum_learning`, the old form."""

    status = inert("curriculum_learning is off")
    switch = ("enabled", False)

    enabled: Flag = key(False, "grow the difficulty", _REMOVE)
    curriculum_type: Text = key("seqlen", "what grows")
    min_difficulty: Count = key(1, "first difficulty")
    max_difficulty: Count = key(1, "last difficulty")
    schedule_type: Text = key("fixed_linear", "how it grows")
    schedule_config: Mapping_ = key({}, "parameters of the growth")


class ProgressiveLayerDrop(Section):
    """`progressive_layer_drop`."""

    status = inert("progressive_layer_drop is off")
    switch = ("enabled", False)

    enabled: Flag = key(False, "skip layers at random", _REMOVE)
    theta: Fraction = key(1.0, "part of layers kept at the end")
    gamma: NonNegative = key(0.001, "speed of the change")


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


class Autotuning(Section):
    """`autotuning`."""

    status = inert("autotuning is off")
    switch = ("enabled", False)

    enabled: Flag = key(False, "search for a good config", _REMOVE)
    fast: Flag = key(True, "search less")
    results_dir: Text = key("autotuning_results", "results")
    exps_dir: Text = key("autotuning_exps", "experiments")
    overwrite: Flag = key(True, "replace earlier ones")
    start_profile_step: PositiveInt = key(3, "first step measured")
    end_profile_step: PositiveInt = key(5, "last step measured")
    metric: Text = key("throughput", "what to improve")
    metric_path: OptText = key(None, "file with the metric")
    tuner_type: Annotated[str, choice("gridsearch", "random", "model_based")] = key("gridsearch", "how to search")
    tuner_early_stopping: PositiveInt = key(5, "trials without gain")
    tuner_num_trials: PositiveInt = key(50, "trials in all")
    arg_mappings: OptMapping = key(None, "config keys to script arguments")
    max_train_batch_size: OptInt = key(None, "largest batch")
    min_train_batch_size: PositiveInt = key(1, "smallest batch")
    max_train_micro_batch_size_per_gpu: PositiveInt = key(1024, "largest micro-batch")
    min_train_micro_batch_size_per_gpu: PositiveInt = key(1, "smallest micro-batch")
    num_tuning_micro_batch_sizes: PositiveInt = key(3, "micro-batches to try")
    mp_size: PositiveInt = key(1, "ranks of one model")
    model_info: Mapping_ = key({}, "facts about the model")
    model_info_path: OptText = key(None, "file with them")


class HybridEngine(Section):
    """`hybrid_engine`."""

    status = inert("hybrid_engine is off")
    switch = ("enabled", False)

    enabled: Flag = key(False, "switch between training and generation", _REMOVE)
    max_out_tokens: PositiveInt = key(512, "longest output")
    inference_tp_size: PositiveInt = key(1, "ranks of one layer")
    release_inference_cache: Flag = key(False, "free the cache after generation")
    pin_parameters: Flag = key(True, "page-lock parameters")
    tp_gather_partition_size: PositiveInt = key(8, "parameters gathered at once")
    enable_cuda_graph: Flag = key(False, "record CUDA graphs")


class Compile(Section):
    """`compile`: DeepCompile."""

    status = inert("deepcompile is off")
    switch = ("deepcompile", False)

    deepcompile: Flag = key(False, "compile communication into the graph", unsupported("use torch.compile(model)"))
    free_activation: Flag = key(False, "free activations early")
    free_activation_threshold: PositiveInt = key(10 * 2**20, "bytes of a large activation")
    offload_activation: Flag = key(False, "activations to host memory")
    offload_activation_pin_memory: Flag = key(True, "page-lock them")
    offload_opt_states: Flag = key(False, "states to host memory")
    double_buffer: Flag = key(True, "use two buffers")
    symmetric_memory: Flag = key(False, "symmetric memory")
    debug_log: Flag = key(False, "log the passes")
    offload_parameters: Flag = key(False, "parameters to host memory")
    sync_before_reduce: Flag = key(False, "synchronise")
    sync_after_reduce: Flag = key(False, "synchronise")
    sync_before_allgather: Flag = key(False, "synchronise")
    sync_after_allgather: Flag = key(False, "synchronise")
    keep_int_input_tensors: Flag = key(True, "keep integer inputs")
    keep_all_input_tensors: Flag = key(False, "keep all inputs")
    passes: Anything = key(None, "passes to run")


# ---- compression ----


def _is_off(technique: Any) -> bool:
    """Whether a part of `compression_training` is switched off, which it is unless it says otherwise."""
    if not isinstance(technique, Mapping):
        return False
    shared = technique.get("shared_parameters", technique)
    return isinstance(shared, Mapping) and shared.get("enabled", False) is False


class CompressionTraining(Section):
    """`compression_training`: each part has its own `enabled`, most of them in `shared_parameters`."""

    status = unsupported("not in this release; remove the section", is_off=_is_off)

    weight_quantization: OptMapping = key(None, "quantize weights while training")
    activation_quantization: OptMapping = key(None, "quantize activations while training")
    sparse_pruning: OptMapping = key(None, "prune single weights")
    row_pruning: OptMapping = key(None, "prune rows")
    head_pruning: OptMapping = key(None, "prune attention heads")
    channel_pruning: OptMapping = key(None, "prune channels")
    layer_reduction: OptMapping = key(None, "drop layers")


class WeightQuantization(Section):
    """`weight_quantization`: of inference. On where it is there, unless `enabled` is false."""

    status = unsupported("not in this release; remove the section")
    switch = ("enabled", False)

    enabled: Flag = key(True, "quantize weights")
    num_bits: PositiveInt = key(8, "bits of a weight")
    q_type: OptText = key(None, "symmetric or asymmetric")
    q_groups: PositiveInt = key(1, "groups of one weight")
    quantized_initialization: Mapping_ = key({}, "while loading")
    post_init_quant: Mapping_ = key({}, "after loading")


class QuantizeTraining(Section):
    """`quantize_training`."""

    status = unsupported("not in this release; remove the section")

    eigenvalue: OptMapping = key(None, "curvature of layers")


class SparseAttention(Section):
    """`sparse_attention`."""

    status = unsupported("use torch.nn.attention.flex_attention; remove the section")

    mode: Annotated[str, choice("fixed", "dense", "variable", "bigbird", "bslongformer")] = key("fixed", "pattern")
    block: PositiveInt = key(16, "elements of a block")
    different_layout_per_head: Flag = key(False, "a pattern for each head")
    num_local_blocks: PositiveInt = key(4, "blocks of a window")
    num_global_blocks: PositiveInt = key(1, "blocks that see all")
    attention: Annotated[str, choice("bidirectional", "unidirectional")] = key("bidirectional", "direction")
    horizontal_global_attention: Flag = key(False, "global rows too")
    num_different_global_patterns: PositiveInt = key(1, "global patterns")
    num_random_blocks: Count = key(0, "random blocks")
    local_window_blocks: IntList = key([4], "blocks of each window")
    global_block_indices: CountList = key([0], "first global blocks")
    global_block_end_indices: OptCountList = key(None, "last global blocks")
    num_sliding_window_blocks: PositiveInt = key(3, "blocks of the sliding window")
