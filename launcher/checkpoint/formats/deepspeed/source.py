"""A checkpoint that DeepSpeed wrote, at any stage and by any number of ranks, as a source that loading reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from launcher.base.errors import CheckpointError
from launcher.checkpoint.formats.deepspeed.files import Contents, Files, Found, tag_folder
from launcher.checkpoint.formats.deepspeed.partitioned import read_partitioned
from launcher.checkpoint.formats.deepspeed.whole import read_whole
from launcher.checkpoint.formats.source import UNKNOWN_OPTIMIZER, WEIGHT, CheckpointSource, RunState, StoredParam
from launcher.checkpoint.formats.torch_file import load, plain, read, verify_torch_file

# ---- Of a checkpoint of DeepSpeed all but parameters: counters, optimizer, schedule, loss scale, client state ----


# What DeepSpeed writes beside the client state.
_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
    "universal_checkpoint_info", "sparse_tensor_module_names",
}  # fmt: skip
# Name in a config, in lower case -> the class that takes the same steps here.
_CLASSES = {
    "adamw": "AdamW", "adagrad": "Adagrad", "sgd": "SGD", "lion": "Lion", "lamb": "Lamb", "rmsprop": "RMSprop",
    "nadam": "NAdam", "radam": "RAdam", "adamax": "Adamax", "asgd": "ASGD", "adadelta": "Adadelta", "rprop": "Rprop",
    "muon": "Muon",
}  # fmt: skip
_ADAM = {"exp_avg", "exp_avg_sq"}
# Class -> states that it has after a step.
_STATES = {"AdamW": _ADAM, "Adam": _ADAM, "NAdam": _ADAM, "RAdam": _ADAM, "Lamb": _ADAM, "Lion": {"exp_avg"}}
# States -> class, for an optimizer that the config does not name.
_BY_STATES = ((_ADAM, "AdamW"), ({"exp_avg"}, "Lion"), ({"momentum_buffer"}, "SGD"), ({"sum"}, "Adagrad"))
_NOT_HYPER_PARAMETERS = ("params", "param_names", "step", "fused", "foreach")


def run_state(files: Files, contents: Contents) -> RunState:
    """Return the state of the run that saved."""
    model = files.model()
    config = plain(model.get("ds_config")) or {}
    config = config if isinstance(config, dict) else {}
    steps = int(model["global_steps"])
    client = {key: plain(value) for key, value in model.items() if key not in _OWN}
    schedule = plain(model.get("lr_scheduler"))
    return RunState(
        global_steps=steps,
        global_samples=int(model.get("global_samples") or 0),
        micro_steps=steps * _accumulation(config, int(model.get("dp_world_size") or 1)),  # it is not saved
        skipped_steps=int(model.get("skipped_steps") or 0),
        optimizer=_optimizer(config, contents),
        groups=[_hyper_parameters(group) for group in contents.groups],
        lr_scheduler=schedule if isinstance(schedule, dict) else None,
        loss_scaler=_loss_scaler(contents.scaler, steps),
        client_state=client,
        buffers=_buffers(model),
        extra_state={name: plain(value) for name, value in _extra(model)},
        config=config,
        versions={"deepspeed": str(model["ds_version"])},
    )


def _buffers(model: Mapping[str, Any]) -> dict[str, Tensor]:
    found = ((name, model["module"].get(name)) for name in model["buffer_names"])
    return {name: load(value) for name, value in found if isinstance(value, Tensor)}


def _extra(model: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in model["module"].items() if not isinstance(value, Tensor | None))


def _hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    kept = (name for name in group if name not in _NOT_HYPER_PARAMETERS and not name.startswith("_ds_"))
    return {name: plain(group[name]) for name in kept}


def _accumulation(config: Mapping[str, Any], num_ranks: int) -> int:
    """Return micro steps of a step."""
    sizes = [
        config.get(key) for key in ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
    ]
    given, batch, micro = (size if isinstance(size, int) and size > 0 else None for size in sizes)
    if given:
        return given
    return max(1, batch // (micro * num_ranks)) if batch and micro else 1


def _optimizer(config: Mapping[str, Any], contents: Contents) -> str | None:
    """Return the class. A checkpoint does not name it: the config does, unless the script brought its own optimizer."""
    if not contents.groups:
        return None
    states = next((set(found.stored.states) for found in contents.params.values() if found.stored.states), set())
    section = config.get("optimizer") or {}
    kind, options = str(section.get("type", "")).lower(), section.get("params") or {}
    if kind == "adam":  # it means AdamW unless told otherwise
        kind = "adamw" if options.get("adam_w_mode", True) else "adam"
    named = "Adam" if kind == "adam" else _CLASSES.get(kind, section.get("type"))
    if named and (not states or states >= _STATES.get(named, set())):
        return str(named)
    found = next((name for expected, name in _BY_STATES if states >= expected), UNKNOWN_OPTIMIZER)
    return "Adam" if found == "AdamW" and contents.groups[0].get("decoupled_weight_decay") is False else found


def _loss_scaler(scaler: Any, steps: int) -> dict[str, Any] | None:
    """Return a loss scale as `LossScaler.state_dict()` has it; None where there is none or it is 1 for good."""
    state = vars(scaler) if hasattr(scaler, "cur_scale") else scaler
    if not isinstance(state, Mapping) or "cur_scale" not in state:
        return None
    scale = float(state["cur_scale"])
    if not state.get("dynamic", state.get("dynamic_loss_scale", False)) and scale == 1.0:
        return None
    return {
        "scale": scale,
        "num_steps": int(state.get("cur_iter", steps)),
        "last_overflow": int(state.get("last_overflow_iter", -1)),
        "hysteresis": int(state.get("cur_hysteresis", 1)),
    }


# ---- The checkpoint as a source ----


# Class -> our name of a state and the one that DeepSpeed's CPU kernel has.
_OTHER_NAMES = {"Adagrad": ("sum", "exp_avg_sq")}


def open_deepspeed(directory: str | Path, tag: str | None = None) -> DeepSpeedCheckpoint:
    """Open the checkpoint that DeepSpeed's `save_checkpoint(directory, tag)` wrote.

    directory: it may also be a tag's folder. tag: None: the one in `latest`. Raises: CheckpointError for one that is
    not there, is incomplete or is of a kind that is not read.
    """
    return DeepSpeedCheckpoint(tag_folder(Path(directory), tag))


class DeepSpeedCheckpoint(CheckpointSource):
    """Opened, its files' tensors are still on disk; `read` takes the bytes it needs, of the files that have them."""

    def __init__(self, folder: Path) -> None:
        """folder: of the tag. Raises: as `open_deepspeed`."""
        files = Files(folder)
        try:
            mp_size = int(files.model().get("mp_world_size") or 1)
            has_zero = files.is_stage3 or files.num_ranks or files.model().get("param_shapes") is not None
            contents = read_partitioned(files) if has_zero else read_whole(files)
            self._state = run_state(files, contents)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise files.error(
                f"it is not as DeepSpeed 0.19 writes it: {type(error).__name__}: {error}",
                "load and save it again with DeepSpeed 0.19",
            ) from error
        if mp_size > 1:
            raise files.error("DeepSpeed's checkpoints of tensor parallelism are not read", "merge its parts first")
        self._files = files
        self.tied = contents.tied  # other names of parameters -> the first
        self.num_ranks = max(1, files.num_ranks)  # that saved; at stage 0 the files do not say
        self._found = contents.params
        self._theirs = self._other_names()
        self._params = {name: self._renamed(each) for name, each in self._found.items()}

    @property
    def where(self) -> str:
        """The folder, for messages."""
        return str(self._files.folder)

    @property
    def state(self) -> RunState:
        """All but parameters and their states."""
        return self._state

    @property
    def params(self) -> Mapping[str, StoredParam]:
        """Parameters by fully qualified name; tied ones are there under the first of their names."""
        return self._params

    def read(self, key: str, name: str, start: int, out: Tensor) -> None:
        """Fill 1-D `out` with elements [start, start + len(out)) of a parameter, converted to out's dtype.

        key: "weight" (the fp32 master where the run has one), or a state's name such as "exp_avg". Raises:
        CheckpointError for files that do not have what they should.
        """
        found = self._found[name]
        if key != WEIGHT and key not in self.params[name].states:
            raise CheckpointError(f"{name} has no state {key}")
        key = self._theirs.get(key, key)
        for rank, at, begin, end in found.place.pieces(start, start + out.numel()):
            try:
                read(found.place.tensor(key, rank), at, out[begin - start : end - start])
            except (ValueError, RuntimeError) as error:
                raise self._files.error(f"the {key} of {name} that rank {rank} saved is not one: {error}") from None

    def private(self, rank: int, world_size: int) -> dict[str, Any]:
        """Return nothing: DeepSpeed saves neither random numbers nor the position in the data."""
        return {}

    def close(self) -> None:
        """Do nothing: files are open only while something of them is read."""

    def verify(self) -> None:
        """Read all files. Raises: CheckpointError for one that is damaged: `read` does not notice a flipped bit."""
        for path in self._files.paths:
            verify_torch_file(path)

    def _other_names(self) -> dict[str, str]:
        ours, theirs = _OTHER_NAMES.get(self.state.optimizer or "", ("", ""))
        is_theirs = any(theirs in found.stored.states for found in self._found.values())
        return {ours: theirs} if is_theirs else {}

    def _renamed(self, found: Found) -> StoredParam:
        ours = {theirs: ours for ours, theirs in self._theirs.items()}
        states = {ours.get(key, key): dtype for key, dtype in found.stored.states.items()}
        return replace(found.stored, states=states)
