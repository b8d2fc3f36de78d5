"""From the config's keys to the policies the machinery is built with."""

from __future__ import annotations

import torch

from launcher.comm.groups import DataParallelGroup
from launcher.config.schema import Config
from launcher.config.schema_training import Fp16
from launcher.optim.scaling import LossScaleRules
from launcher.zero.home import Disks, open_disk
from launcher.zero.stages import STAGES, OffloadPolicy, ParameterPolicy, Place, Precision, Reduction, ZeroPolicy

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def zero_policy(settings: Config, group: DataParallelGroup) -> ZeroPolicy:
    """Return the policy of a run."""
    zero = settings.zero_optimization
    offload = _offload(settings)
    # Alone there is nobody to shard over; stage 0 is the same arithmetic without the copies.
    stage = STAGES[int(zero.stage) if group.world_size > 1 or offload.is_any else 0]
    predivide = float(group.world_size) if settings.prescale_gradients else float(settings.gradient_predivide_factor)
    return ZeroPolicy(
        stage=stage,
        precision=_precision(settings),
        max_unit_numel=max(1, min(int(zero.reduce_bucket_size), _max_owned_numel(settings) * group.world_size)),
        overlap_comm=zero.overlap_comm is not False,
        max_grad_norm=float(settings.gradient_clipping),
        parameters=ParameterPolicy(
            persistence_threshold=int(zero.stage3_param_persistence_threshold),
            model_persistence_threshold=int(zero.stage3_model_persistence_threshold),
            prefetch_numel=int(zero.stage3_prefetch_bucket_size) if zero.overlap_comm is not False else 0,
            max_live_numel=int(zero.stage3_max_live_parameters),
            max_reuse_distance=int(zero.stage3_max_reuse_distance),
            num_read_ahead=int(zero.offload_param.buffer_count) - 1 if offload.params is Place.DISK else 0,
            granularity_threshold=int(zero.stage3_module_granularity_threshold),
        ),
        reduction=Reduction(
            is_mean=settings.gradient_allreduce_op == "mean",
            predivide=predivide,
            scatters=zero.reduce_scatter,
            at_step_only=not settings.managed_gradient_accumulation,
        ),
        offload=offload,
        skips_overflow=settings.bf16.check_grad_overflow or not settings.bf16.enabled,
        accepts_unused=zero.ignore_unused_parameters,
        warns_of_new_paths=zero.log_trace_cache_warnings,
    )


def _max_owned_numel(settings: Config) -> int:
    """Return the most elements of a unit that one rank may own."""
    zero = settings.zero_optimization
    is_on_disk = zero.offload_param.device == Place.DISK.value
    return min(
        int(zero.sub_group_size), int(zero.offload_param.buffer_size) if is_on_disk else int(zero.sub_group_size)
    )


def swap_space(settings: Config) -> Disks:
    """Open the files of what is offloaded to disk. Raises: EngineError for a folder that cannot be written."""
    zero, aio = settings.zero_optimization, settings.aio
    return Disks(
        optimizer=open_disk(zero.offload_optimizer, aio, writes_behind=zero.offload_optimizer.pipeline_write),
        params=open_disk(zero.offload_param, aio, writes_behind=True),
    )


def _offload(settings: Config) -> OffloadPolicy:
    zero = settings.zero_optimization
    optimizer, params = zero.offload_optimizer, zero.offload_param
    return OffloadPolicy(
        optimizer=Place(optimizer.device),
        params=Place(params.device),
        optimizer_ratio=float(optimizer.ratio),
        pins_optimizer=optimizer.pin_memory,
        pins_params=params.pin_memory,
        reads_ahead=optimizer.pipeline_read,
        resident_states=frozenset({"momentum_buffer"} if zero.save_muon_momentum_buffer_in_memory else ()),
        max_host_params=int(params.max_in_cpu),
        is_delayed=optimizer.delayed_update,
        num_steps_in_order=int(optimizer.delayed_update_warmup_steps),
        cores_fraction=float(optimizer.cpuadam_cores_perc),
    )


def _precision(settings: Config) -> Precision:
    fp16, bf16 = settings.fp16, settings.bf16
    name = "fp16" if fp16.enabled else "bf16" if bf16.enabled else "fp32"
    keeps_master = not (
        (fp16.enabled and fp16.fp16_master_weights_and_grads) or (bf16.enabled and bf16.bf16_master_weights_and_grads)
    )
    wire = settings.communication_data_type
    return Precision(
        DTYPES[name],
        keeps_fp32_master=keeps_master,
        grad_dtype=DTYPES[settings.data_types.grad_accum_dtype or ("fp32" if keeps_master else name)],
        wire_dtype=None if wire is None else DTYPES[wire],
        autocast_dtype=_autocast_dtype(settings),
        has_16bit_states=bf16.enabled and bf16.bf16_optimizer_states,
    )


def _autocast_dtype(settings: Config) -> torch.dtype | None:
    if settings.torch_autocast.enabled:
        return DTYPES[settings.torch_autocast.dtype or "bfloat16"]
    return torch.float16 if settings.amp.enabled and settings.amp.opt_level != "O0" else None


def loss_scale_rules(settings: Config) -> LossScaleRules | None:
    """Return the rules of the loss scale, of `fp16` or `amp`; None where no scale is needed."""
    if settings.fp16.enabled:
        return _scale_rules(settings.fp16, float(settings.fp16.loss_scale))
    if _autocast_dtype(settings) != torch.float16:
        return None
    given = settings.amp.loss_scale if settings.amp.enabled else "dynamic"
    return _scale_rules(Fp16(), 0.0 if given == "dynamic" else float(given))


def _scale_rules(section: Fp16, fixed: float) -> LossScaleRules:
    return LossScaleRules(
        initial_scale=fixed or 2.0 ** int(section.initial_scale_power),
        is_dynamic=fixed == 0,
        window=int(section.loss_scale_window),
        hysteresis=int(section.hysteresis),
        consecutive_hysteresis=section.consecutive_hysteresis,
        min_scale=float(section.min_loss_scale),
    )


def precision_notice(settings: Config) -> str | None:
    """Return what to say at start about a precision that is not what its name says."""
    if not settings.amp.enabled:
        return None
    level = settings.amp.opt_level
    if level == "O0":
        return "amp O0 trains in fp32"
    scale = settings.amp.loss_scale
    kind = "a dynamic loss scale" if scale == "dynamic" else f"loss scale {float(scale):g}"
    return f"amp: Apex is retired; {level} runs the forward under torch.autocast in fp16, with {kind}"
