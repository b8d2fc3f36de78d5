"""`python -m launcher.probes.model KIND TARGET`: the parameters of a model, as one line of JSON.

`launch estimate` runs this in a process of its own, because the command line never imports torch, and because it runs
the user's code. KIND is `function` (TARGET `module:name` or `file.py:name`), `transformers` (a config.json or its
folder) or `torch` (files that `torch.save` wrote, as a JSON list). Models are built on the meta device: no memory.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import pickle
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.base.errors import LauncherError, UsageError
from launcher.checkpoint.formats.torch_file import load_safely
from launcher.sharding.layout import unsharded_numel

_STATE_DICT_KEYS = ("module", "model", "state_dict")


def describe(model: nn.Module) -> dict[str, Any]:
    """Return name, size and trainability of each parameter, tied ones once, and the model's config if it has one."""
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    data = to_dict() if callable(to_dict) else None
    params = [[name, unsharded_numel(param), param.requires_grad] for name, param in model.named_parameters()]
    plain = json.loads(json.dumps(data, default=str)) if isinstance(data, Mapping) else None
    return {"class": type(model).__name__, "params": params, "config": plain}


def from_function(target: str) -> nn.Module:
    """Call the function that `module:name` names and return the module it builds. Raises: UsageError."""
    module_name, _, name = target.rpartition(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = _import(module_name)
        built: Any = getattr(module, name, None)
        if built is None:
            raise UsageError(f"{module_name} has no {name}", where=target, hint="name a function that returns a model")
        if not isinstance(built, nn.Module):
            with torch.device("meta"):
                built = built()
    except LauncherError:
        raise
    except BaseException as error:  # whatever the user's code raises is shown to the user
        raise UsageError(_said(error), where=_place(error) or target, hint=_hint(error)) from error
    if not isinstance(built, nn.Module):
        hint = "the function has to return a torch.nn.Module"
        raise UsageError(f"{name} gave a {type(built).__name__}, no model", where=target, hint=hint)
    return built


def _import(name: str) -> Any:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name)
    if not path.is_file():
        raise UsageError("there is no such file", where=name, hint="check the path")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError("cannot be imported", where=name, hint="it has to be a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _said(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _hint(error: BaseException) -> str:
    if isinstance(error, ImportError):
        return "run this where Python finds the module, or give path/to/file.py:function"
    if isinstance(error, TypeError):
        return "the function is called without arguments, on the meta device"
    return "correct the function; it is run on the meta device, where tensors have no values"


def _place(error: BaseException) -> str | None:
    """Return file and line of the last frame that is the user's: not ours, Python's or a package's."""
    others = (__file__, "<", os.path.dirname(os.__file__) + os.sep)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None


def from_transformers(target: str) -> nn.Module:
    """Build the model class that a Hugging Face config names. Nothing is downloaded. Raises: UsageError."""
    try:
        transformers = importlib.import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(target, local_files_only=True)
        names = getattr(config, "architectures", None) or []
        found = getattr(transformers, str(names[0]), None) if names else None
        with torch.device("meta"):
            if isinstance(found, type):
                built: Any = found(config)
            else:
                built = transformers.AutoModel.from_config(config)
    except Exception as error:  # the library raises all kinds for a config it does not know
        raise UsageError(f"transformers cannot build it: {_said(error)}", where=target) from error
    if not isinstance(built, nn.Module):
        raise UsageError("transformers built no torch module", where=target)
    return built


def from_torch_files(paths: list[str]) -> dict[str, Any]:
    """Return the tensors of files that `torch.save` wrote. No code in them is run. Raises: UsageError."""
    params: dict[str, int] = {}
    seen: set[tuple[int, int]] = set()
    for path in paths:
        for name, tensor in _state_dict(path).items():
            if not isinstance(tensor, torch.Tensor):
                continue
            key = (tensor.data_ptr(), tensor.numel())
            if key not in seen:  # tied parameters share one storage
                params[name] = tensor.numel()
                seen.add(key)
    if not params:
        raise UsageError("no tensors by name", where=paths[0], hint="give the file that holds the state dict")
    return {"class": "", "params": [[name, numel, True] for name, numel in params.items()], "config": None}


def _state_dict(path: str) -> Mapping[str, Any]:
    try:
        try:
            data: Any = load_safely(path, is_mapped=True)
        except RuntimeError:  # the form before torch 1.6 cannot be mapped: it is read whole
            data = load_safely(path, is_mapped=False)
    except pickle.UnpicklingError:
        hint = "give config.json or module:function, or save it as safetensors"
        raise UsageError("it holds more than tensors, and code in it is not run", where=path, hint=hint) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise UsageError(f"no file of torch.save: {_said(error)}", where=path, hint="copy the file again") from None
    for key in _STATE_DICT_KEYS:
        inner = data.get(key) if isinstance(data, Mapping) else None
        if isinstance(inner, Mapping):
            return inner
    return data if isinstance(data, Mapping) else {}


def facts_of(kind: str, target: str) -> dict[str, Any]:
    """Return the facts, or what is wrong under `error`."""
    try:
        if kind == "torch":
            return from_torch_files(json.loads(target))
        return describe(from_function(target) if kind == "function" else from_transformers(target))
    except UsageError as error:
        return {"error": vars(error.diagnostics[0])}


def main() -> None:
    """Print the facts about the model that the two arguments name."""
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is not the answer
        facts = facts_of(*sys.argv[1:])
    sys.stdout.write("\n" + json.dumps(facts) + "\n")
