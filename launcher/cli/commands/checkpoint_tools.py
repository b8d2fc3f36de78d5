"""`launch checkpoint to-fp32`, `export` and `import`: for and from other tools, by a process that has torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import click

from launcher.base.errors import UsageError
from launcher.cli.options.command import Command, option
from launcher.cli.options.types import files
from launcher.transport.command import own_argv

_TO_FP32_EPILOG = """\b
examples:
  launch checkpoint to-fp32 checkpoints out
  launch checkpoint to-fp32 checkpoints/global_step500 weights.safetensors
"""
_EXPORT_EPILOG = """\b
examples:
  launch checkpoint export output/checkpoint-500 model
  launch checkpoint export checkpoints model --config gpt2/ --dtype bf16
  launch checkpoint export s3://bucket/run out --format dcp
"""
_IMPORT_EPILOG = """\b
examples:
  launch checkpoint import deepspeed_checkpoints checkpoints
  launch checkpoint import deepspeed_checkpoints checkpoints --tag global_step500
"""
_SIZE_HELP = "Most bytes of one file. Default: 5GB."
_FORMAT_HELP = "hf: for Hugging Face's libraries. dcp, torchtitan: for torch.distributed.checkpoint. Default: hf."
_TAG_HELP = "The checkpoint. Default: the one that `latest` names."


@click.command("to-fp32", cls=Command, epilog=_TO_FP32_EPILOG, short_help="Write a checkpoint's weights in fp32.")
@click.argument("folder", metavar="DIR", shell_complete=files)
@click.argument("output", metavar="OUT", shell_complete=files)
@option("--tag", "-t", help=_TAG_HELP)
@option("--max-shard-size", metavar="SIZE", help=_SIZE_HELP)
@option("--safe-serialization", is_flag=True, help="Write safetensors, not files of torch.save.")
@option("--exclude-frozen-parameters", is_flag=True, help="Leave out parameters that are not trained.")
def to_fp32(
    folder: str,
    output: str,
    tag: str | None,
    max_shard_size: str | None,
    safe_serialization: bool,
    exclude_frozen_parameters: bool,
) -> None:
    """Put the weights of the checkpoint in DIR together in fp32, as `python zero_to_fp32.py DIR OUT` does.

    DIR is the folder with `latest`, or that of a tag. OUT is a folder, which gets pytorch_model.bin or, with
    --safe-serialization, model.safetensors; or a file, *.bin or *.safetensors. A few megabytes of it are in memory.
    """
    flags = {"safe_serialization": safe_serialization, "exclude_frozen_parameters": exclude_frozen_parameters}
    given = [name for name, is_set in flags.items() if is_set]
    _run("to-fp32", folder, output, {"tag": tag, "max_shard_size": max_shard_size}, given)


@click.command("export", cls=Command, epilog=_EXPORT_EPILOG, short_help="Write a checkpoint in another form.")
@click.argument("folder", metavar="DIR", shell_complete=files)
@click.argument("output", metavar="OUT", shell_complete=files)
@option("--format", "form", type=click.Choice(["hf", "dcp", "torchtitan"]), default="hf", help=_FORMAT_HELP)
@option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Of the weights. Default: as the model has them.")
@option("--config", metavar="PATH", help="The model's folder or its config.json. Default: beside the checkpoint.")
@option("--tag", "-t", help=_TAG_HELP)
@option("--max-shard-size", metavar="SIZE", help=_SIZE_HELP)
def export(
    folder: str,
    output: str,
    form: str,
    dtype: str | None,
    config: str | None,
    tag: str | None,
    max_shard_size: str | None,
) -> None:
    """Write the weights of the checkpoint in DIR to OUT, so that `from_pretrained(OUT)` opens them.

    OUT gets model.safetensors, config.json, and what there is of generation config, tokenizer and the model's own code.
    With --format dcp or torchtitan it gets weights and optimizer states in the form of torch.distributed.checkpoint,
    as scripts with FSDP2 or torchtitan load them.
    """
    if form != "hf":
        given = {"--dtype": dtype, "--config": config, "--max-shard-size": max_shard_size}
        for name, value in given.items():
            if value is not None:
                raise UsageError(
                    f"{name} goes with --format hf", hint=f"leave it out: --format {form} has no use for it"
                )
        _run("export-dcp", folder, output, {"format": form, "tag": tag})
    values = {"dtype": dtype, "config": config, "tag": tag, "max_shard_size": max_shard_size}
    _run("export", folder, output, values)


@click.command("import", cls=Command, epilog=_IMPORT_EPILOG, short_help="Take over a checkpoint of DeepSpeed.")
@click.argument("folder", metavar="SRC", shell_complete=files)
@click.argument("output", metavar="DST", shell_complete=files)
@option("--tag", "-t", help=_TAG_HELP)
def import_(folder: str, output: str, tag: str | None) -> None:
    """Write the checkpoint of DeepSpeed in SRC into DST, a folder of checkpoints, under the same tag.

    SRC is the folder with `latest`, or that of a tag. Any ZeRO stage and number of ranks is read, without DeepSpeed and
    without running what its files ask for. One parameter is in memory at a time.
    """
    _run("import", folder, output, {"tag": tag})


def _run(command: str, folder: str, output: str, values: dict[str, str | None], flags: Sequence[str] = ()) -> None:
    """Run a command of `launcher.checkpoint`, and end as it does."""
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    options += [f"--{name}" for name in flags]
    argv = [*own_argv("launcher.checkpoint.__main__"), command, *options, "--", folder, output]
    code = subprocess.run(argv).returncode
    sys.exit(code if code >= 0 else 128 - code)


COMMANDS = (to_fp32, export, import_)
