"""The command-line arguments that training scripts share."""

from __future__ import annotations

import argparse
from typing import Any

_LOCAL_RANK = ("--local_rank", "--local-rank")  # DeepSpeed's spelling, and that of torch.distributed.launch


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed [CONFIG]` and `--deepspeed_config CONFIG` to `parser`, and accept `--local_rank N`.

    Both styles scripts use work: `--deepspeed ds_config.json`, and the flag `--deepspeed` beside
    `--deepspeed_config ds_config.json`. Pass the parsed namespace to `launcher.initialize(args=...)`.
    Options the parser already has are left alone; so is a `--local_rank` that the script adds after this call, because
    ours is added when `parser` parses. Returns the same parser.
    """
    group = parser.add_argument_group("ZeRO engine")
    known = parser._option_string_actions
    if "--deepspeed" not in known:
        group.add_argument(
            "--deepspeed",
            nargs="?",
            const=True,
            default=False,
            metavar="CONFIG",
            help="train through the ZeRO engine, with this config file (JSON or YAML)",
        )
    if "--deepspeed_config" not in known:
        group.add_argument("--deepspeed_config", default=None, metavar="CONFIG", help="config file")
    _add_when_parsing(parser, group)
    return parser


def _add_when_parsing(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """Let `parser` take `--local_rank` and `--local-rank`, unless it has an option of either name by then."""
    parse_known_args = parser.parse_known_args

    def with_local_rank(*args: Any, **kwargs: Any) -> Any:
        if not any(spelling in parser._option_string_actions for spelling in _LOCAL_RANK):
            group.add_argument(
                *_LOCAL_RANK,
                type=int,
                default=-1,
                metavar="N",
                help="rank on this node, for launchers that pass it; the environment's LOCAL_RANK wins",
            )
        return parse_known_args(*args, **kwargs)

    parser.parse_known_args = with_local_rank  # type: ignore[method-assign]  # parse_args calls it, too
