"""What scripts call of an engine to read what it has trained, to save and to load."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.base.progress import phase
from launcher.checkpoint_files.place import place_of
from launcher.engine.checkpoints import Checkpoints, LoadOptions
from launcher.engine.data import keeps_position
from launcher.engine.export import WeightExport
from launcher.engine.offloaded import OffloadedStates
from launcher.engine.resume import Resumed, begin_in_folder, resume_from
from launcher.engine.state import load_state


class SavesCheckpoints(WeightExport):
    """The part of `Engine` that saves and loads. Every rank must call what saves or loads, with the same arguments."""

    global_rank: int
    global_steps: int
    client_state: dict[str, Any]
    training_dataloader: Any
    _checkpoints: Checkpoints
    _offloaded: OffloadedStates
    _resumed: Resumed | None

    def synchronize_parameters(self) -> None:
        """Wait until every parameter holds the last step's update; `state_dict()` and forward do it themselves.

        With `delayed_update` neither does: they see the update before the last, until this or the next `step()`. Then
        every rank must call it.
        """
        if self._parts.sharded.delayed is not None:
            self._parts.sharded.delayed.write_back()
        self._wait_for_parameters()

    def _wait_for_parameters(self) -> None:
        for unit in self._parts.sharded.units:
            unit.params.wait()

    def state_dict(self, *args: Any, rank0_only: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Return the model's state dict in host memory, in plain tensors of its own.

        At stage 3 every rank must call it: units are gathered and copied one after another, so that the device never
        holds the whole model. rank0_only: the other ranks copy nothing and get an empty dictionary. Other arguments are
        those of `nn.Module.state_dict`.
        """
        self._wait_for_parameters()
        is_wanted = self.global_rank == 0 or not rank0_only
        return self._whole_state(args, kwargs, is_wanted=is_wanted)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights into the model, this rank's own `state_dict`, and have masters and shards follow.

        Every rank must call it, with equal values. At stage 3 units are gathered, loaded and sharded one after another.
        Raises: EngineError for `assign`, and what `nn.Module.load_state_dict` does.
        """
        if assign:
            raise EngineError(
                "load_state_dict(assign=True) would put other parameters in place of those that the engine trains",
                hint="leave assign out, which copies the values, or load before initialize()",
            )
        self.synchronize_parameters()
        self._offloaded.reload()
        return load_state(self.module, state_dict, strict=strict)

    @phase("saving a checkpoint")
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that a run needs to continue to `save_dir/tag`; return True. Every rank must call it.

        tag: by default `global_step{N}`. client_state: values of the script that are saved too: plain data, tensors,
        arrays. save_latest: `load_checkpoint` without a tag loads this one. With "async" in the config's `checkpoint`
        section the training waits for a copy in host memory only; see `wait_for_checkpoint`.

        Until the last file is on the disk, the checkpoint that was there before stays as it is. Raises: CheckpointError
        on every rank where one of them cannot save, or does not call it within a minute.
        """
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._checkpoints.save(
            place_of(save_dir),
            name,
            client_state or {},
            saves_latest=save_latest,
            excludes_frozen=exclude_frozen_parameters,
        )
        return True

    @phase("loading a checkpoint")
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from a checkpoint, of any number of ranks, stage and offload. Every rank must call it.

        tag: by default what `latest` names. Returns the checkpoint's folder and the client state; (None, None)
        where there is no `latest`. custom_load_fn: called as `custom_load_fn(src=weights by name, dst=model)` in place
        of loading the parameters. Raises: CheckpointError on every rank, with the file that is damaged or what does
        not fit.
        """
        self._offloaded.reload()
        return self._checkpoints.load(
            place_of(load_dir),
            None if tag is None else str(tag),
            LoadOptions(
                is_strict=load_module_strict,
                loads_optimizer=load_optimizer_states and not load_module_only,
                loads_schedule=load_lr_scheduler_states,
                loads_module_only=load_module_only,
                custom_load=custom_load_fn,
            ),
        )

    @phase("waiting for a checkpoint to be saved")
    def wait_for_checkpoint(self) -> None:
        """Wait until an asynchronous save has ended. Raises: CheckpointError where it has failed."""
        self._checkpoints.wait()

    def resume(self, folder: str | os.PathLike[str] | None = None) -> dict[str, Any] | None:
        """Load the newest checkpoint that is good, if this start is to continue. Every rank must call it.

        folder: by default `checkpoint.folder` of the config, whose checkpoint `initialize` has loaded already. Returns
        the client state; None where this start begins anew. Raises: CheckpointError, and EngineError without a folder.
        """
        if folder is not None:
            self._resumed = resume_from(self, os.fspath(folder), self._parts.mesh.world)
        elif self._parts.settings.checkpoint.folder is None:
            raise EngineError("engine.resume() names no folder", hint="give one, or set checkpoint.folder")
        return None if self._resumed is None else self._resumed.client_state

    def continue_data(self, position: Any) -> None:
        """Have the loader continue at the position that a checkpoint holds; None: it holds none.

        Raises: CheckpointError where it is not that of such a loader.
        """
        loader = self.training_dataloader
        if position is None or loader is None:
            return
        if keeps_position(loader):
            loader.load_state_dict(position)
        elif self.global_rank == 0:
            get_logger().warning(
                "the checkpoint holds a position in the data, which %s cannot take over, without load_state_dict(): it"
                " is read from its beginning",
                type(loader).__name__,
            )

    def begin_in_folder(self) -> None:
        """Load what this start continues from, where the config names a folder: the end of `initialize`."""
        folder = self._parts.settings.checkpoint.folder
        self._resumed = begin_in_folder(self, self._parts.sharded, folder, self._parts.mesh.world)
