"""`Config`: the whole vocabulary of a DeepSpeed JSON config, and the only home of defaults."""

from __future__ import annotations

import sys
from typing import Annotated

from launcher.config import schema_other as other
from launcher.config import schema_parallel as parallel
from launcher.config.fields import (
    AT_STAGE_3,
    WITH_NVME,
    WORKS,
    AnyInt,
    Count,
    Elements,
    Flag,
    Fraction,
    LossScaleValue,
    Mapping_,
    NonNegative,
    OptCount,
    OptFlag,
    OptInt,
    OptMapping,
    OptText,
    OptTextList,
    PositiveElements,
    PositiveInt,
    Section,
    StageNumber,
    Text,
    TextOrList,
    choice,
    inert,
    key,
    old_name_of,
    unsupported,
)

# ---- Precision, and the sections that name an optimizer and a schedule ----


class Fp16(Section):
    """`fp16`: half precision with fp32 master weights, fp32 gradient sums and a loss scale."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "train in fp16 with fp32 master weights")
    auto_cast: Flag = key(False, "cast floating-point inputs to fp16")
    loss_scale: NonNegative = key(0, "fixed loss scale; 0: dynamic")
    initial_scale_power: Count = key(16, "the dynamic scale starts at 2 to this power")
    loss_scale_window: PositiveInt = key(1000, "good steps before one that doubles the scale")
    hysteresis: PositiveInt = key(2, "overflows before the scale is halved; at stage 0 the first one does it")
    consecutive_hysteresis: Flag = key(False, "a good step forgets earlier overflows")
    min_loss_scale: NonNegative = key(1, "the scale never gets smaller")
    fp16_master_weights_and_grads: Flag = key(False, "keep master weights and gradients in fp16; states stay fp32")


class Bf16(Section):
    """`bf16`: bfloat16 parameters, fp32 master weights and fp32 gradient sums."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "train in bf16 with fp32 master weights", WORKS)
    immediate_grad_update: Flag = key(False, "sum gradients as they come", inert("they always are"))
    check_grad_overflow: Flag = key(True, "skip a step whose gradients are not finite")
    bf16_master_weights_and_grads: Flag = key(False, "keep master weights and gradients in bf16")
    bf16_optimizer_states: Flag = key(False, "keep optimizer states in bf16, as the master weights then are")


# Names of the types that torch.autocast casts to.
_BFLOAT16 = ("bfloat16", "bf16", "torch.bfloat16")
FLOAT16 = ("float16", "fp16", "half", "torch.float16")


class TorchAutocast(Section):
    """`torch_autocast`: torch's own mixed precision over an fp32 model, or one in bf16."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "run the forward under torch.autocast; float16 with a dynamic loss scale")
    dtype: Annotated[str | None, choice(*_BFLOAT16, *FLOAT16, null=True)] = key(
        None, "what it casts to; null: bfloat16"
    )
    lower_precision_safe_modules: OptTextList = key(
        None, "class paths that may compute in lower precision; null: all, as torch decides"
    )


class Amp(Section):
    """`amp`: the mixed precision of Apex, which is retired; torch.autocast does it here."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "run the forward under torch.autocast in fp16, with a loss scale")
    opt_level: Annotated[str, choice("O0", "O1", "O2", "O3")] = key("O1", "O0: fp32; O1 and O2: autocast; O3: refused")
    loss_scale: LossScaleValue = key("dynamic", '"dynamic" or a fixed loss scale')


class DataTypes(Section):
    """`data_types`: precision of gradient sums, parameters and buffers."""

    grad_accum_dtype: Annotated[str | None, choice("fp32", "fp16", "bf16", null=True)] = key(
        None, "precision of sums over micro-batches; null: fp32 here, unless gradients are kept in 16 bits"
    )
    param_dtype: Annotated[str | None, choice("fp32", "fp16", "bf16", null=True)] = key(
        None, "precision of the parameters; must agree with fp16 and bf16"
    )
    buffer_dtype: Annotated[str | None, choice("fp32", "fp16", "bf16", null=True)] = key(
        None, "precision of floating-point buffers of modules; null: each keeps its type"
    )
    keep_in_fp32_modules: OptTextList = key(
        None, "names of buffers to keep in fp32", inert("each buffer keeps the type of the model without buffer_dtype")
    )


class Optimizer(Section):
    """`optimizer`: type and its parameters; `params` is checked against the type."""

    type: Text = key(
        "AdamW",
        "Adam, AdamW, Adagrad, Lamb, Lion, SGD, Muon, OneBitAdam, ZeroOneAdam, OneBitLamb, MuAdam, MuAdamW, MuSGD (of"
        " the package mup), or another elementwise class of torch.optim",
    )
    params: Mapping_ = key({}, "parameters of the type")
    legacy_fusion: Flag = key(False, "old fused form", inert("it is obsolete"))
    torch_adam: Flag = key(False, "use torch's optimizer", inert("it is read inside params, as in DeepSpeed"))


class Scheduler(Section):
    """`scheduler`: type and its parameters; `params` is checked against the type."""

    type: Text = key("WarmupLR", "WarmupLR, WarmupDecayLR, ..., or a class of torch.optim.lr_scheduler")
    params: Mapping_ = key({}, "parameters of the type")


# ---- What is sharded, offloaded and read from disks ----


_UNITS_AT_ONCE = inert("what one unit needs is in memory together; pipeline_read and pipeline_write add one unit each")
_NEVER_EMPTY = inert("states are first written after their first update")
_ANY_RANK = inert("every rank copies what it owns, at the same time")
_ALWAYS_FLAT = inert("units are flat buffers: gradients are always in one")
_ALWAYS_NORM = inert("the norm also says whether every gradient is finite, so it is always computed")
_RANKS_JOINED = inert("a unit's gradients go to all their owners in one collective")
_ONE_GATHER = inert("a unit is gathered in one collective, which is never slower than a broadcast from each rank")
_UNIT_GATHER = inert("what is gathered at once is a unit; reduce_bucket_size bounds it below stage 3")
_ONE_CALL_EACH = inert("each request is one system call of a thread")
_THROUGH_HOST = inert("what is on disk goes through host memory")


class OffloadParam(Section):
    """`offload_param`: where parameters rest between uses."""

    switch = ("device", "none")

    device: Annotated[str, choice("none", "cpu", "nvme")] = key("none", "memory that holds the parameters")
    nvme_path: OptText = key(None, "folder on a fast disk of each host", WITH_NVME)
    buffer_count: Count = key(5, "buffers between disk and host memory", WITH_NVME)
    buffer_size: PositiveElements = key(100_000_000, "elements of one such buffer", WITH_NVME)
    max_in_cpu: Elements = key(1_000_000_000, "elements kept in host memory beside the disk", WITH_NVME)
    pin_memory: Flag = key(True, "page-lock the host memory, which makes copies faster")


class OffloadOptimizer(Section):
    """`offload_optimizer`: where optimizer states rest and are updated."""

    switch = ("device", "none")

    device: Annotated[str, choice("none", "cpu", "nvme")] = key("none", "memory that holds and updates the states")
    nvme_path: OptText = key(None, "folder on a fast disk of each host", WITH_NVME)
    buffer_count: Count = key(4, "buffers between disk and host memory", _UNITS_AT_ONCE)
    pin_memory: Flag = key(True, "page-lock the host memory, which makes copies faster")
    pipeline_read: Flag = key(False, "read the next states while some are updated", WITH_NVME)
    pipeline_write: Flag = key(False, "write updated states while the next are updated", WITH_NVME)
    fast_init: Flag = key(False, "skip the first write of the states", _NEVER_EMPTY)
    ratio: Fraction = key(1.0, "part of the states that is offloaded")
    super_offload: Flag = key(
        False, "update a unit when its gradient has arrived, beside backward; a step that is clipped rolls it back"
    )
    cpuadam_cores_perc: Fraction = key(1.0, "part of a rank's cores that update states")
    delayed_update: Flag = key(False, "update beside the next forward and backward, whose weights are one step behind")
    delayed_update_warmup_steps: Count = key(40, "first steps that are not delayed")


# Mixtures of experts whose parts run in an order that the data of each rank decides.
DEFAULT_LEAF_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class LeafModule(Section):
    """`leaf_module`: modules that are gathered as one, without hooks inside."""

    status = AT_STAGE_3

    classes: TextOrList = key(list(DEFAULT_LEAF_CLASSES), "class names or paths; given ones replace these")
    names: TextOrList = key([], "module names")
    name_suffixes: TextOrList = key([], "ends of module names")


class ZeroOptimization(Section):
    """`zero_optimization`: what is sharded over the ranks, and how it travels."""

    stage: StageNumber = key(0, "0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters")
    contiguous_gradients: Flag = key(True, "copy gradients into one buffer as they come", _ALWAYS_FLAT)
    reduce_scatter: Flag = key(True, "reduce each gradient to its owner only; false: to all, with an all-reduce")
    reduce_bucket_size: PositiveElements = key(
        500_000_000, "upper bound of a unit; at stage 3 no less than the default"
    )
    use_multi_rank_bucket_allreduce: Flag = key(True, "join the buckets of several ranks", _RANKS_JOINED)
    allgather_partitions: Flag = key(True, "gather updated parameters in one collective", _ONE_GATHER)
    allgather_bucket_size: Elements = key(500_000_000, "elements gathered at once", _UNIT_GATHER)
    overlap_comm: OptFlag = key(None, "communicate while computing; null: yes")
    load_from_fp32_weights: Flag = key(True, "restore master weights from fp32", inert("they always are"))
    elastic_checkpoint: Flag = key(False, "old checkpoint form", inert("every checkpoint loads at any world size"))
    offload_param: OffloadParam = key(OffloadParam, "parameters in host memory or on disk")
    offload_optimizer: OffloadOptimizer = key(OffloadOptimizer, "optimizer states in host memory or on disk")
    zenflow: Annotated[Section | None, other.ZENFLOW] = key(None, "stall-free offload")
    sub_group_size: Elements = key(
        1_000_000_000, "elements a rank updates at once: bounds units too; 0: each parameter by itself"
    )
    stage3_prefetch_bucket_size: Elements = key(
        50_000_000, "elements fetched ahead", AT_STAGE_3, alias=("prefetch_bucket_size",)
    )
    stage3_param_persistence_threshold: Elements = key(
        100_000, "smaller parameters stay unsharded", AT_STAGE_3, alias=("param_persistence_threshold",)
    )
    stage3_model_persistence_threshold: Elements = key(
        sys.maxsize, "elements that may stay unsharded", AT_STAGE_3, alias=("model_persistence_threshold",)
    )
    stage3_max_live_parameters: Elements = key(
        1_000_000_000,
        "elements gathered at a time, beyond which none are fetched ahead or kept; units in use come on top",
        AT_STAGE_3,
        alias=("max_live_parameters",),
    )
    stage3_max_reuse_distance: Elements = key(
        1_000_000_000, "keep what is needed again so soon", AT_STAGE_3, alias=("max_reuse_distance",)
    )
    stage3_gather_16bit_weights_on_model_save: Flag = key(
        False,
        "let engine.save_16bit_model() gather whole weights",
        AT_STAGE_3,
        alias=("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
    )
    stage3_module_granularity_threshold: Elements = key(
        0, "gather modules with smaller parts as one", AT_STAGE_3, alias=("module_granularity_threshold",)
    )
    stage3_use_all_reduce_for_fetch_params: Flag = key(
        False,
        "fetch with an all-reduce",
        inert("gathering sends half as much"),
        alias=("use_all_reduce_for_fetch_params",),
    )
    stage3_allgather_sequential: Flag = key(
        False,
        "gather one parameter at a time",
        inert("a unit is one collective"),
        alias=("allgather_sequential",),
    )
    ignore_unused_parameters: Flag = key(True, "accept parameters without gradient; false: they are an error")
    legacy_stage1: Flag = key(False, "stage 1 of old versions", unsupported("use stage 1"))
    round_robin_gradients: Flag = key(False, "copy gradients to host memory in parallel", _ANY_RANK)
    parameter_alignment: Flag = key(
        False,
        "pad flat buffers so that each parameter starts at a multiple of 16 bytes",
        unsupported("parameters follow one another; those whose sizes are multiples of 8 are aligned. Remove the key"),
    )
    compute_grad_norm: Flag = key(True, "compute the norm of all gradients at each step", _ALWAYS_NORM)
    zero_hpz_partition_size: Count = key(
        1, "ranks of a node that keep a second set of shards, which backward gathers from; 0 and 1: none", AT_STAGE_3
    )
    zero_quantized_weights: Flag = key(False, "gather weights in int8", other.ZEROPP)
    zero_quantized_nontrainable_weights: Flag = key(False, "gather frozen weights in int8", other.ZEROPP)
    zero_quantized_gradients: Flag = key(False, "reduce gradients in int4", other.ZEROPP)
    zeropp_loco_param: Annotated[Section | None, other.ZEROPP_LOCO_PARAM] = key(
        None, "error feedback of quantized gradients"
    )
    mics_shard_size: AnyInt = key(-1, "ranks that share one set of shards; -1: all", AT_STAGE_3)
    mics_hierarchical_params_gather: Flag = key(
        False,
        "gather within nodes first",
        unsupported("a unit is gathered in one collective; remove the key, and choose mics_shard_size within a node"),
    )
    memory_efficient_linear: Flag = key(True, "linear layers that keep no gathered weight", inert("no layer keeps one"))
    pipeline_loading_checkpoint: Flag = key(
        False, "load a checkpoint in stages", inert("a rank reads only the ranges it owns")
    )
    override_module_apply: Flag = key(True, "gather inside Module.apply", inert("zero.Init always does"))
    log_trace_cache_warnings: Flag = key(False, "say when the order of modules has changed", AT_STAGE_3)
    enable_sanity_checks: Flag = key(False, "check more at run time", inert("the checks are always on"))
    save_muon_momentum_buffer_in_memory: Flag = key(False, "keep momentum buffers (Muon, SGD) in memory", WITH_NVME)
    leaf_module: LeafModule = key(LeafModule, "modules that are gathered as one")
    cpu_offload: OptFlag = key(None, 'true: device "cpu"', old_name_of("offload_optimizer.device"))
    cpu_offload_param: OptFlag = key(
        None, 'true: device "cpu"', old_name_of("offload_param.device"), alias=("cpu_offload_params",)
    )
    cpu_offload_use_pin_memory: OptFlag = key(
        None, "page-lock the host memory", old_name_of("pin_memory in the sections that offload")
    )


class Aio(Section):
    """`aio`: how disks are read and written when something is offloaded to them."""

    status = WITH_NVME

    block_size: PositiveInt = key(1_048_576, "bytes of one request, rounded up to a multiple of 4096")
    queue_depth: PositiveInt = key(8, "requests that each thread of a transfer keeps in flight; 128 at most in all")
    intra_op_parallelism: PositiveInt = key(1, "threads of one transfer", alias=("thread_count", "num_threads"))
    single_submit: Flag = key(False, "submit requests one by one", _ONE_CALL_EACH)
    overlap_events: Flag = key(True, "submit while waiting", inert("requests never wait for each other"))
    use_gds: Flag = key(False, "transfer between disk and GPU directly", _THROUGH_HOST)


# ---- The whole config ----


_LEVELS = ("debug", "info", "warning", "error", "critical")
_DTYPES = ("fp32", "fp16", "bf16")


class Config(Section):
    """The top level of a config."""

    train_batch_size: OptInt = key(None, "samples of one optimizer step over all ranks")
    train_micro_batch_size_per_gpu: OptInt = key(None, "samples of one forward of one rank")
    gradient_accumulation_steps: OptInt = key(None, "micro-batches of one optimizer step")
    managed_gradient_accumulation: Flag = key(
        True, "the engine counts micro-batches; false: every engine.step() is an optimizer step"
    )
    steps_per_print: OptCount = key(10, "steps between progress lines; 0: none")
    dump_state: Flag = key(False, "print the config in force and the units at start")
    disable_python_gc: Flag = key(
        False, "switch Python's garbage collection off", inert("the script decides: call gc.disable()")
    )
    gradient_clipping: NonNegative = key(1.0, "largest norm of all gradients together; 0: no clipping")
    communication_data_type: Annotated[str | None, choice(*_DTYPES, null=True)] = key(
        None,
        "precision of gradients on their way (on NCCL of sums too); null: 16 bits where that rounds none, else fp32",
    )
    seq_parallel_communication_data_type: Annotated[str, choice(*_DTYPES)] = key(
        "fp32", "the same where sequence_parallel_size is more than 1"
    )
    prescale_gradients: Flag = key(False, "divide gradients by the number of ranks before they are sent")
    gradient_predivide_factor: NonNegative = key(1.0, "divide gradients by this before they are sent")
    gradient_allreduce_op: Annotated[str, choice("mean", "sum")] = key("mean", "what gradients of ranks become")
    sparse_gradients: Flag = key(False, "send embedding gradients as sparse tensors", inert("they are sent dense"))
    disable_allgather: Flag = key(False, "broadcast instead of gathering", inert("it is obsolete"))
    graph_harvesting: Flag = key(False, "record CUDA graphs", inert("no graphs are recorded"))
    zero_allow_untested_optimizer: Flag = key(False, "under stages 1 to 3, accept optimizer objects without a test")
    zero_force_ds_cpu_optimizer: Flag = key(
        True, "with offload_optimizer: refuse optimizers that the engine has no kernel for"
    )
    wall_clock_breakdown: Flag = key(
        False, "print times of forward, backward, step and waits every steps_per_print steps"
    )
    memory_breakdown: Flag = key(False, "print memory after forward, backward and step every steps_per_print steps")
    dataloader_drop_last: Flag = key(False, "drop the last, smaller batch")
    vocabulary_size: OptInt = key(None, "warn if no multiple of 8", inert("nothing depends on it"))
    log_level: Annotated[str | None, choice(*_LEVELS, null=True, keeps_case=True)] = key(
        None, "level of the engine's log; null: info, or what the script has set"
    )
    use_data_before_expert_parallelism: Flag = key(
        False, "ranks with the same experts are neighbours", unsupported("ranks of one set of experts are; remove it")
    )
    sequence_parallel_size: PositiveInt = key(1, "ranks that have parts of the same sequences")
    data_parallel_size: OptInt = key(None, "ranks with different data; null: those that the other axes leave")
    allgather_size: PositiveInt = key(500_000_000, "old bucket size", inert("it is obsolete"))
    train_steps: OptInt = key(None, "steps of the training", inert("the script decides"))

    optimizer: Optimizer | None = key(None, "optimizer and its parameters")
    scheduler: Scheduler | None = key(None, "learning-rate schedule and its parameters")
    fp16: Fp16 = key(Fp16, "half precision")
    bf16: Bf16 = key(Bf16, "bfloat16", alias=("bfloat16",))
    torch_autocast: TorchAutocast = key(TorchAutocast, "torch's mixed precision")
    amp: Amp = key(Amp, "Apex mixed precision")
    tf32: OptFlag = key(None, "TF32 in fp32 products on GPUs (not a key of DeepSpeed); null: as torch is set")
    data_types: DataTypes = key(DataTypes, "precisions of sums and buffers")
    zero_optimization: ZeroOptimization = key(ZeroOptimization, "sharding over ranks")
    aio: Aio = key(Aio, "disk access; read inside zero_optimization too, where older guides have it")

    checkpoint: other.Checkpoint = key(other.Checkpoint, "checkpoints")
    nebula: Annotated[Section, other.NEBULA] = key(other.NEBULA, "Azure checkpoints")
    datastates_ckpt: OptMapping = key(None, "DataStates checkpoints", unsupported("remove the section"))
    activation_checkpointing: other.ActivationCheckpointing = key(other.ActivationCheckpointing, "recomputation")
    flops_profiler: other.FlopsProfiler = key(other.FlopsProfiler, "operation counts")
    comms_logger: other.CommsLogger = key(other.CommsLogger, "collective log")
    tensorboard: other.Monitor = key(other.Monitor, "TensorBoard")
    csv_monitor: other.Monitor = key(other.Monitor, "CSV files")
    wandb: other.Wandb = key(other.Wandb, "W&B")
    comet: other.Comet = key(other.Comet, "Comet")
    mlflow: other.Mlflow = key(other.Mlflow, "MLflow")
    trackio: other.Trackio = key(other.Trackio, "Trackio")
    timers: other.Timers = key(other.Timers, "timers")
    data_efficiency: Annotated[Section, other.DATA_EFFICIENCY] = key(other.DATA_EFFICIENCY, "curriculum and routing")
    curriculum_learning: Annotated[Section, other.CURRICULUM_LEARNING] = key(
        other.CURRICULUM_LEARNING, "old curriculum"
    )
    progressive_layer_drop: Annotated[Section, other.PROGRESSIVE_LAYER_DROP] = key(
        other.PROGRESSIVE_LAYER_DROP, "layer skipping"
    )
    elasticity: other.Elasticity = key(other.Elasticity, "batches for many world sizes")
    autotuning: Annotated[Section, other.AUTOTUNING] = key(other.AUTOTUNING, "search for a config")
    pipeline: parallel.Pipeline = key(parallel.Pipeline, "pipeline parallelism")
    tensor_parallel: parallel.TensorParallel = key(parallel.TensorParallel, "tensor parallelism")
    expert_parallel: parallel.ExpertParallel = key(parallel.ExpertParallel, "expert parallelism")
    hybrid_engine: Annotated[Section, other.HYBRID_ENGINE] = key(
        other.HYBRID_ENGINE, "training and generation in turns"
    )
    compile: Annotated[Section, other.COMPILE] = key(other.COMPILE, "DeepCompile")
    compression_training: Annotated[Section, other.COMPRESSION_TRAINING] = key(
        other.COMPRESSION_TRAINING, "compression"
    )
    weight_quantization: Annotated[Section | None, other.WEIGHT_QUANTIZATION] = key(None, "quantized inference")
    quantize_training: Annotated[Section | None, other.QUANTIZE_TRAINING] = key(None, "quantized training")
    sparse_attention: Annotated[Section | None, other.SPARSE_ATTENTION] = key(None, "block-sparse attention")
