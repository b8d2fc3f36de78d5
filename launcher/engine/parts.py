"""What an engine is built of, and what of it the config alone decides: files on disk, loss scale, kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.comm.groups import RankGroup
from launcher.comm.mesh import ParallelMesh
from launcher.config.equations import BatchPlan
from launcher.config.policies import DType, Place, ZeroPolicy, autocast_dtype, offload_policy
from launcher.config.schema import Config, Fp16
from launcher.engine.casting import Casting
from launcher.engine.data import DistributedLoader
from launcher.engine.sequence import SequenceRanks
from launcher.engine.sharded import ShardedModel
from launcher.optim.scaling import LossScaleRules
from launcher.zero.placement import Disks, open_disk


@dataclass(frozen=True)
class EngineParts:
    """What `initialize()` has built."""

    mesh: ParallelMesh
    policy: ZeroPolicy
    sharded: ShardedModel
    lr_scheduler: Any
    batch: BatchPlan
    settings: Config
    raw_config: dict[str, Any]
    loader: DistributedLoader | None
    casting: Casting
    sequence: SequenceRanks

    @property
    def group(self) -> RankGroup:
        """All ranks of the run."""
        return self.mesh.data


def swap_space(settings: Config) -> Disks:
    """Open the files of what is offloaded to disk. Raises: EngineError for a folder that cannot be written."""
    zero, aio = settings.zero_optimization, settings.aio
    has_params = offload_policy(settings).params is Place.DISK
    return Disks(
        optimizer=open_disk(zero.offload_optimizer, aio, writes_behind=zero.offload_optimizer.pipeline_write),
        params=open_disk(zero.offload_param, aio, writes_behind=True) if has_params else None,
    )


def loss_scale_rules(settings: Config) -> LossScaleRules | None:
    """Return the rules of the loss scale, of `fp16` or `amp`; None where no scale is needed."""
    if settings.fp16.enabled:
        stage = int(settings.zero_optimization.stage)
        return _scale_rules(settings.fp16, float(settings.fp16.loss_scale), has_hysteresis=stage > 0)
    if autocast_dtype(settings) is not DType.FP16:
        return None
    given = settings.amp.loss_scale if settings.amp.enabled else "dynamic"
    return _scale_rules(Fp16(), 0.0 if given == "dynamic" else float(given), has_hysteresis=True)


def _scale_rules(section: Fp16, fixed: float, *, has_hysteresis: bool) -> LossScaleRules:
    """has_hysteresis: DeepSpeed has none at stage 0, where the first overflow halves the scale."""
    return LossScaleRules(
        initial_scale=fixed or 2.0 ** int(section.initial_scale_power),
        is_dynamic=fixed == 0,
        window=int(section.loss_scale_window),
        hysteresis=int(section.hysteresis) if has_hysteresis else 1,
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
