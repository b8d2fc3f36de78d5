"""The command-line arguments that training scripts share."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

_FLAG = "--deepspeed"
_SUFFIXES = (".json", ".hjson", ".yaml", ".yml")  # of files with a config
_STARTS = ("{", "eyJ", "e30")  # of a config as JSON, also in base64
_LOCAL_RANK = ("--local_rank", "--local-rank")  # DeepSpeed's spelling, and that of torch.distributed.launch


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed [CONFIG]` and `--deepspeed_config CONFIG` to `parser`, and accept `--local_rank N`.

    Both styles scripts use work: `--deepspeed ds_config.json`, and the flag `--deepspeed` beside
    `--deepspeed_config ds_config.json`. Where `parser` has positional arguments, only what looks as a config does
    belongs to `--deepspeed`: for DeepSpeed that is a flag alone. Pass the parsed namespace to
    `launcher.initialize(args=...)`.
    Options the parser already has are left alone; so is a `--local_rank` that the script adds after this call, because
    ours is added when `parser` parses. Returns the same parser.
    """
    group = parser.add_argument_group("ZeRO engine")
    known = parser._option_string_actions
    is_ours = _FLAG not in known
    if is_ours:
        group.add_argument(
            _FLAG,
            nargs="?",
            type=lambda text: text or True,  # "": see `_apart`
            const=True,
            default=False,
            metavar="CONFIG",
            help="train through the ZeRO engine, with this config file (JSON or YAML)",
        )
    if "--deepspeed_config" not in known:
        group.add_argument("--deepspeed_config", default=None, metavar="CONFIG", help="config file")
    _add_when_parsing(parser, group, is_ours=is_ours)
    return parser


def _apart(args: Sequence[str]) -> list[str]:
    """Return arguments in which what follows `--deepspeed` is positional, unless it looks as a config does."""
    found = list(args)
    end = found.index("--") if "--" in found else len(found)
    for at, (flag, following) in enumerate(itertools.pairwise(found[:end])):
        if flag == _FLAG and not following.startswith(("-", *_STARTS)) and not following.endswith(_SUFFIXES):
            found[at] = f"{_FLAG}="
    return found


def _add_when_parsing(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup, *, is_ours: bool) -> None:
    """Let `parser` take `--local_rank` and `--local-rank`, unless it has an option of either name by then.

    is_ours: `--deepspeed` is our option.
    """
    parse_known_args = parser.parse_known_args

    def with_local_rank(args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Any:
        if is_ours and parser._get_positional_actions():
            args = _apart(sys.argv[1:] if args is None else args)
        if not any(spelling in parser._option_string_actions for spelling in _LOCAL_RANK):
            group.add_argument(
                *_LOCAL_RANK,
                type=int,
                default=-1,
                metavar="N",
                help="rank on this node, for launchers that pass it; the environment's LOCAL_RANK wins",
            )
        return parse_known_args(args, *others, **kwargs)

    parser.parse_known_args = with_local_rank  # type: ignore[assignment, method-assign]  # parse_args calls it
