"""The engine that `initialize()` returns: with what scripts for DeepSpeed ask one, by DeepSpeed's names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, Dataset, Sampler

from launcher.base import env
from launcher.base.errors import EngineAssertionError, EngineError, EngineKeyError, EngineValueError
from launcher.base.log import get_logger
from launcher.base.progress import phase
from launcher.comm.device import device_module
from launcher.config.equations import solve_batch
from launcher.config.policies import DType
from launcher.engine.backward import scaled_up
from launcher.engine.data import DistributedLoader, build_loader
from launcher.engine.engine import Engine
from launcher.engine.facts import follow_micro_batch
from launcher.engine.model_check import warn_of_cuda_graphs
from launcher.engine.sharded import check_device, kinds_of
from launcher.engine.watch import ProfiledStep
from launcher.monitor.curves import Curves
from launcher.monitor.meters import ThroughputTimer
from launcher.zero.states import TORCH_DTYPES

# Method -> the key of the config whose value in force it returns.
_GETTERS = {
    "amp_enabled": "amp.enabled",
    "aio_config": "aio",
    "bfloat16_enabled": "bf16.enabled",
    "communication_data_type": "communication_data_type",
    "comms_logger_enabled": "comms_logger.enabled",
    "curriculum_learning_enabled": "curriculum_learning.enabled",
    "dataloader_drop_last": "dataloader_drop_last",
    "dump_state": "dump_state",
    "elasticity_enabled": "elasticity.enabled",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "log_level": "log_level",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "memory_breakdown": "memory_breakdown",
    "steps_per_print": "steps_per_print",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "zero_allgather_partitions": "zero_optimization.allgather_partitions",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "zero_ignore_unused_parameters": "zero_optimization.ignore_unused_parameters",
    "zero_max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "zero_model_persistence_threshold": "zero_optimization.stage3_model_persistence_threshold",
    "zero_overlap_comm": "zero_optimization.overlap_comm",
    "zero_param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_round_robin_gradients": "zero_optimization.round_robin_gradients",
    "zero_sub_group_size": "zero_optimization.sub_group_size",
}


_SECTIONS = {"zero_config": "zero_optimization", "checkpoint_config": "checkpoint"}


class EngineConfig:
    """`engine._config` of scripts for DeepSpeed: keys of the config in force are attributes, and batch sizes live."""

    __slots__ = ("_engine",)  # another attribute that is set is an error

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine

    @property
    def train_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks; setting it changes the accumulation steps."""
        return self._engine.train_batch_size()

    @train_batch_size.setter
    def train_batch_size(self, value: int) -> None:
        self._engine.set_train_batch_size(value)

    @property
    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch of one rank; setting it keeps the accumulation steps."""
        return self._engine.train_micro_batch_size_per_gpu()

    @train_micro_batch_size_per_gpu.setter
    def train_micro_batch_size_per_gpu(self, value: int) -> None:
        self._engine.set_train_micro_batch_size(value)

    micro_batch_size_per_gpu = train_micro_batch_size_per_gpu  # which ludwig sets

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self._engine.gradient_accumulation_steps()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine._parts.settings, _SECTIONS.get(name, name))


class DeepSpeedEngine(Engine):
    """An `Engine` with DeepSpeed's names for what it knows and does, which the engine itself needs none of.

    Getters of single keys of the config are added below.
    """

    def load_as_deepspeed(self) -> None:
        """Have `load_checkpoint` restore neither random numbers nor the position in the data: see `exact_resume`.

        What `--resume` and `resume()` load continues exactly all the same.
        """
        self._checkpoints.follow_deepspeed()

    # ---- facts ----

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the samples of a step, those of a micro-batch of one rank, and the micro-batches of a step."""
        self._note_exception()
        follow_micro_batch()
        return self._batch.sizes

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.zero_optimization_stage() >= 3

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer states are in host memory."""
        return bool(self._parts.settings.zero_optimization.offload_optimizer.device == "cpu")

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated parameters: it was at a boundary, and no overflow skipped it."""
        return self._ended_accumulation and self.optimizer is not None and not self.optimizer.overflow

    def get_mom(self) -> list[Any]:
        """Return the momentum of each parameter group: its betas, or the momentum of SGD and its like."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in groups]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the precision of the parameters, and that in which gradients are summed."""
        named = self._parts.settings.data_types.grad_accum_dtype
        sums = torch.float32 if named is None else TORCH_DTYPES[DType(named)]
        return TORCH_DTYPES[self._parts.policy.precision.param], sums

    def optimizer_name(self) -> str | None:
        """Return the type of the config's optimizer, in lower case."""
        section = self._parts.settings.optimizer
        return None if section is None else str(section.type).lower()

    def optimizer_params(self) -> dict[str, Any] | None:
        """Return the parameters of the config's optimizer."""
        return _params_of(self._parts.settings.optimizer)

    def scheduler_name(self) -> str | None:
        """Return the type of the config's schedule."""
        section = self._parts.settings.scheduler
        return None if section is None else str(section.type)

    def scheduler_params(self) -> dict[str, Any] | None:
        """Return the parameters of the config's schedule."""
        return _params_of(self._parts.settings.scheduler)

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The client's optimizer, or what stands for the config's: see `ZeroOptimizer`."""
        return None if self.optimizer is None else self.optimizer.optimizer

    @property
    def tput_timer(self) -> ThroughputTimer:
        """What measures the samples per second of training."""
        return self._watch.throughput

    @property
    def monitor(self) -> Curves:
        """Where the curves go, also those of a script: `engine.monitor.write_events([(name, value, samples)])`."""
        return self._watch.curves

    @property
    def _config(self) -> EngineConfig:
        """The config in force, as an object with DeepSpeed's names; batch sizes may be set there."""
        return EngineConfig(self)

    @property
    def flops_profiler(self) -> ProfiledStep | None:
        """What the config's `flops_profiler` has counted; None on other ranks than 0, and before its step has ended."""
        return self._watch.profiled

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """The embeddings whose gradients are sent as sparse tensors: none, see `sparse_gradients` of the config."""
        return set()

    def loss_scale(self) -> float:
        """Return the configured loss scale, 0 for a dynamic one; `optimizer.cur_scale` is the one in force."""
        scaler = None if self.optimizer is None else self.optimizer.loss_scaler
        return 1.0 if scaler is None else 0.0 if scaler.rules.is_dynamic else scaler.scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.optimizer is not None and self.optimizer.dynamic_loss_scale

    # ---- groups ----

    @property
    def data_parallel_group(self) -> ProcessGroup | None:
        """The process group of ranks with different samples; None for a process that is alone."""
        return self._parts.group.process_group

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return int(os.environ.get(env.LOCAL_RANK.name, "0"))

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that share a layer."""
        return self._parts.mesh.sizes.tensor

    def get_data_parallel_rank(self) -> int:
        """Return this rank's number among those with different samples: which share of the data it gets."""
        return self._parts.mesh.sample_rank

    def get_model_parallel_rank(self) -> int:
        """Return this rank's number among those that share its layers."""
        tensor = self._parts.mesh.tensor
        return 0 if tensor is None else tensor.rank

    @property
    def sequence_parallel_size(self) -> int:
        """The number of ranks that have parts of the same sequences."""
        return self._parts.mesh.sizes.sequence

    def get_sequence_parallel_group(self) -> ProcessGroup:
        """Return the ranks that have parts of the same sequences. Raises: EngineError where this rank is alone."""
        sequence = self._parts.mesh.sequence
        if sequence is None or sequence.process_group is None:  # None would mean all ranks to torch
            raise EngineKeyError(
                "there is no group of sequence parallelism: each rank has whole sequences",
                hint='set "sequence_parallel_size" in the config',
            )
        return sequence.process_group

    @property
    def seq_parallel_group(self) -> ProcessGroup | None:
        """The same ranks; None where this rank is alone."""
        sequence = self._parts.mesh.sequence
        return None if sequence is None else sequence.process_group

    @property
    def checkpoint_mp_rank(self) -> int:
        """`get_model_parallel_rank()`, as DeepSpeed's names of files have it."""
        return self.get_model_parallel_rank()

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: Any, expp_rank: int) -> str:
        """Return DeepSpeed's name for the file of the states of experts, which ours have no counterpart of."""
        name = f"expp_rank_{expp_rank}_mp_rank_{self.checkpoint_mp_rank:02d}_optim_states.pt"
        return os.path.join(checkpoints_path, str(tag), name)

    def get_sequence_parallel_rank(self) -> int:
        """Return which part of every sequence this rank has."""
        sequence = self._parts.mesh.sequence
        return 0 if sequence is None else sequence.rank

    # ---- training ----

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide the boundary yourself from now on. Call it before `backward`, alike on every rank.

        Raises: EngineError without managed accumulation: each `step()` is a boundary then.
        """
        if self._parts.policy.reduction.at_step_only:
            raise EngineAssertionError(
                "set_gradient_accumulation_boundary() is not supported with managed_gradient_accumulation false",
                hint="call step() where the accumulation is to end",
            )
        self._boundary_override = is_boundary

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of an optimizer step, by the accumulation steps.

        In the middle of an accumulation the sizes change after its step, which has as many micro-batches as the losses
        so far were divided by. Raises: ConfigError when it is not a multiple of micro-batch times ranks.
        """
        self._set_batch(solve_batch(train_batch_size, self._next_batch.micro_batch_size, None, self.dp_world_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a micro-batch of one rank, at the same time as `set_train_batch_size` does.

        The accumulation steps stay. Your loader must follow.
        """
        if micro_batch_size < 1:
            raise EngineError(f"a micro-batch needs at least 1 sample, got {micro_batch_size}")
        self._set_batch(solve_batch(None, micro_batch_size, self._next_batch.accumulation_steps, self.dp_world_size))

    def scale(self, loss: Tensor, scale_wrt_gas: bool = True) -> Tensor:
        """Return `loss` such that you may call its `backward()` yourself, in place of `engine.backward(loss)`.

        It is multiplied by the loss scale and, with `scale_wrt_gas`, divided by the accumulation steps. Several scaled
        losses may be added, or go back one by one, before `step()`. Every rank must do the same.
        """
        loss_scale = self._begin_backward(loss)
        num_parts = self.gradient_accumulation_steps() if scale_wrt_gas else 1

        def begin() -> bool:
            self._backward_done = True
            return self._reduces_at_boundary()

        return self._pass.hook_loss(scaled_up(loss / num_parts, loss_scale), begin)

    def compile(
        self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, schedule: Any = None
    ) -> None:
        """Have torch.compile compile the model inside. compile_kwargs: further arguments of `torch.compile`.

        Raises: EngineError for a `schedule` of compiler passes, which DeepSpeed has.
        """
        if schedule is not None:
            raise EngineError("engine.compile(schedule=...) is not supported", hint="leave schedule out")
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        warn_of_cuda_graphs(self.module, self._sharded.units)

    def empty_partition_cache(self) -> None:
        """Shard what stage 3 keeps unsharded for a later use, and free the memory. Every rank must call it."""
        self._sharded.schedule.release_idle()
        self._empty_device_cache()

    def offload_states(
        self,
        include: Collection[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states from the device to host memory, so that something else has the memory until `reload_states()`.

        Every rank must call it, between `step()` and the next backward. include: `optim_states`, `hp_params` (masters;
        in fp32 the parameters are their own), `lp_params`, `lp_grads` and `contiguous_grad_buffer` (both are the memory
        of gradients); None: all. What is in host memory or on disk already stays, so on CPUs nothing moves. pin_memory:
        page-locked host memory, which is quicker to copy. non_blocking: for DeepSpeed's sake; the memory is free when
        the call returns. Saving and `launcher.zero.safe_get_*` work meanwhile, and forward where parameters have not
        moved. Raises: EngineError for another device, and within an accumulation.
        """
        self._note_exception()
        if not check_device(device):
            return
        if not self._sharded.units:
            raise EngineAssertionError(
                "engine.offload_states() was called without an optimizer: the engine keeps nothing",
                hint='move the model: engine.module.to("cpu")',
            )
        if self._num_summed or self._backward_done:
            raise EngineError(
                "engine.offload_states() was called with gradients that no step has used",
                hint="call it after engine.step() at the boundary of the accumulation",
            )
        kinds = kinds_of(include)
        self.synchronize_parameters()
        self._sharded.schedule.release_idle()
        pins_memory = pin_memory and self.device.type != "cpu"
        num_bytes = self._sharded.offloaded.offload(kinds, pins_memory=pins_memory)
        self._empty_device_cache()
        get_logger().debug("offload_states: %d bytes of %s are free", num_bytes, self.device)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states()` has moved. Every rank must call it before the next backward.

        non_blocking: for DeepSpeed's sake; the states are there when the call returns.
        """
        self._sharded.offloaded.reload()

    def _empty_device_cache(self) -> None:
        if self.device.type != "cpu":
            device_module(self.device).empty_cache()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Sum gradients on each rank only: a backward after this block, or `step()`, sends them.

        Raises: EngineError at ZeRO stages 2 and 3, within another such block, and for `step()` inside.
        """
        stage = self.zero_optimization_stage()
        if stage >= 2:
            raise EngineAssertionError(
                f"no_sync() cannot be used at ZeRO stage {stage}: no rank keeps full gradients to sum",
                hint="set gradient_accumulation_steps, or use stage 0 or 1",
            )
        if self._is_in_no_sync:
            raise EngineAssertionError("no_sync() was entered within no_sync()", hint="leave the inner one out")
        self._is_in_no_sync = True
        try:
            yield
        finally:
            self._is_in_no_sync = False

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Have all backward passes inside be those of one optimizer step, whose sum over the ranks ends with the block.

        At stage 1 nothing is sent before. At stages 2 and 3, where no rank keeps whole gradients, each pass is sent as
        it ends. Raises: NotImplementedError at stage 0 and for pipelines; EngineError within another such block or
        `no_sync()`, without managed accumulation, and for `step()` inside.
        """
        if not self.managed_gradient_accumulation():
            raise EngineAssertionError(
                "coalesce_grad_reduction() is not supported with managed_gradient_accumulation false",
                hint="leave it out: step() decides where the accumulation ends",
            )
        if self.zero_optimization_stage() == 0:
            raise NotImplementedError("coalesce_grad_reduction requires ZeRO stage 1, 2 or 3; use no_sync() at stage 0")
        if self._is_in_no_sync:
            raise EngineAssertionError("coalesce_grad_reduction() is nested in another such block or in no_sync()")
        self._is_in_no_sync = True
        try:
            yield
        finally:
            self._is_in_no_sync = False
        self._sharded.reducer.complete_early()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Do nothing: `backward` has begun the reductions that belong to it, and `step()` waits for them."""

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DistributedLoader | DataLoader[Any]:
        """Return a loader of this rank's micro-batches. batch_size: by default that of the config.

        route: "train"; "eval" and "predict" keep the dataset's order. data_sampler: its order and this rank's share.
        """
        options: dict[str, Any] = {
            "batch_size": batch_size or self.train_micro_batch_size_per_gpu(),
            "collate_fn": collate_fn,
            "drop_last": self._parts.settings.dataloader_drop_last,
            "num_workers": num_local_io_workers or 0,
            "pin_memory": pin_memory and self._parts.group.device.type != "cpu",
        }
        if data_sampler is not None:
            return DataLoader(dataset, sampler=data_sampler, **options)
        options.update(rank=self.get_data_parallel_rank(), world_size=self.dp_world_size)
        return build_loader(dataset, **options, shuffle=route == "train")

    # ---- weights ----

    def module_state_dict(self, exclude_frozen_parameters: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Return `state_dict(**kwargs)`, without frozen parameters where they are to be excluded. Collective."""
        rank0_only = kwargs.pop("rank0_only", False)
        return self._weights.state_dict(
            self.module, rank0_only=rank0_only, leaves_out_frozen=exclude_frozen_parameters, **kwargs
        )

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Callable[..., Any] | None = None
    ) -> Any:
        """Load the weights that are `checkpoint["module"]`. Every rank must call it, with equal values.

        Raises: EngineError for `custom_load_fn`.
        """
        if custom_load_fn is not None:
            raise EngineError(
                "load_module_state_dict(custom_load_fn=...) is not supported",
                hint="give it to load_checkpoint(), or call load_state_dict() with what it would load",
            )
        return self.load_state_dict(checkpoint["module"], strict=strict)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return the configured `stage3_gather_16bit_weights_on_model_save`."""
        return bool(self._parts.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save)

    @phase("saving the weights")
    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights that the forward reads to one file; return whether it was written.

        Every rank must call it; rank 0 holds the whole model in host memory meanwhile. A name that ends in
        `.safetensors` stands for that format, any other for `torch.save`'s. At stage 3 nothing is written, with a
        warning, unless `stage3_gather_16bit_weights_on_model_save` is set. exclude_frozen_parameters: those that are
        not trained are neither gathered nor written. Raises: EngineError, on every rank, where the file cannot be
        written.
        """
        return self._weights.save_file(
            self.module, save_dir, save_filename, leaves_out_frozen=exclude_frozen_parameters
        )

    def save_fp16_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        """Do what `save_16bit_model` does."""
        return self.save_16bit_model(save_dir, save_filename)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return on rank 0 what `save_16bit_model` writes, on others None. Every rank must call it, at stage 3."""
        if self._parts.settings.zero_optimization.stage != 3:
            raise EngineValueError(
                "_zero3_consolidated_16bit_state_dict() is for ZeRO stage 3", hint="call state_dict()"
            )
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return on rank 0 what `save_16bit_model` writes, on others None, at any stage. Every rank must call it."""
        state = self._weights.state_dict(self.module, rank0_only=True, leaves_out_frozen=exclude_frozen_parameters)
        return state if self.global_rank == 0 else None


def _params_of(section: Any) -> dict[str, Any] | None:
    """Return the parameters of a section with a type as plain data."""
    return None if section is None else dict(section.params)


def _getter(method: str, key: str) -> Callable[[DeepSpeedEngine], Any]:
    def get(self: DeepSpeedEngine) -> Any:
        value: Any = self._parts.settings
        for part in key.split("."):
            value = getattr(value, part)
        return value

    get.__name__ = get.__qualname__ = method
    get.__doc__ = f"Return `{key}` of the config in force."
    return get


for _method, _key in _GETTERS.items():
    setattr(DeepSpeedEngine, _method, _getter(_method, _key))
