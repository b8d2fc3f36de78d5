"""Find out a model's parameters from what a user can name: a count, a config, a checkpoint, a function."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.base.errors import UsageError
from launcher.base.units import counted
from launcher.planner import weights
from launcher.planner.architectures import ArchitectureConfig, shape_of
from launcher.planner.model import ModelFacts, Parameter, TransformerShape, parse_count, typical_model, typical_shape
from launcher.transport.command import last_json, own_argv

MODEL_FACTS_MODULE = "launcher.probes.model"
FORMS = "a count such as 7B, a folder or file of a model, or module:function"
_QUIET_S = 2.0
_Waiting = Callable[[str], None]


def find_model(
    text: str, waiting: _Waiting, *, shape: TransformerShape | None = None, largest_layer_numel: int | None = None
) -> ModelFacts:
    """Return what is known of the model that `text` names.

    waiting: told what is waited for, when it takes more than 2 s. shape, largest_layer_numel: used for a plain count.
    Raises: UsageError.
    """
    path = Path(text)
    try:
        exists = bool(text) and path.exists()
    except (OSError, ValueError):  # too long or too odd for a file name
        exists = False
    count = None if exists else parse_count(text)
    if count is not None:
        return replace(typical_model(count, shape or typical_shape(count), largest_layer_numel), name=text)
    if largest_layer_numel is not None:
        raise UsageError("--largest is for a plain count", hint="leave it out: the model tells its layers")
    if exists:
        return _from_path(path, waiting)
    if ":" in text and not text.startswith(":") and not text.endswith(":"):
        return _from_child("function", text, waiting, name=text, source="built on the meta device")
    raise UsageError(f"there is no model {_shown(text)}", hint=_hint_for(text))


def given_shape(
    layers: int | None, hidden: int | None, heads: int | None, vocab: int | None
) -> TransformerShape | None:
    """Return the shape that --layers, --hidden, --heads and --vocab say, None without them. Raises: UsageError."""
    if layers is None or hidden is None or heads is None:
        if layers or hidden or heads:
            raise UsageError("--layers, --hidden and --heads go together", hint="give all three")
        if vocab is not None:
            raise UsageError("--vocab goes with --layers, --hidden and --heads", hint="give all four")
        return None
    if hidden % heads:
        message = f"--hidden {hidden} is not divisible by --heads {heads}"
        raise UsageError(message, hint="heads share the hidden size equally")
    return TransformerShape(layers, hidden, heads, vocab_size=vocab or 0)


def _from_path(path: Path, waiting: _Waiting) -> ModelFacts:
    if path.is_dir():
        return _from_folder(path, waiting)
    if path.suffix == ".safetensors" or weights.is_torch_file(path):
        return _from_weights([path], path, None, waiting)
    if path.suffix == ".json":
        return _from_config(path, waiting)
    if path.suffix == ".py":
        hint = f"name the function that builds it: {path}:build_model"
        raise UsageError("a script is not a model", where=str(path), hint=hint)
    raise UsageError("a file of this kind does not describe a model", where=str(path), hint=f"give {FORMS}")


def _shown(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."


def _hint_for(text: str) -> str:
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        return f"nothing is downloaded: fetch it first, as in hf download {_shown(text)} config.json --local-dir model"
    return f"give {FORMS}"


def _from_folder(folder: Path, waiting: _Waiting) -> ModelFacts:
    config = folder / "config.json"
    try:
        files = weights.weight_files(folder)
    except UsageError as error:
        if not config.is_file():
            raise
        facts = _from_config(config, waiting)
        return replace(facts, notes=(*facts.notes, f"counted from config.json: {error}"))
    if files:
        return _from_weights(files, folder, config if config.is_file() else None, waiting)
    if config.is_file():
        return _from_config(config, waiting)
    hint = "it needs config.json, *.safetensors or pytorch_model.bin"
    raise UsageError("no model in this folder", where=str(folder), hint=hint)


def _from_weights(files: list[Path], named: Path, config: Path | None, waiting: _Waiting) -> ModelFacts:
    shape = None if config is None else _shape(weights.read_json(config), str(config))
    if weights.is_torch_file(files[0]):
        target = json.dumps([str(path.resolve()) for path in files])
        facts = _from_child(
            "torch", target, waiting, name=str(named), source=f"tensors of {counted(len(files), 'file')}"
        )
        return replace(facts, shape=shape)
    params = weights.safetensors_parameters(files)
    return ModelFacts(str(named), f"safetensors headers of {counted(len(files), 'file')}", params, shape)


def _from_config(path: Path, waiting: _Waiting) -> ModelFacts:
    data = weights.read_json(path)
    if "weight_map" in data:  # the index of a checkpoint
        return _from_folder(path.parent, waiting)
    config = ArchitectureConfig(data, str(path))
    if not config.model_type:
        hint = "a Hugging Face config.json names it; an engine config is given with --config"
        raise UsageError("no model_type", where=str(path), hint=hint)
    if importlib.util.find_spec("transformers") is None:
        hint = "pip install transformers, or give module:function, or a count such as 7B"
        raise UsageError(
            f"transformers, which builds a {config.model_type}, is not installed", where=str(path), hint=hint
        )
    return _from_child("transformers", str(path.resolve()), waiting, name=str(path), source="built by transformers")


def _shape(data: Mapping[str, Any], where: str) -> TransformerShape | None:
    try:
        return shape_of(ArchitectureConfig(data, where))
    except UsageError:  # no transformer, or not by these names: activations are not counted
        return None


def _from_child(kind: str, target: str, waiting: _Waiting, *, name: str, source: str) -> ModelFacts:
    """Ask a process of its own, which may import torch."""
    found = _ask(kind, target, waiting, name)
    if "error" in found:
        problem = found["error"]
        raise UsageError(problem["message"], where=problem["where"] or name, hint=problem["hint"])
    params = tuple(Parameter(*entry) for entry in found["params"])
    config = found["config"]
    shape = None if config is None else _shape(config, name)
    built = f"{found['class']}, {source}" if found["class"] else source
    return ModelFacts(name, built, params, shape)


def _ask(kind: str, target: str, waiting: _Waiting, name: str) -> dict[str, Any]:
    child = subprocess.Popen(
        [*own_argv(MODEL_FACTS_MODULE), kind, target],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        try:
            out, err = child.communicate(timeout=_QUIET_S)
        except subprocess.TimeoutExpired:
            waiting(f"{name}: torch reads it in a process of its own")
            out, err = child.communicate()
    finally:
        if child.poll() is None:  # Ctrl-C
            child.kill()
            child.wait()
    found = last_json(out)
    if found is not None:
        return found
    said = (err.strip().splitlines() or ["nothing"])[-1]
    hint = "the end of its standard error is shown; try: python -c 'import torch'"
    raise UsageError(f"the process that reads the model ended with {child.returncode}: {said}", where=name, hint=hint)
