"""`Config`: the whole vocabulary of a DeepSpeed JSON config, and the only home of defaults."""

from __future__ import annotations

from typing import Annotated

from launcher.config import schema_other as other
from launcher.config import schema_parallel as parallel
from launcher.config.fields import (
    WORKS,
    Count,
    Flag,
    LossScaleValue,
    Mapping_,
    NonNegative,
    OptCount,
    OptFlag,
    OptInt,
    OptMapping,
    OptTextList,
    PositiveInt,
    Section,
    Text,
    choice,
    inert,
    key,
    unsupported,
)
from launcher.config.schema_zero import Aio, ZeroOptimization

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
    nebula: other.Nebula = key(other.Nebula, "Azure checkpoints")
    datastates_ckpt: OptMapping = key(None, "DataStates checkpoints", unsupported("remove the section"))
    activation_checkpointing: other.ActivationCheckpointing = key(other.ActivationCheckpointing, "recomputation")
    flops_profiler: other.FlopsProfiler = key(other.FlopsProfiler, "operation counts")
    comms_logger: other.CommsLogger = key(other.CommsLogger, "collective log")
    tensorboard: other.Monitor = key(other.Monitor, "TensorBoard")
    csv_monitor: other.Monitor = key(other.Monitor, "CSV files")
    wandb: other.Wandb = key(other.Wandb, "W&B")
    comet: other.Comet = key(other.Comet, "Comet")
    timers: other.Timers = key(other.Timers, "timers")
    data_efficiency: other.DataEfficiency = key(other.DataEfficiency, "curriculum and routing")
    curriculum_learning: other.CurriculumLearning = key(other.CurriculumLearning, "old curriculum")
    progressive_layer_drop: other.ProgressiveLayerDrop = key(other.ProgressiveLayerDrop, "layer skipping")
    elasticity: other.Elasticity = key(other.Elasticity, "batches for many world sizes")
    autotuning: other.Autotuning = key(other.Autotuning, "search for a config")
    pipeline: parallel.Pipeline = key(parallel.Pipeline, "pipeline parallelism")
    tensor_parallel: parallel.TensorParallel = key(parallel.TensorParallel, "tensor parallelism")
    expert_parallel: parallel.ExpertParallel = key(parallel.ExpertParallel, "expert parallelism")
    hybrid_engine: other.HybridEngine = key(other.HybridEngine, "training and generation in turns")
    compile: other.Compile = key(other.Compile, "DeepCompile")
    compression_training: other.CompressionTraining = key(other.CompressionTraining, "compression")
    weight_quantization: other.WeightQuantization | None = key(None, "quantized inference")
    quantize_training: other.QuantizeTraining | None = key(None, "quantized training")
    sparse_attention: other.SparseAttention | None = key(None, "block-sparse attention")
