"""The command-line arguments that training scripts share."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed [CONFIG]`, `--deepspeed_config CONFIG` and `--local_rank N` to `parser`.

    Both styles scripts use work: `--deepspeed ds_config.json`, and the flag `--deepspeed` beside
    `--deepspeed_config ds_config.json`. Pass the parsed namespace to `launcher.initialize(args=...)`.
    Options the parser already has are left alone. Returns the same parser.
    """
    group = parser.add_argument_group("ZeRO engine")
    known = parser._option_string_actions
    if "--deepspeed" not in known:
        group.add_argument(
            "--deepspeed",
            nargs="?",
            const=True,
            default=None,
            metavar="CONFIG",
            help="train through the ZeRO engine, with this config file (JSON or YAML)",
        )
    if "--deepspeed_config" not in known:
        group.add_argument("--deepspeed_config", default=None, metavar="CONFIG", help="config file")
    if "--local_rank" not in known:
        group.add_argument(
            "--local_rank",
            type=int,
            default=-1,
            metavar="N",
            help="rank on this node, for launchers that pass it; the environment's LOCAL_RANK wins",
        )
    return parser
