"""The engine's part in checkpoints: what of a run is saved beside its parameters, and where that goes when loaded."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import platform
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from launcher.base import env
from launcher.base.errors import CheckpointError
from launcher.base.log import get_logger
from launcher.checkpoint.exchange import Exchange, error_text
from launcher.checkpoint.formats.native import NativeSource
from launcher.checkpoint.formats.open import is_checkpoint, open_source
from launcher.checkpoint.formats.source import WEIGHT, CheckpointSource, RunState
from launcher.checkpoint.load import READ_TIMEOUT_S, Target, groups_for, load_parameters
from launcher.checkpoint.saving.contents import Copies, CopyRoom, UnitContents, contents_of, writer_index
from launcher.checkpoint.saving.save import (
    BackgroundSaver,
    Encoded,
    RankData,
    Save,
    SaveRequest,
    SharedData,
    wait_for_saves,
)
from launcher.checkpoint.values.rng import restore_rng, rng_state
from launcher.checkpoint_files.folder import LATEST, latest_tag
from launcher.checkpoint_files.manifest import check_tag
from launcher.checkpoint_files.place import Place
from launcher.comm.torch_internals import non_persistent_buffers
from launcher.engine import stages
from launcher.engine.data import keeps_position
from launcher.engine.optimizer import ZeroOptimizer
from launcher.engine.parts import EngineParts
from launcher.parallel.expert.placement import remote_expert_parameters
from launcher.zero.gathered import GatheredParameters
from launcher.zero.states import TORCH_DTYPES

_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class LoadOptions:
    """What of a checkpoint is loaded."""

    is_strict: bool  # every parameter must be there
    loads_optimizer: bool  # its states, groups and loss scale
    loads_schedule: bool
    loads_module_only: bool  # no counters, random numbers or position in the data
    custom_load: Callable[..., Any] | None = None


@dataclass(frozen=True)
class _OfModules:
    """What the modules of a model hold beside parameters, by key of the state dict; and the position in the data."""

    buffers: dict[str, Any]
    extra_state: dict[str, Any]
    position: Any


class SavedEngine(Protocol):
    """What a checkpoint needs of an engine beside its parts: what changes while it trains."""

    module: nn.Module
    global_steps: int
    global_samples: int
    optimizer: ZeroOptimizer | None
    lr_scheduler: Any
    training_dataloader: Any

    @property
    def complete_micro_steps(self) -> int: ...

    @property
    def skipped_steps(self) -> int: ...

    def take_counters(self, state: RunState) -> None: ...

    def continue_data(self, position: Any) -> None: ...


class Checkpoints:
    """Saves and loads one engine. Every rank must call each method, with the same arguments."""

    def __init__(self, engine: SavedEngine, parts: EngineParts, after_commit: Callable[[Place], None]) -> None:
        """after_commit: called with the folder of each checkpoint that is saved, on the rank that can remove others."""
        self._engine = cast("SavedEngine", weakref.proxy(engine))  # an engine that is dropped is freed at once
        self._after_commit = after_commit
        self._parts = parts
        self._section = parts.settings.checkpoint
        self._rank, self._world_size = parts.mesh.world.rank, parts.mesh.world.world_size
        self._is_rank0 = self._rank == 0
        self._saver = BackgroundSaver(CopyRoom(parts.group.copier), is_rank0=self._is_rank0)
        self._has_warned_of_data = False
        self._is_exact = self._section.exact_resume is not False  # loads restore random numbers and the place in data

    # ---- save ----

    def save(
        self, root: Place, tag: str, client_state: Mapping[str, Any], *, saves_latest: bool, excludes_frozen: bool
    ) -> None:
        """Save. With `checkpoint.async` this returns as soon as copies are taken. Raises: CheckpointError."""
        self._saver.wait()
        exchange = Exchange(self._parts.mesh.world, "save_checkpoint")
        if self._parts.sharded.delayed is not None or self._parts.mesh.pipeline is not None:
            exchange.all_succeeded(None)  # what follows is collective then: a rank that saves alone would hang in it
        self._parts.sharded.synchronize_parameters()
        saving = Save(self._request(root, tag, saves_latest), exchange, self._parts.group.copier)
        try:
            data, shared = self._collected(client_state, excludes_frozen=excludes_frozen)
        except Exception as error:
            saving.agree(error_text(error))  # raises on every rank
            raise
        saving.agree()
        if not self._section.asynchronous:
            self._write(saving, data, shared)
            return
        copies, failure = None, None
        try:
            copies = self._saver.room.copy(data.contents)
        except Exception as error:  # noqa: BLE001  # no memory, a disk: the other ranks wait for this one's report
            failure = error_text(error)
        self._saver.start(functools.partial(self._write, saving, data, shared, copies, failure))

    def _collected(self, client_state: Mapping[str, Any], *, excludes_frozen: bool) -> tuple[RankData, SharedData]:
        """Return what this rank saves. Tensors of contents are live. Raises: CheckpointError, what modules raise."""
        model, copies = self._engine.module, self._section.asynchronous
        facts, of_modules = self._of_modules()
        state = vars(self._run_state(client_state, of_modules))
        run = Encoded.of(state, "the run's state", copies=copies, pickles=self._section.pickle_client_state)
        private = Encoded.of(self._private(of_modules.position), f"rank {self._rank}", copies=copies)
        params = {**dict(model.named_parameters()), **remote_expert_parameters(model)}
        excluded = {name for name, param in params.items() if excludes_frozen and not param.requires_grad}
        data = RankData(writer_index(self._parts.mesh), self._contents(excluded), private)
        return data, SharedData(run, {**facts, "excluded": sorted(excluded)})

    def _write(
        self,
        saving: Save,
        data: RankData,
        shared: SharedData,
        copies: Copies | None = None,
        failure: str | None = None,
    ) -> None:
        """Write, maybe in a thread that outlives the engine. failure: why this rank has nothing to write."""
        path = saving.write(data, shared, copies, failure)
        if self._is_node_leader if self._section.use_node_local_storage else self._is_rank0:
            self._after_commit(path)

    @property
    def _is_node_leader(self) -> bool:
        return os.environ.get(env.LOCAL_RANK.name, "0") == "0"

    def wait(self) -> None:
        """Wait for an asynchronous save. Raises: CheckpointError where it has failed, once."""
        self._saver.wait()
        error = self._saver.take_error()
        if error is not None:
            raise error

    def end(self) -> None:
        """Wait for an asynchronous save at the end of the engine: what went wrong has been said."""
        self._saver.wait()

    def _request(self, root: Place, tag: str, saves_latest: bool) -> SaveRequest:
        return SaveRequest(
            root,
            tag,
            self._engine.global_steps,
            saves_latest,
            self._section.tag_validation,
            self._section.use_node_local_storage,
            self._is_node_leader,
            has_deepspeed=self._section.format == "deepspeed",
        )

    def _contents(self, excluded: set[str]) -> list[UnitContents]:
        sharded, optimizer = self._parts.sharded, self._engine.optimizer
        for unit in sharded.units:
            if (lost := unit.find_lost()) is not None:
                raise lost
            unit.sync_external_writes()
        return contents_of(
            self._engine.module,
            sharded.units,
            None if optimizer is None else optimizer.flat,
            self._parts.mesh,
            is_wanted=lambda name: name not in excluded,
        )

    def _run_state(self, client_state: Mapping[str, Any], of_modules: _OfModules) -> RunState:
        engine, optimizer = self._engine, self._engine.optimizer
        scaler = None if optimizer is None else optimizer.loss_scaler
        schedule = engine.lr_scheduler
        return RunState(
            global_steps=engine.global_steps,
            global_samples=engine.global_samples,
            micro_steps=engine.complete_micro_steps,
            skipped_steps=engine.skipped_steps,
            optimizer=None if optimizer is None else optimizer.flat.name,
            groups=[] if optimizer is None else optimizer.flat.saved_groups(),
            lr_scheduler=schedule.state_dict() if hasattr(schedule, "state_dict") else None,
            loss_scaler=None if scaler is None else dict(scaler.state_dict()),
            client_state=dict(client_state),
            buffers=of_modules.buffers,
            extra_state=of_modules.extra_state,
            config=self._parts.raw_config,
            versions={"torch": str(torch.__version__), "python": platform.python_version()},
        )

    def _private(self, position: Any) -> dict[str, Any]:
        """Return what only this rank has; `of_world` is of use to as many ranks only."""
        engine, optimizer = self._engine, self._engine.optimizer
        return {
            "rng": rng_state(self._parts.group.device),
            "data": position,
            "of_world": {
                "optimizer": {} if optimizer is None else optimizer.flat.rank_state(),
                "buffers": _buffers_of(engine.module),
            },
        }

    def _position(self) -> Any:
        """Return how far this rank is in the data; None, with a warning, where its loader cannot say."""
        loader, problem = self._engine.training_dataloader, ""
        if loader is None:
            return None
        if not keeps_position(loader):
            problem = "it has no state_dict() and load_state_dict()"
        else:
            state = loader.state_dict()
            try:
                Encoded.of(state, "its state_dict()", copies=False)
            except CheckpointError as error:
                problem = str(error)
            else:
                return state
        if self._is_rank0 and not self._has_warned_of_data:
            get_logger().warning(
                "the position in the data is not saved: engine.training_dataloader is a %s, and %s. A run that"
                " continues reads it from its beginning; the loader of initialize(training_data=...) knows its place",
                type(loader).__name__,
                problem,
            )
        self._has_warned_of_data = True
        return None

    def _of_modules(self) -> tuple[dict[str, Any], _OfModules]:
        """Return plain facts for readers, and what modules hold beside parameters, of all stages. Collective.

        Raises: what modules raise; CheckpointError on all ranks of a pipeline.
        """
        engine, pipeline, error = self._engine, self._parts.mesh.pipeline, None
        buffers, extra_state, data = {}, {}, {}
        try:
            buffers, extra_state = _buffers_of(engine.module), _extra_state_of(engine.module)
            data["position"] = self._position()  # a pipeline's is that of its first rank: others may read nothing
        except Exception as raised:  # noqa: BLE001  # the other stages wait for this one
            error = raised
        stages.check_all(pipeline, error)
        names = {param: name for name, param in engine.module.named_parameters()}
        order, trained = (dict.fromkeys(each) for each in (names.values(), _in_groups(names, engine.optimizer)))
        tied, buffers, extra_state, order, trained, data = stages.joined_mappings(
            pipeline, _tied_names(engine.module), buffers, extra_state, order, trained, data
        )
        facts = {
            "stage": int(self._parts.settings.zero_optimization.stage),
            "precision": str(TORCH_DTYPES[self._parts.policy.precision.param]).removeprefix("torch."),
            "tied": tied,
            "buffers": sorted(buffers),
            "order": list(order),
            "order_of_optimizer": list(trained),
            "expert_parallel": 1 if self._parts.mesh.expert is None else self._parts.mesh.expert.world_size,
        }
        return facts, _OfModules(buffers, extra_state, data["position"])

    # ---- load ----

    def follow_deepspeed(self) -> None:
        """Have loads restore neither random numbers nor the position in the data, unless the config says it.

        Scripts for DeepSpeed seed and skip themselves: what they have had would be skipped twice.
        """
        self._is_exact = self._section.exact_resume is True

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Have loads within the block restore both, unless the config says that they must not."""
        before, self._is_exact = self._is_exact, self._section.exact_resume is not False
        try:
            yield
        finally:
            self._is_exact = before

    def load(self, root: Place, tag: str | None, options: LoadOptions) -> tuple[str | None, dict[str, Any] | None]:
        """Load; returns the checkpoint's folder and the client state, or None twice where there is no `latest`.

        Raises: CheckpointError, on every rank.
        """
        self._parts.sharded.offloaded.reload()
        self._saver.wait()
        wait_for_saves()  # of other engines: what is to be loaded may be theirs
        exchange = Exchange(self._parts.mesh.world, "load_checkpoint")
        tag = self._agreed_tag(exchange, root, tag)
        if tag is None:
            return None, None
        source = self._opened(exchange, root / tag)
        try:
            self._load_from(source, exchange, options)
            self._agree(exchange, lambda: self._continue(source, options))
            exchange.finish()
            return str(root / tag), dict(source.state.client_state)
        finally:
            source.close()

    def _agreed_tag(self, exchange: Exchange, root: Place, tag: str | None) -> str | None:
        """Return the tag that all ranks asked for, or that `latest` names for rank 0."""
        said = exchange.gather(tag)
        plan: list[Any] = [None, None]
        if said is not None:
            try:
                if any(each != said[0] for each in said):
                    raise CheckpointError(f"ranks load different tags: {', '.join(map(str, dict.fromkeys(said)))}")
                plan[0] = _tag_in(root) if tag is None else check_tag(tag)
            except CheckpointError as error:
                plan[1] = str(error)
        found, refused = exchange.broadcast(plan)
        if refused:
            raise CheckpointError(refused, where=str(root))
        if found is None and exchange.rank == 0:
            get_logger().warning("there is no file %s: no checkpoint was loaded", root / LATEST)
        return None if found is None else str(found)

    def _opened(self, exchange: Exchange, folder: Place) -> CheckpointSource:
        source, error = None, None
        try:
            source = open_source(folder)
            if isinstance(source, NativeSource):
                source.unpickle = pickle.loads if self._section.pickle_client_state else _refuse_pickle
            # Read now: every rank can, or all raise together.
            source.state, source.params, source.private(exchange.rank, exchange.world_size)
        except Exception as raised:  # noqa: BLE001  # whatever it is: the other ranks wait for this one
            error = error_text(raised)
        failed = exchange.all_succeeded(error, timeout_s=READ_TIMEOUT_S)
        if source is None or failed:
            if source is not None:
                source.close()
            raise CheckpointError(failed or "it cannot be read")
        return source

    def _load_from(self, source: CheckpointSource, exchange: Exchange, options: LoadOptions) -> None:
        engine, sharded = self._engine, self._parts.sharded
        sharded.synchronize_parameters()
        sharded.schedule.reset()
        sharded.reducer.discard()
        optimizer = engine.optimizer if options.loads_optimizer else None
        is_custom = options.custom_load is not None
        states = None if optimizer is None else optimizer.flat
        others = stages.names_of_others(self._parts.mesh.pipeline, engine.module)
        target = Target(engine.module, sharded.units, states, loads_weights=not is_custom, names_of_others=others)
        load_parameters(source, target, exchange, is_strict=options.is_strict and not is_custom)
        if options.custom_load is not None:
            self._load_custom(source, exchange, options.custom_load)

    def _agree(self, exchange: Exchange, load: Callable[[], None]) -> None:
        """Load something on every rank. Raises: CheckpointError on all of them where one cannot."""
        said, raised = None, None
        try:
            load()
        except Exception as error:  # noqa: BLE001  # a schedule's, a module's: the other ranks must not train without
            said, raised = error_text(error), error
        failed = exchange.all_succeeded(said, timeout_s=READ_TIMEOUT_S)
        if failed:
            raise CheckpointError(f"what belongs to the model and its optimizer cannot be loaded: {failed}") from raised

    def _load_custom(self, source: CheckpointSource, exchange: Exchange, custom_load: Callable[..., Any]) -> None:
        """Have the script put the weights into the model: it gets them all, in host memory."""
        model, weights = self._engine.module, dict(source.state.buffers)

        def read() -> None:
            for name, stored in source.params.items():
                weights[name] = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
                source.read(WEIGHT, name, 0, weights[name].view(-1))

        def load() -> None:
            custom_load(src=weights, dst=model)

        self._agree(exchange, read)  # to gather is collective
        with GatheredParameters(list(model.parameters()), modifier_rank=0):
            self._agree(exchange, load)  # within: to leave the block is collective too

    def _continue(self, source: CheckpointSource, options: LoadOptions) -> None:
        """Take over buffers, and counters, schedule, loss scale, random numbers and the position in the data."""
        engine, state = self._engine, source.state
        _load_buffers(engine.module, source, self._rank, self._world_size)
        if options.loads_module_only:
            return
        private = source.private(self._rank, self._world_size)
        has_schedule = state.lr_scheduler is not None and hasattr(engine.lr_scheduler, "load_state_dict")
        if options.loads_schedule and has_schedule:
            engine.lr_scheduler.load_state_dict(state.lr_scheduler)
        optimizer = engine.optimizer
        if optimizer is not None and options.loads_optimizer:  # after the schedule: rates the script has set stay
            optimizer.flat.load_groups(groups_for(source, optimizer.flat) or state.groups)
            optimizer.flat.load_rank_state(private.get("of_world", {}).get("optimizer", {}))
            if optimizer.loss_scaler is not None and state.loss_scaler is not None:
                optimizer.loss_scaler.load_state_dict(state.loss_scaler)
        engine.take_counters(state)
        if not self._is_exact:
            if self._is_rank0 and self._section.exact_resume is None:
                get_logger().info(
                    "random numbers and the position in the data are as they were, not those of the checkpoint, as with"
                    ' DeepSpeed: "exact_resume" in "checkpoint" of the config restores them'
                )
            return
        engine.continue_data(private.get("data"))
        if "rng" in private:
            restore_rng(private["rng"], self._parts.group.device)


def _tag_in(root: Place) -> str | None:
    """Return the tag that `latest` names; "" where the folder is itself a checkpoint, as other formats have it."""
    tag = latest_tag(root)
    return "" if tag is None and is_checkpoint(root) else tag


# ---- buffers ----


def _buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the state dict."""
    left_out = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in non_persistent_buffers(module)
    }
    return {
        name: buffer.detach() for name, buffer in model.named_buffers(remove_duplicate=False) if name not in left_out
    }


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of parameters that have several, each with the first one."""
    first: dict[Tensor, str] = {}
    tied = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(param, name) != name:
            tied[name] = first[param]
    return tied


def _in_groups(names: Mapping[nn.Parameter, str], optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Return the names of parameters in the order of the optimizer's groups: DeepSpeed's files have no names."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [names[param] for group in groups for param in group["params"] if param in names]


def _extra_state_of(model: nn.Module) -> dict[str, Any]:
    """Return what modules with a `get_extra_state` of their own return, by key of the state dict."""
    return {
        f"{prefix}.{_EXTRA_STATE}" if prefix else _EXTRA_STATE: module.get_extra_state()
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _refuse_pickle(_: bytes) -> Any:
    raise CheckpointError(
        "the client state has objects that were pickled, and to read these runs code",
        hint='set "pickle_client_state" in "checkpoint" of the config where you trust the checkpoint',
    )


def _overwrite(buffer: Tensor, value: Tensor) -> None:
    """Copy a value of the same shape, as bytes where that can be: torch copies no integers of fewer than 8 bits."""
    if buffer.dtype == value.dtype and buffer.is_contiguous():
        buffer, value = (each.view(-1).view(torch.uint8) for each in (buffer, value.contiguous()))
    buffer.copy_(value)


def _load_buffers(model: nn.Module, source: CheckpointSource, rank: int, world_size: int) -> None:
    """Load buffers, this rank's own where it saved some, and extra state."""
    own = source.private(rank, world_size).get("of_world", {}).get("buffers", {})
    saved = {**source.state.buffers, **own}
    with torch.no_grad():
        for name, buffer in _buffers_of(model).items():
            if name in saved:
                if saved[name].shape != buffer.shape:  # `copy_` would spread one value over many
                    shapes = f"{list(saved[name].shape)} in the checkpoint, {list(buffer.shape)} in the model"
                    raise CheckpointError(f"the buffer {name} has the shape {shapes}")
                _overwrite(buffer, saved[name])
            elif name in source.params:  # of a format that keeps buffers as it keeps parameters
                read = torch.empty(buffer.numel(), dtype=buffer.dtype)
                source.read(WEIGHT, name, 0, read)
                buffer.copy_(read.view(buffer.shape))
    for prefix, module in model.named_modules():
        key = f"{prefix}.{_EXTRA_STATE}" if prefix else _EXTRA_STATE
        if key in source.state.extra_state:
            module.set_extra_state(source.state.extra_state[key])
