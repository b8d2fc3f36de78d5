"""Trials of `launch tune` on ranks that are forks of a process which has imported the engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path

from harness.train.forked import run_ranks

from launcher.cli.commands.tune import TuneOptions
from launcher.planner.tuning import RankTrial, Trial, reports_in


def in_forks(folder: Path) -> Callable[[TuneOptions, Trial], list[RankTrial]]:
    """Return what runs a trial on two ranks, in place of `tune.run_trial`; the script fails the test."""

    def run(options: TuneOptions, trial: Trial) -> list[RankTrial]:
        patch = {"LAUNCH_CONFIG_PATCH": json.dumps(trial.patch)}
        result = run_ranks(folder, 2, _rank, *options.command, env=patch, preload="launcher.rehearse.trial")
        found = reports_in([result.out])
        assert found, result.out + result.err
        assert result.code == any(each.oom_phase or each.refused for each in found), result.out + result.err
        return found

    return run


def _rank() -> None:
    from launcher.rehearse import trial

    vars(sys.modules["__main__"])["__loader__"] = SourceFileLoader("__main__", "")  # as in a process of its own
    trial.main()
