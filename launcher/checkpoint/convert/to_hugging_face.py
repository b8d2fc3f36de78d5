"""`python -m launcher.checkpoint export`: a checkpoint's weights as a folder that Hugging Face's libraries open."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from launcher.base.errors import UsageError
from launcher.checkpoint.values.tree import dtype_name
from launcher.checkpoint.zero_to_fp32 import DEFAULT_SHARD_SIZE, open_checkpoint, parse_size, write_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MODEL_CONFIG = "config.json"
# What Hugging Face's libraries read beside the weights: generation, tokenizers, processors, a model's own code.
_COMPANIONS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "chat_template.*", "*processor_config.json", "configuration_*.py", "modeling_*.py", "tokenization_*.py",
    "*processing_*.py",
)  # fmt: skip
_DTYPE_NAMES = ("float32", "float16", "bfloat16")
_DTYPE_KEYS = ("dtype", "torch_dtype")  # of transformers 5, and of those before


def export(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: torch.dtype | None = None,
    config: str | Path | None = None,
    *,
    tag: str | None = None,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
) -> list[str]:
    """Write a checkpoint's weights and what belongs to the model into a folder; return the names of what was copied.

    dtype: of floating-point tensors; None leaves each as the model has it. config: the model's folder or config.json;
    None looks beside the checkpoint, where the Trainer puts it. Raises: UsageError where there is no config.json,
    UnreadableCheckpoint, FileExistsError for a folder with files of other weights.
    """
    output = Path(output_dir)
    companions = _companions(Path(checkpoint_dir), config)
    tensors = open_checkpoint(checkpoint_dir, tag).tensors()
    same = {tensor: tensor.as_dtype(dtype or tensor.stored_dtype) for tensor in dict.fromkeys(tensors.values())}
    chosen = {name: same[tensor] for name, tensor in tensors.items()}
    write_weights(chosen, output / "model.safetensors", parse_size(max_shard_size))
    for name, source in companions.items():
        content = source.read_bytes()
        _replace(output / name, _with_dtype(content, dtype) if name == _MODEL_CONFIG and dtype else content)
    return list(companions)


def _companions(checkpoint: Path, config: str | Path | None) -> dict[str, Path]:
    """Return config.json and the files beside it that belong to the model, by name in the new folder."""
    given = checkpoint if config is None else Path(config)
    if given.is_file():
        return {_MODEL_CONFIG: given}
    folders = [given] if config is not None else [given, given.resolve().parent]
    found = next((folder for folder in folders if (folder / _MODEL_CONFIG).is_file()), None)
    if found is None:
        hint = "name the folder of the model, or its config.json, with --config"
        raise UsageError(f"there is no {_MODEL_CONFIG}", where=str(given), hint=hint)
    others = {path for pattern in _COMPANIONS for path in found.glob(pattern) if path.is_file()}
    return {path.name: path for path in [found / _MODEL_CONFIG, *sorted(others)]}


def _with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """Return a model's config that says the type of the weights it stands beside."""
    return (json.dumps(_replaced(json.loads(config), dtype_name(dtype)), indent=2) + "\n").encode()


def _replaced(value: Any, dtype: str) -> Any:
    """Replace the types in a config and in those of parts of the model inside it."""
    if not isinstance(value, dict):
        return value
    return {
        key: dtype if key in _DTYPE_KEYS and inner in _DTYPE_NAMES else _replaced(inner, dtype)
        for key, inner in value.items()
    }


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def run(arguments: Sequence[str]) -> None:
    """Run the command line. Raises: what `export` does."""
    parser = argparse.ArgumentParser(prog="launch checkpoint export", description=export.__doc__)
    parser.add_argument("checkpoint_dir")
    parser.add_argument("output_dir")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--config")
    parser.add_argument("--tag")
    parser.add_argument("--max_shard_size", default=DEFAULT_SHARD_SIZE)
    given = parser.parse_args(arguments)
    dtype = None if given.dtype is None else DTYPES[given.dtype]
    names = export(
        given.checkpoint_dir,
        given.output_dir,
        dtype,
        given.config,
        tag=given.tag,
        max_shard_size=given.max_shard_size,
    )
    sys.stdout.write(f"copied {', '.join(names)}\n")
