"""`add_config_arguments`: both ways scripts write it, and options a script already has."""

from __future__ import annotations

import argparse

import launcher


def parse(*argv: str) -> argparse.Namespace:
    return launcher.add_config_arguments(argparse.ArgumentParser()).parse_args(argv)


def test_config_behind_deepspeed() -> None:
    assert parse("--deepspeed", "ds.json").deepspeed == "ds.json"


def test_flag_and_config_apart() -> None:
    arguments = parse("--deepspeed", "--deepspeed_config", "ds.json", "--local_rank=1")
    assert arguments.deepspeed is True
    assert arguments.deepspeed_config == "ds.json"
    assert arguments.local_rank == 1


def test_nothing_given() -> None:
    assert parse().deepspeed is None


def test_an_option_the_script_has_already_is_left_alone() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=7)
    assert launcher.add_config_arguments(parser).parse_args([]).local_rank == 7
