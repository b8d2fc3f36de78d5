"""`add_config_arguments`: both ways scripts write it, and options a script already has."""

from __future__ import annotations

import argparse

import pytest

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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--deepspeed", "data"], (True, "data")),
        (["data", "--deepspeed"], (True, "data")),
        (["--deepspeed", "ds_config.json", "data"], ("ds_config.json", "data")),
        (["--deepspeed", "eyJzdGFnZSI6IDN9", "data"], ("eyJzdGFnZSI6IDN9", "data")),
        (["--deepspeed=ds_config.txt", "data"], ("ds_config.txt", "data")),
        (["--deepspeed", "--", "data"], (True, "data")),
        (["--", "--deepspeed"], (False, "--deepspeed")),
        (["data"], (False, "data")),
    ],
)
def test_a_positional_argument_behind_the_flag_stays_one(
    words: list[str], expected: tuple[bool | str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    launcher.add_config_arguments(parser)
    monkeypatch.setattr("sys.argv", ["train.py", *words])
    for args in (parser.parse_args(words), parser.parse_args()):
        assert (args.deepspeed, args.folder) == expected


def test_nothing_given() -> None:
    assert parse().deepspeed is False


def test_an_option_the_script_has_already_is_left_alone() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=7)
    assert launcher.add_config_arguments(parser).parse_args([]).local_rank == 7


@pytest.mark.parametrize("spelling", ["--local_rank", "--local-rank"])
def test_both_spellings_of_the_local_rank_are_taken(spelling: str) -> None:
    assert parse(f"{spelling}=3").local_rank == 3  # torch.distributed.launch passes --local-rank


@pytest.mark.parametrize("spelling", ["--local_rank", "--local-rank"])
def test_an_option_the_script_adds_later_is_the_script_s(spelling: str) -> None:
    parser = launcher.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument(spelling, type=int, default=7)
    assert parser.parse_args([]).local_rank == 7
    assert parser.parse_args([spelling, "2"]).local_rank == 2


def test_parsing_twice_and_help_are_no_conflict(capsys: pytest.CaptureFixture[str]) -> None:
    parser = launcher.add_config_arguments(argparse.ArgumentParser())
    assert parser.parse_args([]).local_rank == -1
    assert parser.parse_known_args(["--local_rank", "1", "--mine"])[0].local_rank == 1
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "--local_rank N" in capsys.readouterr().out
