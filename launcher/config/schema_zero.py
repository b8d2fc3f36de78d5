"""The `zero_optimization` section, its parts, and `aio`."""

from __future__ import annotations

import sys
from typing import Annotated

from launcher.config.fields import (
    AT_STAGE_3,
    WITH_NVME,
    AnyInt,
    Count,
    Elements,
    Flag,
    Fraction,
    OptFlag,
    OptText,
    PositiveElements,
    PositiveInt,
    Section,
    StageNumber,
    TextOrList,
    choice,
    inert,
    key,
    old_name_of,
    unsupported,
)

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
_ZEROPP = unsupported("quantized communication is not in this release; remove the key")


class OffloadParam(Section):
    """`offload_param`: where parameters rest between uses."""

    switch = ("device", "none")

    device: Annotated[str, choice("none", "cpu", "nvme")] = key("none", "memory that holds the parameters")
    nvme_path: OptText = key(None, "folder on a fast disk of each host", WITH_NVME)
    buffer_count: PositiveInt = key(5, "buffers between disk and host memory", WITH_NVME)
    buffer_size: PositiveElements = key(100_000_000, "elements of one such buffer", WITH_NVME)
    max_in_cpu: Elements = key(1_000_000_000, "elements kept in host memory beside the disk", WITH_NVME)
    pin_memory: Flag = key(True, "page-lock the host memory, which makes copies faster")


class OffloadOptimizer(Section):
    """`offload_optimizer`: where optimizer states rest and are updated."""

    switch = ("device", "none")

    device: Annotated[str, choice("none", "cpu", "nvme")] = key("none", "memory that holds and updates the states")
    nvme_path: OptText = key(None, "folder on a fast disk of each host", WITH_NVME)
    buffer_count: PositiveInt = key(4, "buffers between disk and host memory", _UNITS_AT_ONCE)
    pin_memory: Flag = key(True, "page-lock the host memory, which makes copies faster")
    pipeline_read: Flag = key(False, "read the next states while some are updated", WITH_NVME)
    pipeline_write: Flag = key(False, "write updated states while the next are updated", WITH_NVME)
    fast_init: Flag = key(False, "skip the first write of the states", _NEVER_EMPTY)
    ratio: Fraction = key(1.0, "part of the states that is offloaded")
    super_offload: Flag = key(
        False, "offload for tightly coupled CPU and GPU", unsupported("transfers overlap anyway; remove the key")
    )
    cpuadam_cores_perc: Fraction = key(1.0, "part of a rank's cores that update states")
    delayed_update: Flag = key(False, "update beside the next forward and backward, whose weights are one step behind")
    delayed_update_warmup_steps: Count = key(40, "first steps that are not delayed")


class ZenFlow(Section):
    """`zenflow`: stall-free offload that updates the most important gradients first."""

    status = unsupported("remove the section")

    topk_ratio: Fraction = key(0.1, "part of the gradients updated at once")
    select_strategy: Annotated[str, choice("auto", "step", "epoch")] = key("auto", "what the selection interval counts")
    select_interval: PositiveInt = key("auto", "how often gradients are selected anew")
    update_interval: PositiveInt = key("auto", "how often the others are updated")
    overlap_step: Flag = key(False, "update beside the next steps")
    offload: Flag = key(False, "keep selected states in host memory too")
    auto_ratio: Fraction = key(0.99, "threshold of the automatic interval")
    full_warm_up_rounds: Count = key(0, "first steps that update everything")
    pt_reserved_cores_perc: Fraction = key(0.5, "part of the cores left to PyTorch")


class LocoParam(Section):
    """`zeropp_loco_param`: error feedback of quantized gradients."""

    status = _ZEROPP

    err_beta: Fraction = key(0.8, "weight of the remembered error")
    reset_T: PositiveInt = key(1024, "steps after which it is forgotten")


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
    allgather_bucket_size: PositiveElements = key(500_000_000, "elements gathered at once", _UNIT_GATHER)
    overlap_comm: OptFlag = key(None, "communicate while computing; null: yes")
    load_from_fp32_weights: Flag = key(True, "restore master weights from fp32", inert("they always are"))
    elastic_checkpoint: Flag = key(False, "old checkpoint form", inert("every checkpoint loads at any world size"))
    offload_param: OffloadParam = key(OffloadParam, "parameters in host memory or on disk")
    offload_optimizer: OffloadOptimizer = key(OffloadOptimizer, "optimizer states in host memory or on disk")
    zenflow: ZenFlow | None = key(None, "stall-free offload")
    sub_group_size: PositiveElements = key(1_000_000_000, "elements a rank updates at once: bounds units too")
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
    zero_hpz_partition_size: PositiveInt = key(
        1, "ranks of a node that keep a second set of shards, which backward gathers from", AT_STAGE_3
    )
    zero_quantized_weights: Flag = key(False, "gather weights in int8", _ZEROPP)
    zero_quantized_nontrainable_weights: Flag = key(False, "gather frozen weights in int8", _ZEROPP)
    zero_quantized_gradients: Flag = key(False, "reduce gradients in int4", _ZEROPP)
    zeropp_loco_param: LocoParam | None = key(None, "error feedback of quantized gradients")
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
