"""`launch checkpoint to-fp32`, `export` and `import`: for and from other tools, by a process that has torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

import click

from launcher.base.errors import UsageError
from launcher.cli.options.command import Command, files, option
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
  launch checkpoint export checkpoints out --format deepspeed --ranks 16 --stage 3
  launch checkpoint export s3://bucket/run out --format dcp
"""
_IMPORT_EPILOG = """\b
examples:
  launch checkpoint import deepspeed_checkpoints checkpoints
  launch checkpoint import deepspeed_checkpoints checkpoints --tag global_step500
"""
_SIZE_HELP = "Most bytes of one file. Default: 5GB."
_FORMAT_HELP = (
    "hf: for Hugging Face's libraries. deepspeed: DeepSpeed's own, universal: the same for any ranks and stage. dcp,"
    " torchtitan: for torch.distributed.checkpoint. Default: hf."
)
_RANKS_HELP = "Ranks of the DeepSpeed run that loads it. Default: as many as saved."
_STAGE_HELP = "Its ZeRO stage. Default: that of the run that saved."
# Format -> the command that writes it, and the options that it has a use for.
_EXPORTS = {
    "hf": ("export", ("dtype", "config", "max_shard_size")),
    "deepspeed": ("export-deepspeed", ("ranks", "stage")),
    "universal": ("export-deepspeed", ()),
    "dcp": ("export-dcp", ()),
    "torchtitan": ("export-dcp", ()),
}
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
@option("--format", "form", type=click.Choice(list(_EXPORTS)), default="hf", help=_FORMAT_HELP)
@option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Of the weights. Default: as the model has them.")
@option("--config", metavar="PATH", help="The model's folder or its config.json. Default: beside the checkpoint.")
@option("--ranks", type=click.IntRange(min=1), metavar="N", help=_RANKS_HELP)
@option("--stage", type=click.IntRange(0, 3), metavar="0-3", help=_STAGE_HELP)
@option("--tag", "-t", help=_TAG_HELP)
@option("--max-shard-size", metavar="SIZE", help=_SIZE_HELP)
def export(
    folder: str,
    output: str,
    form: str,
    tag: str | None,
    **options: str | int | None,
) -> None:
    """Write the weights of the checkpoint in DIR to OUT, so that `from_pretrained(OUT)` opens them.

    OUT gets model.safetensors, config.json, and what there is of generation config, tokenizer and the model's own code.
    Other formats have the optimizer states too: dcp and torchtitan in the form of torch.distributed.checkpoint, as
    scripts with FSDP2 or torchtitan load it; deepspeed in DeepSpeed's files, for N ranks and one stage; universal as
    DeepSpeed's universal checkpoint, which any number of ranks loads at any stage.
    """
    command, own = _EXPORTS[form]
    for name, value in options.items():
        if value is not None and name not in own:
            needed = next(each for each, (_, names) in _EXPORTS.items() if name in names)
            raise UsageError(
                f"--{name.replace('_', '-')} goes with --format {needed}",
                hint=f"leave it out: --format {form} has no use for it",
            )
    chosen = {} if form == "hf" else {"format": form}
    _run(command, folder, output, {**chosen, "tag": tag, **{name: options[name] for name in own}})


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


def _run(
    command: str, folder: str, output: str, values: Mapping[str, str | int | None], flags: Sequence[str] = ()
) -> None:
    """Run a command of `launcher.checkpoint`, and end as it does."""
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    options += [f"--{name}" for name in flags]
    argv = [*own_argv("launcher.checkpoint.__main__"), command, *options, "--", folder, output]
    code = subprocess.run(argv).returncode
    sys.exit(code if code >= 0 else 128 - code)


COMMANDS = (to_fp32, export, import_)
