"""The package `deepspeed` as a table: its modules, their names, and what of the built-in engine is behind each name.

`launcher.compat.alias` makes the modules from it when a script imports them. Standard library only.
"""

from __future__ import annotations

# The release whose interface this is. Libraries ask for a version before they use a part of it: every part that they
# use was there in this one.
VERSION = "0.19.8"
MAJOR, MINOR, PATCH = map(int, VERSION.split("."))
GIT_HASH = "none"

CONSTANTS = "*"  # in place of names: all constants of a module, which is a light one
_DEFINED = "launcher.compat"
_WORDS = {f"{_DEFINED}.words": CONSTANTS}
_PIPELINE = "launcher.parallel.pipeline"
_ZERO = "launcher.zero"
_EXPERT_GROUPS = """
    _get_expert_broadcast_src_rank _get_expert_data_parallel_group _get_expert_data_parallel_group_dict
    _get_expert_data_parallel_group_ranks _get_expert_data_parallel_rank _get_expert_data_parallel_world_size
    _get_expert_parallel_group _get_expert_parallel_group_dict _get_expert_parallel_group_ranks
    _get_expert_parallel_rank _get_expert_parallel_src_rank _get_expert_parallel_world_size
    _get_max_expert_parallel_group _get_max_expert_size _get_max_expert_size_name
"""
_SHARDED = """
    safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param
    safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad
    safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state
"""
_PROFILER = {
    f"{_DEFINED}.flops_profiler": """
        FlopsProfiler bytes_to_string duration_to_string flops_to_string get_model_profile macs_to_string
        number_to_string params_to_string
    """
}
_LEAVES = "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules unset_z3_leaf_modules z3_leaf_module"

# Module below `deepspeed` ("" is the package) -> {module where names are defined: the names, as "name" or
# "name=name there", or `CONSTANTS`}. Modules that have others inside have those as attributes, too.
NAMES: dict[str, dict[str, str]] = {
    "": {
        "deepspeed": """
            zero=runtime.zero checkpointing=runtime.activation_checkpointing.checkpointing dist=comm
        """,
        f"{_DEFINED}.names": """
            __version__=VERSION __version_major__=MAJOR __version_minor__=MINOR __version_patch__=PATCH
            version=VERSION __git_hash__=GIT_HASH __git_branch__=GIT_HASH git_hash=GIT_HASH git_branch=GIT_HASH
        """,
        f"{_DEFINED}.package": "InferenceEngine init_inference initialize",
        f"{_DEFINED}.accelerator": "get_accelerator",
        "launcher.base.errors": "DeepSpeedConfigError=ConfigError",
        f"{_DEFINED}.configs": "DeepSpeedConfig",
        f"{_DEFINED}.ranks": "init_distributed",
        f"{_DEFINED}.logs": "log_dist logger",
        f"{_DEFINED}.utils": "OnDevice",
        f"{_DEFINED}.optimizers": "DeepSpeedOptimizer ZeROOptimizer",
        f"{_DEFINED}.tuning": "add_tuning_arguments",
        "launcher.engine.data": "DeepSpeedDataLoader=DistributedLoader",
        "launcher.engine.arguments": "add_config_arguments",
        "launcher.engine.deepspeed_engine": "DeepSpeedEngine",
        "launcher.engine.pipeline": "PipelineEngine",
        f"{_DEFINED}.pipe": "PipelineModule",
        "launcher.parallel.tensor.split": "tp_model_init",
    },
    "accelerator": {
        f"{_DEFINED}.accelerator": """
            Accelerator DeepSpeedAccelerator=Accelerator get_accelerator is_current_accelerator_supported
            set_accelerator
        """
    },
    "accelerator.abstract_accelerator": {f"{_DEFINED}.accelerator": "DeepSpeedAccelerator=Accelerator"},
    "accelerator.cpu_accelerator": {f"{_DEFINED}.accelerator": "CPU_Accelerator=CpuAccelerator"},
    "accelerator.real_accelerator": {
        f"{_DEFINED}.accelerator": "get_accelerator is_current_accelerator_supported set_accelerator"
    },
    "checkpoint": {f"{_DEFINED}.files": "get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank"},
    "checkpoint.constants": _WORDS,
    "checkpoint.utils": {
        f"{_DEFINED}.files": "get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank",
        f"{_DEFINED}.utils": "clone_tensors_for_torch_save",
    },
    "comm": {
        "torch.distributed": """
            P2POp ProcessGroup ReduceOp all_gather all_gather_into_tensor all_gather_object all_reduce
            all_reduce_coalesced all_to_all all_to_all_single batch_isend_irecv broadcast broadcast_object_list
            destroy_process_group gather get_backend get_global_rank irecv is_available is_initialized isend
            monitored_barrier new_group recv reduce reduce_scatter reduce_scatter_tensor scatter send
            allgather_fn=all_gather_into_tensor reduce_scatter_fn=reduce_scatter_tensor
        """,
        f"{_DEFINED}.ranks": """
            barrier get_all_ranks_from_group get_local_rank get_rank get_world_group get_world_size init_distributed
            initialize_mesh_device
        """,
        f"{_DEFINED}.comms_logging": "CommsLogger configure has_comm_data inference_all_reduce log_summary reset_log",
        f"{_DEFINED}.accelerator": "get_accelerator",
    },
    "comm.reduce_op": {"torch.distributed": "ReduceOp"},
    "elasticity": {f"{_DEFINED}.configs": "compute_elastic_config elasticity_enabled"},
    "elasticity.config": {
        "launcher.base.errors": """
            ElasticityConfigError=ConfigError ElasticityError=ConfigError
            ElasticityIncompatibleWorldSize=ConfigError
        """
    },
    "elasticity.elasticity": {f"{_DEFINED}.configs": "compute_elastic_config elasticity_enabled"},
    "constants": {
        "torch.distributed.constants": "default_pg_timeout",
        f"{_DEFINED}.words": "TORCH_DISTRIBUTED_DEFAULT_PORT",
    },
    "env_report": {f"{_DEFINED}.package": "cli_main=main main"},
    "git_version_info": {
        f"{_DEFINED}.names": "git_branch=GIT_HASH git_hash=GIT_HASH version=VERSION",
        # They are built with the package, or not at all.
        f"{_DEFINED}.op_builders": "compatible_ops=COMPATIBLE_OPS installed_ops=COMPATIBLE_OPS torch_info=TORCH_INFO",
    },
    "launcher": {},
    "launcher.multinode_runner": {
        "launcher.cli.multinode_runner": """
            IMPIRunner MPICHRunner MVAPICHRunner MultiNodeRunner OpenMPIRunner PDSHRunner SlurmRunner
        """
    },
    "launcher.runner": {
        f"{_DEFINED}.names": "DEEPSPEED_ENVIRONMENT_NAME DLTS_HOSTFILE",
        "launcher.cli.deepspeed_runner": """
            _parse_hostfile encode_world_info fetch_hostfile main parse_args parse_inclusion_exclusion
            parse_resource_filter
        """,
    },
    "moe": {},
    "moe.layer": {
        "launcher.moe": "MoE",
        "launcher.parallel.expert.layer": "MOELayer",
        f"{_DEFINED}.gating": "Experts TopKGate",
    },
    "moe.experts": {f"{_DEFINED}.gating": "Experts"},
    "moe.mappings": {f"{_DEFINED}.gating": "drop_tokens gather_tokens"},
    "moe.sharded_moe": {
        "launcher.parallel.expert.layer": "MOELayer",
        "torch": "dist=distributed einsum",
        f"{_DEFINED}.gating": """
            TopKGate _route_slots _sparse_decode _sparse_encode top1gating top2gating topkgating
        """,
    },
    "moe.utils": {
        "launcher.moe": """
            configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group
            split_params_grads_into_shared_and_expert_params split_params_into_different_moe_groups_for_optimizer
            split_params_into_shared_and_expert_params
        """
    },
    "monitor": {},
    "monitor.config": {
        "launcher.config.schema": "DeepSpeedMonitorConfig=Config",
        f"{_DEFINED}.monitors": "get_monitor_config",
    },
    "monitor.comet": {f"{_DEFINED}.monitors": "CometMonitor"},
    "monitor.csv_monitor": {f"{_DEFINED}.monitors": "csvMonitor=CsvMonitor"},
    "monitor.monitor": {
        f"{_DEFINED}.monitors": """
            CometMonitor Monitor MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor=CsvMonitor
        """
    },
    "monitor.tensorboard": {f"{_DEFINED}.monitors": "TensorBoardMonitor"},
    "monitor.wandb": {f"{_DEFINED}.monitors": "WandbMonitor"},
    "ops": {f"{_DEFINED}.op_builders": "__compatible_ops__=COMPATIBLE_OPS"},
    "ops.adagrad": {f"{_DEFINED}.optimizers": "DeepSpeedCPUAdagrad"},
    "ops.adagrad.cpu_adagrad": {f"{_DEFINED}.optimizers": "DeepSpeedCPUAdagrad"},
    "ops.adam": {f"{_DEFINED}.optimizers": "DeepSpeedCPUAdam FusedAdam"},
    "ops.adam.cpu_adam": {f"{_DEFINED}.optimizers": "DeepSpeedCPUAdam"},
    "ops.adam.fused_adam": {f"{_DEFINED}.optimizers": "FusedAdam"},
    "ops.aio": {f"{_DEFINED}.op_builders": "AsyncIOBuilder"},
    "ops.lamb": {f"{_DEFINED}.optimizers": "FusedLamb"},
    "ops.lamb.fused_lamb": {f"{_DEFINED}.optimizers": "FusedLamb"},
    "ops.lion": {f"{_DEFINED}.optimizers": "DeepSpeedCPULion FusedLion"},
    "ops.lion.cpu_lion": {f"{_DEFINED}.optimizers": "DeepSpeedCPULion"},
    "ops.lion.fused_lion": {f"{_DEFINED}.optimizers": "FusedLion"},
    "ops.op_builder": {
        f"{_DEFINED}.op_builders": """
            ALL_OPS AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder FusedAdamBuilder FusedLambBuilder
            FusedLionBuilder NotImplementedBuilder OpBuilder
            EvoformerAttnBuilder=NotImplementedBuilder FPQuantizerBuilder=NotImplementedBuilder
            GDSBuilder=NotImplementedBuilder InferenceBuilder=NotImplementedBuilder
            InferenceCoreBuilder=NotImplementedBuilder InferenceCutlassBuilder=NotImplementedBuilder
            PinMemoryBuilder=NotImplementedBuilder QuantizerBuilder=NotImplementedBuilder
            RaggedOpsBuilder=NotImplementedBuilder RaggedUtilsBuilder=NotImplementedBuilder
            RandomLTDBuilder=NotImplementedBuilder SparseAttnBuilder=NotImplementedBuilder
            SpatialInferenceBuilder=NotImplementedBuilder StochasticTransformerBuilder=NotImplementedBuilder
            TransformerBuilder=NotImplementedBuilder UtilsBuilder=NotImplementedBuilder
        """
    },
    "pipe": {f"{_DEFINED}.pipe": "PipelineModule", f"{_PIPELINE}.specs": "LayerSpec TiedLayerSpec"},
    "profiling": {},
    "profiling.flops_profiler": _PROFILER,
    "profiling.flops_profiler.profiler": _PROFILER,
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": {
        "launcher.activation": """
            CudaRNGStatesTracker checkpoint configure get_cuda_rng_tracker is_configured
            model_parallel_cuda_manual_seed non_reentrant_checkpoint reset
        """,
        f"{_DEFINED}.utils": "partition_activations_in_checkpoint set_num_layers",
    },
    "runtime.activation_checkpointing.offload_activations": {
        f"{_DEFINED}.offload_activations": """
            CheckpointHiddenStatesOffload get_checkpoint_hidden_states_offloading_ctx_manager
        """
    },
    "runtime.base_optimizer": {f"{_DEFINED}.optimizers": "DeepSpeedOptimizer ZeROOptimizer"},
    "runtime.bf16_optimizer": {f"{_DEFINED}.optimizers": "BF16_Optimizer"},
    "runtime.checkpoint_engine": {f"{_DEFINED}.files": "TorchCheckpointEngine"},
    "runtime.checkpoint_engine.torch_checkpoint_engine": {f"{_DEFINED}.files": "TorchCheckpointEngine"},
    "runtime.config": {
        "launcher.base.errors": "DeepSpeedConfigError=ConfigError",
        f"{_DEFINED}.configs": """
            DeepSpeedConfig DeepSpeedConfigModel ZeroStageEnum dict_raise_error_on_duplicate_keys get_bfloat16_config
            get_float16_config get_gradient_clipping get_log_level get_zero_config
        """,
        f"{_DEFINED}.monitors": "get_monitor_config",
        **_WORDS,
    },
    "runtime.config_utils": {
        f"{_DEFINED}.configs": """
            DeepSpeedConfigModel dict_raise_error_on_duplicate_keys get_scalar_param
            get_dict_param=get_scalar_param get_list_param=get_scalar_param
        """
    },
    "runtime.constants": _WORDS,
    "runtime.dataloader": {
        f"{_DEFINED}.utils": "RepeatingLoader",
        "launcher.engine.data": "DeepSpeedDataLoader=DistributedLoader",
    },
    "runtime.engine": {
        "launcher.engine.deepspeed_engine": "DeepSpeedEngine",
        "launcher.engine.sharded": "OffloadStateTypeEnum=StateKind",
        f"{_DEFINED}.configs": "OffloadDeviceEnum ZeroStageEnum",
        f"{_DEFINED}.optimizers": """
            DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable DeepSpeedZeroOptimizer DeepSpeedZeroOptimizer_Stage3
            ZeROOptimizer
        """,
        f"{_DEFINED}.words": "MEMORY_OPT_ALLREDUCE_SIZE",
        _ZERO: "ZeroParamStatus",
    },
    "runtime.fp16": {},
    "runtime.fp16.fused_optimizer": {f"{_DEFINED}.optimizers": "FP16_Optimizer"},
    "runtime.fp16.unfused_optimizer": {f"{_DEFINED}.optimizers": "FP16_UnfusedOptimizer"},
    "runtime.fp16.onebit": {f"{_DEFINED}.optimizers": "OnebitAdam OnebitLamb ZeroOneAdam"},
    "runtime.fp16.onebit.adam": {f"{_DEFINED}.optimizers": "OnebitAdam"},
    "runtime.fp16.onebit.lamb": {f"{_DEFINED}.optimizers": "OnebitLamb"},
    "runtime.fp16.onebit.zoadam": {f"{_DEFINED}.optimizers": "ZeroOneAdam"},
    "runtime.fp16.loss_scaler": {
        f"{_DEFINED}.loss_scaler": "CreateLossScaler DynamicLossScaler LossScaler LossScalerBase"
    },
    "runtime.lr_schedules": {
        "launcher.optim.schedules": "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR",
        f"{_DEFINED}.tuning": """
            add_tuning_arguments get_config_from_args get_lr_from_config override_1cycle_params
            override_lr_range_test_params override_params override_warmupLR_params parse_arguments update_lr
        """,
        **_WORDS,
    },
    "runtime.pipe": {
        "launcher.engine.pipeline": "PipelineEngine",
        f"{_DEFINED}.pipe": "PipelineModule",
        f"{_PIPELINE}.specs": "LayerSpec TiedLayerSpec",
        f"{_PIPELINE}.topology": "ProcessTopology",
    },
    "runtime.pipe.engine": {
        "launcher.engine.pipeline": "PipelineEngine",
        f"{_DEFINED}.pipe": "PipelineModule",
        f"{_DEFINED}.utils": "RepeatingLoader",
    },
    "runtime.pipe.module": {
        "launcher.base.errors": "PipelineError=EngineError",
        f"{_DEFINED}.pipe": "PipelineModule PipelineParallelGrid",
        f"{_PIPELINE}.specs": "LayerSpec TiedLayerSpec",
        f"{_PIPELINE}.topology": "PipeDataParallelTopology",
    },
    "runtime.pipe.topology": {
        f"{_DEFINED}.pipe": "PipelineParallelGrid _prime_factors",
        f"{_PIPELINE}.topology": "PipeDataParallelTopology PipeModelDataParallelTopology ProcessTopology",
    },
    "runtime.precision_config": {
        f"{_DEFINED}.configs": "DeepSpeedBF16Config DeepSpeedFP16Config get_bfloat16_config get_float16_config"
    },
    "runtime.sequence_parallel": {},
    "runtime.sequence_parallel.parallel_state_sp": {
        f"{_DEFINED}.groups": """
            get_sequence_data_parallel_group get_sequence_data_parallel_rank get_sequence_data_parallel_world_size
            get_sequence_parallel_group get_sequence_parallel_rank get_sequence_parallel_world_size
            initialize_sequence_parallel get_model_parallel_group=get_sequence_parallel_group
            get_model_parallel_rank=get_sequence_parallel_rank
            get_model_parallel_world_size=get_sequence_parallel_world_size
        """
    },
    "runtime.sequence_parallel.ulysses_sp": {
        f"{_DEFINED}.tiled": "SequenceTiledCompute TiledFusedLogitsLoss TiledMLP sequence_tiled_compute",
        f"{_DEFINED}.ulysses": "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter=SequenceLoader",
    },
    "runtime.sparse_tensor": {f"{_DEFINED}.files": "SparseTensor"},
    "runtime.swap_tensor": {f"{_DEFINED}.words": "MIN_SWAPPABLE_BYTES"},
    "runtime.torch_autocast": {f"{_DEFINED}.zero": "PARAM_COMM_DTYPE_ATTR_NAME get_comm_dtype has_comm_dtype"},
    "runtime.utils": {
        f"{_DEFINED}.utils": """
            clip_grad_norm_ clip_tensors_by_global_norm copy_to_device count_used_parameters_in_backward
            empty_cache ensure_directory_exists get_global_norm get_global_norm_of_tensors get_only_unique_item
            move_to_device see_memory_usage set_random_seed
        """,
        "launcher.moe": "is_moe_param",
        f"{_DEFINED}.partitions": """
            CheckOverflow PartitionedTensor call_to_str get_weight_norm is_model_parallel_parameter partition_balanced
            partition_uniform prefix_sum_inc
        """,
    },
    "runtime.zero": {
        _ZERO: """
            GatheredParameters Init TiledLinear ZeroParamStatus register_external_parameter
            unregister_external_parameter
        """,
        f"{_DEFINED}.zero": "MiCS_Init TiledLinearReturnBias unwrap_model_for_generation",
    },
    "runtime.zero.config": {
        f"{_DEFINED}.configs": """
            DeepSpeedZeroConfig DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig
            OffloadDeviceEnum ZeroStageEnum get_zero_config
        """,
    },
    "runtime.zero.offload_config": {
        f"{_DEFINED}.configs": """
            DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum
        """,
        "launcher.engine.sharded": "OffloadStateTypeEnum=StateKind",
    },
    "runtime.zero.leaf_module_config": {
        f"{_DEFINED}.zero": """
            DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES DEFAULT_LEAF_MODULE_NAME_SUFFIXES
        """
    },
    "runtime.zero.linear": {
        f"{_DEFINED}.zero": """
            LinearFunctionForZeroStage3 LinearModuleForZeroStage3 autocast_custom_bwd autocast_custom_fwd
            zero3_linear_wrap
        """
    },
    "runtime.zero.mics": {f"{_DEFINED}.zero": "MiCS_Init"},
    "runtime.zero.muon": {},
    "runtime.zero.muon.original_muon": {f"{_DEFINED}.zero": "muon_update"},
    "runtime.zero.partition_parameters": {
        _ZERO: "GatheredParameters Init ZeroParamStatus register_external_parameter unregister_external_parameter",
        f"{_DEFINED}.accelerator": "get_accelerator",
        f"{_DEFINED}.utils": "zero_wrapper_for_fp_tensor_constructor",
        f"{_DEFINED}.zero": """
            MultipleAllGatherHandles ZeroParamType get_allgather_dtype is_zero_param
            partitioned_param_data_shape zero3_linear_wrap
        """,
        "torch": "_orig_torch_arange=arange",
    },
    "runtime.zero.stage3": {
        f"{_DEFINED}.optimizers": "DeepSpeedZeroOptimizer_Stage3",
        f"{_DEFINED}.zero": "unwrap_model_for_generation",
        "launcher.planner": """
            estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold
            estimate_zero3_model_states_mem_needs_all_live
        """,
    },
    "runtime.zero.stage_1_and_2": {
        f"{_DEFINED}.optimizers": "DeepSpeedZeroOptimizer",
        "launcher.planner": """
            estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold
            estimate_zero2_model_states_mem_needs_all_live
        """,
    },
    "runtime.zero.tiling": {_ZERO: "TiledLinear", f"{_DEFINED}.zero": "TiledLinearReturnBias"},
    "runtime.zero.utils": {
        "launcher.base.errors": "ZeRORuntimeException=EngineError",
        f"{_DEFINED}.zero": "is_zero_param is_zero_supported_optimizer",
    },
    "sequence": {},
    "sequence.cross_entropy": {f"{_DEFINED}.ulysses": "vocab_sequence_parallel_cross_entropy"},
    "sequence.layer": {f"{_DEFINED}.ulysses": "DistributedAttention _rotate_half apply_rotary_pos_emb"},
    "utils": {
        _ZERO: f"{_SHARDED} {_LEAVES}",
        f"{_DEFINED}.comms_logging": "get_caller_func",
        f"{_DEFINED}.utils": """
            OnDevice RepeatingLoader instrument_w_nvtx safe_update_full_grad_vectorized set_z3_leaf_modules_by_name
            set_z3_leaf_modules_by_suffix
        """,
        f"{_DEFINED}.logs": "log_dist log_dist_once logger set_log_level_from_string",
        f"{_DEFINED}.accelerator": "get_accelerator",
        f"{_DEFINED}.groups": """
            get_tensor_model_parallel_group get_tensor_model_parallel_src_rank
            get_data_parallel_group=_get_data_parallel_group get_data_parallel_rank=_get_data_parallel_rank
            get_data_parallel_world_size=_get_data_parallel_world_size
            get_model_parallel_group=get_tensor_model_parallel_group get_model_parallel_rank=_get_model_parallel_rank
            get_model_parallel_world_size=_get_model_parallel_world_size
            get_tensor_model_parallel_rank=_get_model_parallel_rank
            get_tensor_model_parallel_world_size=_get_model_parallel_world_size
        """,
    },
    "utils.groups": {
        f"{_DEFINED}.groups": f"""
            {_EXPERT_GROUPS}
            _create_expert_and_data_parallel _get_broadcast_src_rank _get_expert_model_parallel_world_size
            _get_expert_parallel_ranks get_model_parallel_group=get_tensor_model_parallel_group
            get_tensor_model_parallel_group get_tensor_model_parallel_src_rank
            _get_data_parallel_group _get_data_parallel_group_ranks _get_data_parallel_rank
            _get_data_parallel_world_size _get_model_parallel_rank _get_model_parallel_world_size
            get_data_parallel_group=_get_data_parallel_group get_data_parallel_rank=_get_data_parallel_rank
            get_data_parallel_world_size=_get_data_parallel_world_size
            get_model_parallel_rank=_get_model_parallel_rank
            get_model_parallel_world_size=_get_model_parallel_world_size
            get_tensor_model_parallel_rank=_get_model_parallel_rank
            get_tensor_model_parallel_world_size=_get_model_parallel_world_size
            _get_sequence_parallel_group=get_sequence_parallel_group
            _get_sequence_parallel_rank=get_sequence_parallel_rank
            _get_sequence_parallel_world_size=get_sequence_parallel_world_size
        """
    },
    "utils.comms_logging": {f"{_DEFINED}.comms_logging": "CommsLogger calc_bw_log convert_size get_caller_func"},
    "utils.init_on_device": {f"{_DEFINED}.utils": "OnDevice"},
    "utils.logging": {
        f"{_DEFINED}.logs": """
            LoggerFactory get_current_level get_dist_msg get_log_level_from_string log_dist log_dist_once log_levels
            logger print_dist
            print_json_dist print_rank_0 set_log_level_from_string should_log_le warning_once
        """
    },
    "utils.numa": {"launcher.cli.deepspeed_runner": "parse_range_list"},
    "utils.nvtx": {f"{_DEFINED}.utils": "instrument_w_nvtx"},
    "utils.tensor_fragment": {_ZERO: _SHARDED, f"{_DEFINED}.utils": "safe_update_full_grad_vectorized"},
    "utils.timer": {f"{_DEFINED}.timers": "NoopTimer SynchronizedWallClockTimer ThroughputTimer trim_mean"},
    "utils.torch": {f"{_DEFINED}.utils": "required_torch_version"},
    "utils.zero_to_fp32": {
        "launcher.checkpoint.zero_to_fp32": """
            convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint
            load_state_dict_from_zero_checkpoint
        """,
        f"{_DEFINED}.files": "get_checkpoint_files get_model_state_file get_model_state_files get_optim_files",
    },
}
NAMES["comm.comm"] = NAMES["comm"]

# Where variables for ranks on other hosts are written; `launch` reads that file, too.
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
DLTS_HOSTFILE = "/job/hostfile"

_NO_INFERENCE = "no inference kernels: call deepspeed.initialize() without an optimizer"
_NO_AUTO_SEQUENCE = "no FPDT or AutoSP: use launcher.DistributedAttention with recomputed activations"
_NO_TENSOR = "tensor parallelism is in the config: give tensor_parallel.autotp_size"
_NO_UNIVERSAL = "no universal checkpoints: each of its checkpoints loads at any number of ranks"
_NO_DATA_EFFICIENCY = "no curriculum learning, random-LTD or data sampling: let the script's own loader choose the data"

# Module or name below `deepspeed` -> what the built-in engine has not, and what to use. What is inside counts, too.
REFUSED = {
    "autotuning": 'no autotuner in Python: call "launch estimate"',
    "checkpoint.ds_to_universal": _NO_UNIVERSAL,
    "checkpoint.universal_checkpoint": _NO_UNIVERSAL,
    "compile": "no DeepCompile: call engine.compile()",
    "compression": "no compression: use torch.ao.quantization",
    "elasticity.elastic_agent": 'no elastic agent: call "launch --max_restarts"',
    "inference": _NO_INFERENCE,
    "io": "no disk writers for scripts: call engine.save_checkpoint()",
    "linear": "no LoRA or quantized layers: use the package peft",
    "model_implementations": _NO_INFERENCE,
    "module_inject": f"no kernels to inject; {_NO_TENSOR}",
    "nvme": 'no disk benchmark in Python: call "launch io"',
    "ops.sparse_attention": "no block-sparse attention: use torch.nn.attention.flex_attention",
    "ops.transformer": "no transformer kernels: use torch.nn.functional.scaled_dot_product_attention",
    "runtime.data_pipeline": _NO_DATA_EFFICIENCY,
    "runtime.domino": _NO_TENSOR,
    "runtime.eigenvalue": "no eigenvalues of layers: use the package pyhessian",
    "runtime.hybrid_engine": "no hybrid engine: call model.generate(), which works at stage 3",
    "runtime.pipe.p2p": "no sends between stages for scripts: call engine.train_batch()",
    "runtime.pipe.schedule": 'no schedules in Python: give "schedule" in "pipeline" of the config',
    "runtime.progressive_layer_drop": "no progressive layer drop: drop layers in the model",
    "runtime.quantize": "no quantized training: use torch.ao.quantization",
    "runtime.superoffload": 'no classes of SuperOffload: set "super_offload" of "offload_optimizer"',
    "runtime.tensor_parallel": _NO_TENSOR,
    "runtime.utils.register_output_backward_hooks": "no hooks on outputs of its own: call tensor.register_hook()",
    "runtime.zero.offload_states": "no functions that move a kind of state: call engine.offload_states()",
    "runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses": "no base of zero.Init: use that",
    "runtime.zero.parameter_offload": "no hooks for scripts: call launcher.zero.register_external_parameter()",
    "runtime.zenflow": 'no ZenFlow: set "delayed_update" of "offload_optimizer"',
    "sequence.auto_sp": _NO_AUTO_SEQUENCE,
    "sequence.fpdt_layer": _NO_AUTO_SEQUENCE,
    "utils.pin_memory": "no page-locked memory of its own: call tensor.pin_memory()",
    "utils.pin_memory_tracker": "no count of page-locked memory: call torch.cuda.host_memory_stats()",
}
