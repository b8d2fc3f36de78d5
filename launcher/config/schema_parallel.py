"""Sections of what the ranks of one model do together: pipeline, tensor and expert parallelism."""

from __future__ import annotations

from typing import Annotated

from launcher.config.fields import (
    WORKS,
    Anything,
    Count,
    Flag,
    Number,
    OptCount,
    OptFlag,
    OptInt,
    OptNumber,
    OptText,
    OptTextList,
    PositiveInt,
    Section,
    Text,
    TextList,
    WeightShape,
    choice,
    inert,
    key,
    unsupported,
)
from launcher.sharding.pipeline import DEFAULT_SCHEDULE, SCHEDULES


class Pipeline(Section):
    """`pipeline`."""

    stages: OptInt = key(None, "ranks along the pipeline; null or auto: what a PipelineModule says, else 1")
    partition: Text = key("best", "how layers are divided: best, parameters, uniform, profile, type:REGEX")
    seed_layers: Flag = key(False, "seed each layer of a PipelineModule by its position")
    activation_checkpoint_interval: Count = key(0, "layers of a PipelineModule that are recomputed together; 0: none")
    schedule: Annotated[str, choice(*SCHEDULES)] = key(
        DEFAULT_SCHEDULE, f"order of forwards and backwards: {', '.join(SCHEDULES)} (not a key of DeepSpeed)"
    )
    virtual_stages: PositiveInt = key(1, "stages on each rank (not a key of DeepSpeed)")
    use_reentrant: OptFlag = key(
        None, "recompute layers within a backward of their own", inert("layers are recomputed without one")
    )
    pipe_partitioned: Flag = key(True, "split activations that are sent", inert("whole activations are sent"))
    grad_partitioned: Flag = key(True, "split gradients that are sent", inert("whole gradients are sent"))


class TensorParallelSize(Section):
    """`tensor_parallel.tp`."""

    status = inert("process groups are made from autotp_size")

    tp_size: PositiveInt = key(1, "the same as autotp_size, or 1", WORKS)
    tp_grain_size: PositiveInt = key(1, "multiple of split sizes", inert("heads and widths are divided evenly"))
    mpu: Anything = key(None, "groups made elsewhere")
    tp_group: Anything = key(None, "group made elsewhere")


class LayerSpec(Section):
    """One of `tensor_parallel.partition_config.layer_specs`: how the layers of some names are split."""

    patterns: TextList = key([], "regular expressions; one that fits a name of a layer or its weight from the start")
    partition_type: Annotated[str, choice("column", "row", "skip")] = key("column", "by outputs, by inputs, or not")
    shape: WeightShape = key(None, "of a fused weight: [2, -1] are 2 layers in one, [[q, k, v], -1] 3 of these sizes")
    partition_dim: OptCount = key(None, "of shape, the entry with the layers; null: 0 for column, 1 for row")
    gather_output: Flag = key(False, "of column: every rank gets all outputs")
    grad_allreduce: Flag = key(False, "of skip: sum the gradients over the ranks, each of which uses the layer in part")
    model_types: OptTextList = key(None, "model_type of the models it is for; null: all")


class PartitionConfig(Section):
    """`tensor_parallel.partition_config`."""

    tp_size: PositiveInt = key(1, "ranks of one layer", inert("autotp_size says how many"))
    use_default_specs: Flag = key(True, "split what no spec names by the model's own plan, or by the names of layers")
    strict_mode: Flag = key(False, "refuse models with linear layers that no spec names")
    embedding_partition_dim: Count = key(
        1, "dimension along which embeddings are split", inert("embeddings are split along their vocabulary")
    )
    lm_head_patterns: TextList = key(["lm_head", "embed_out"], "names of layers whose outputs are gathered")
    layer_specs: list[LayerSpec] = key([], "how layers are split; of several that fit a layer the first counts")


class TensorParallel(Section):
    """`tensor_parallel`."""

    switch = ("autotp_size", 0)

    autotp_size: Count = key(0, "ranks that share each layer; 0: off")
    across_nodes: Flag = key(False, "allow ranks of one layer on two nodes (not a key of DeepSpeed)")
    dtype: Text = key("fp16", "precision", inert("it is that of the rest of the config"))
    tp_overlap_comm: Flag = key(False, "communicate while computing", inert("backward always does"))
    vocab_parallel_lm_head: OptFlag = key(
        None, "split the head along the vocabulary", inert("embedding and head are, where the ranks divide it")
    )
    vocab_parallel_ce_backend: Annotated[str, choice("torch", "liger")] = key(
        "torch", "what computes the loss of a split head", unsupported("the model's own loss does; remove the key")
    )
    tp: TensorParallelSize = key(TensorParallelSize, "sizes", alias=("tensor_parallel",))
    injection_policy_tuple: Anything = key(None, "layers to reduce after", inert("partition_config names layers"))
    partition_config: PartitionConfig | None = key(None, "which layers are split, and how")
    preset_model: OptText = key(
        None, "known model family", inert("layers are known by the plan of the model, or by their names")
    )
    keep_module_on_host: Flag = key(False, "leave the model in host memory", inert("a layer is split at a time"))
    replace_with_kernel_inject: Flag = key(
        False, "use inference kernels", inert("the kernels are the model's own"), alias=("kernel_inject",)
    )


_ROUTER = inert("the model's own router decides it")
_BY_SHAPE = inert("experts are found by how the model holds them")
_SHARED = inert("shared experts stay as they are, on every rank")
_KERNELS = inert("the experts' own implementation computes them")
_DEEP_EP = inert("it is for DeepEP")


class ExpertParallel(Section):
    """`expert_parallel`."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "shard the experts of a Hugging Face mixture over ranks")
    autoep_size: PositiveInt = key(1, "ranks that have one set of experts together; divides the data axis")
    expert_tensor_parallel_size: PositiveInt = key(
        1,
        "ranks of one expert",
        unsupported("experts are not split; use a larger autoep_size", is_off=lambda n: n == 1),
    )
    moe_layer_pattern: OptText = key(None, "regular expression of the modules whose experts are sharded; null: all")
    expert_pattern: OptText = key(None, 'name of the experts within such a module; null: "experts"')
    preset_model: OptText = key(None, "known model family", _BY_SHAPE)
    router_pattern: OptText = key(None, "names of the routers", _ROUTER)
    use_grouped_mm: Flag = key(True, "one kernel for all experts", _KERNELS)
    disable_triton_grouped_mm: Flag = key(False, "without Triton", _KERNELS)
    gate_up_impl: Text = key("separate", "how gate and up are computed", _KERNELS)
    expert_activation: OptText = key(None, "activation of the experts", _KERNELS)
    route_norm: OptFlag = key(None, "normalise the scores", _ROUTER)
    route_scale: Number = key(1.0, "scale of the scores", _ROUTER)
    score_apply: Text = key("auto", "where scores are applied", _ROUTER)
    score_func: Text = key("auto", "softmax or sigmoid", _ROUTER)
    top_k: Anything = key("auto", "experts of a token", _ROUTER)
    num_expert_groups: OptInt = key(None, "groups of experts", _ROUTER)
    num_limited_groups: OptInt = key(None, "groups of a token", _ROUTER)
    routed_scaling_factor: Anything = key("auto", "scale of the results", _ROUTER)
    top_k_attr: OptText = key(None, "attribute with top_k", _ROUTER)
    load_balance_coeff: OptNumber = key(
        None, "step of the balance without a loss", unsupported("the router stays the model's own; remove it")
    )
    combine_impl: Text = key("auto", "how results are joined", inert("ranks send back one sum for each token"))
    row_weighting_impl: Text = key("auto", "how rows are weighed", _DEEP_EP)
    expert_w1: OptText = key(None, "name of the first weight", _BY_SHAPE)
    expert_w2: OptText = key(None, "name of the second weight", _BY_SHAPE)
    expert_w3: OptText = key(None, "name of the third weight", _BY_SHAPE)
    num_experts_attr: OptText = key(None, "attribute with their number", _BY_SHAPE)
    has_shared_experts: OptFlag = key(None, "some experts see every token", _SHARED)
    shared_experts_pattern: OptText = key(None, "their names", _SHARED)
    shared_experts_gate_pattern: OptText = key(None, "names of their gates", _SHARED)
    validate_folding_routing: Flag = key(
        False, "check the routing of tensor-parallel ranks", inert("experts and tensor parallelism exclude each other")
    )
    async_split_plan: Flag = key(False, "exchange sizes early", inert("sizes are exchanged right before the tokens"))
    comm_backend: Text = key(
        "comm", "what carries the tokens", unsupported("torch.distributed does", is_off=lambda name: name == "comm")
    )
    comm_num_sm: PositiveInt = key(12, "multiprocessors of DeepEP", _DEEP_EP)
    comm_qp_margin: Count = key(4, "queue pairs of DeepEP", _DEEP_EP)
    comm_max_tokens_per_rank: Count = key(0, "buffers of DeepEP", _DEEP_EP)
