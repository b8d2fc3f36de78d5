"""`launch tune`: run a script for a few steps under several settings, each a job of its own; which is quickest?"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.base import env
from launcher.base.errors import LauncherError, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.fields import Whole
from launcher.base.processes import die_with_parent
from launcher.base.units import counted, format_bytes
from launcher.cli.console import streams
from launcher.cli.options.command import Command, Number, declared, files, given_words, memory_size, under
from launcher.cli.options.hosts import HOST_CHOICE, REACHING
from launcher.planner.speed import RankSpeed, Speed, kept_file, named_apart
from launcher.planner.tuning import (
    FACTORS,
    UNKNOWN_PHASE,
    ConfigFacts,
    Outcome,
    RankTrial,
    Trial,
    best,
    is_followed,
    learned,
    micro_batches,
    most_trials,
    outcome_of,
    repeated,
    reports_in,
    with_micro_batch,
)
from launcher.transport.command import own_argv

if TYPE_CHECKING:
    from launcher.planner.ladder import Standing
    from launcher.planner.plan import Row
    from launcher.planner.timing import StepTime
    from launcher.planner.tuning import Factors

_MODULE = "launcher.rehearse.trial"
_OWN = "the script's own config"
_NVME = "nvme"
_NATIVE_OOM = ("bad_alloc", "allocate memory")  # what a thread of C++ says before it aborts its process
_EPILOG = """\b
examples:
  launch tune train.py --deepspeed ds_config.json
  launch tune --hostfile hosts --largest-micro-batch --write tuned.json train.py --deepspeed ds_config.json
  launch tune --num-gpus 2 --memory 2GB --steps 3 -m package.train --epochs 1
"""


@dataclass(frozen=True)
class TuneOptions:
    """The options of one `launch tune`, by name, but those that `launch run` gets."""

    steps: int
    memory: int | None
    largest_micro_batch: bool
    most: int
    candidates: int
    json_path: str | None
    write_path: str | None
    module: bool
    verbose: bool
    script: str
    script_args: tuple[str, ...]
    run_words: tuple[str, ...]  # for `launch run`

    def __post_init__(self) -> None:
        if not self.module and not Path(self.script).exists():
            raise UsageError("no such script", where=self.script, hint="give a path, or -m and the name of a module")

    @property
    def command(self) -> list[str]:
        """What each rank runs, as arguments of the module."""
        kind = "module" if self.module else "script"
        return [str(self.steps), str(self.memory or 0), kind, self.script, *self.script_args]


class TrialError(LauncherError):
    """A trial whose script has failed, or whose job could not run."""

    def __init__(self, message: str, *, where: str, exit_code: int, details: str, hint: str | None = None) -> None:
        """details: the traceback, or what the rank or `launch run` said last; shown before the message."""
        super().__init__(message, where=where, hint=hint)
        self.exit_code = exit_code
        self.details = details


_ranks = under("Ranks")
_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--steps", type=Number(Whole(1, 1000)), default=5, help="Optimizer steps to time. Default: 5."),
    click.option(
        "--memory", callback=memory_size, metavar="SIZE", help="Memory of one rank. Default: all that there is."
    ),
    click.option("--candidates", type=Number(Whole(0, 100)), default=4, help="Other settings to try. Default: 4."),
    click.option(
        "--largest-micro-batch", is_flag=True, help="Find the largest micro-batch that fits, at the quickest setting."
    ),
    click.option("--most", type=Number(Whole(1, 10**6)), default=1024, help="Highest micro-batch. Default: 1024."),
    click.option("--json", "json_path", metavar="FILE", help="Write all that was found to FILE, too."),
    click.option("--write", "write_path", metavar="FILE", help="Write the config with the best setting to FILE."),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is a module: package.train."),
)


@click.command(
    "tune",
    cls=Command,
    details=("SSH",),
    epilog=_EPILOG,
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@declared((
    _ranks("--num-gpus", type=Number(Whole(1, 1024)), help="Ranks on each node. Default: one for each GPU."),
    *HOST_CHOICE,
    *REACHING,
    *_OPTIONS,
))  # fmt: skip
@click.argument("script", shell_complete=files)
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def tune(ctx: click.Context, /, **values: Any) -> None:
    """Run SCRIPT, as it is, for a few optimizer steps under several settings of its config, and say which is quickest.

    Each setting is a job of its own, the script's own config the first. Nothing is saved. A setting that runs out of
    memory is a result. Exit code 1: the script fails, or no setting fits.
    """
    names = {each.name for each in dataclasses.fields(TuneOptions)}
    own = {name: value for name, value in values.items() if name in names}
    options = TuneOptions(**own, run_words=tuple(given_words(ctx)))
    session = Session(options)
    try:
        session.try_all()
    except (LauncherError, KeyboardInterrupt) as error:
        if any(each.step_s for each in session.outcomes):
            session.show()
        if isinstance(error, TrialError) and error.details:
            streams.say(error.details)
        raise
    session.show()
    session.keep()
    if session.best is None:
        sys.exit(ExitCode.FAILURE)


def planned(
    options: TuneOptions, facts: ConfigFacts, reports: Sequence[RankTrial], machines_key: str
) -> tuple[Trial | None, list[Trial]]:
    """Return the script's own setting with what a plan says of it, and other settings in the order of the plan.

    Both empty where the machines were not probed, or the script cannot be rehearsed: that is said. Other micro-batches
    are planned where the engine makes the batches, so that they follow its config.
    """
    from launcher.cli.commands.plan_view import label
    from launcher.cli.script_plan import facts_of_script
    from launcher.planner.estimate import Machines
    from launcher.planner.hardware import probed_hardware
    from launcher.planner.plan import Question, plan
    from launcher.planner.speed import kept_speeds
    from launcher.planner.tuning import kept_factors

    speed = next((each for each in kept_speeds() if each.key == machines_key), None)
    if speed is None:
        streams.say("no time is predicted: `launch probe` with the same hosts and ranks measures these machines")
        return None, []
    num_nodes = len({each.node for each in reports})
    per_node = len(reports) // num_nodes
    hardware = probed_hardware(speed, per_node)
    machines = Machines(num_nodes, per_node, options.memory, None, *([0] if hardware.is_cpu else []))
    try:
        model, computes, base, _ = facts_of_script(options.command[2:], machines)
    except LauncherError as error:
        streams.say(f"no time is predicted: {error}")
        return None, []
    batch = facts.micro_batch * facts.accumulation * facts.data_ranks
    found = plan(Question(model, computes, machines, hardware, base, batch, frozenset()))
    learnt = kept_factors(machines_key)
    recomputes = computes.choices[0]  # the script as it is
    own, others, kinds = None, [], set()
    for row in sorted(found.rows, key=lambda one: (one.misfit(machines) is not None, _predicted_s(one.time, learnt))):
        offload = row.setting.policy.offload
        kind = (row.setting.stage, offload.optimizer.value, offload.params.value, row.is_checkpointed)
        is_own_size = row.micro_batch == facts.micro_batch
        is_own = (*kind, dict(row.patch)) == (facts.stage, facts.optimizer, facts.param, recomputes, {}) and is_own_size
        name = label(row) + (", recomputed" if row.is_checkpointed else "")
        if not is_own_size:
            name += f", micro-batch {row.micro_batch}"
        patch = {} if is_own else _difference(row, facts, recomputes=recomputes)
        trial = Trial(
            _OWN if is_own else name, patch, row.micro_batch, row.num_micro_batches,
            row.memory.device, _predicted_s(row.time, learnt), dict(row.time.parts),
        )  # fmt: skip
        if is_own:
            own = trial
        elif (is_own_size or reports[0].has_loader) and row.misfit(machines) is None and kind not in kinds:
            kinds.add(kind)  # the quickest of each kind
            others.append(trial)
    return own, others[: options.candidates]


def _difference(row: Row, facts: ConfigFacts, *, recomputes: bool) -> dict[str, Any]:
    """Return what a script's config is to change for a row: batches and offload only where they differ.

    recomputes: the script as it is.
    """
    from launcher.config.equations import BATCH_KEYS

    patch = row.as_patch()
    zero = {name: value for name, value in patch["zero_optimization"].items() if value is not None}
    for name, place in (("offload_optimizer", facts.optimizer), ("offload_param", facts.param)):
        if place != "none" and name not in zero:
            zero[name] = None
    keys = {"zero_optimization": zero}
    if row.is_checkpointed != recomputes:
        keys["activation_checkpointing"] = patch["activation_checkpointing"]
    if row.micro_batch != facts.micro_batch:
        keys |= {name: patch[name] for name in BATCH_KEYS[1:]}
    return keys


def _predicted_s(time: StepTime, learnt: Factors | None) -> float:
    return time.seconds if learnt is None else learnt.seconds(time.parts)


def candidates(facts: ConfigFacts, num_wanted: int, *, fits: bool) -> list[Trial]:
    """Return settings of the ladder to try beside the script's own, where the machines were not probed.

    fits: the script's own does; else only what needs less memory is worth a trial.
    """
    from launcher.planner.ladder import PIPELINE_STANDINGS, STANDINGS, Standing, standings_above, standings_below

    now = Standing(facts.stage, facts.optimizer, facts.param)
    all_of_them = PIPELINE_STANDINGS if facts.has_pipeline else STANDINGS
    rungs = [*(standings_above(now, all_of_them) if fits else []), *standings_below(now, all_of_them)]
    return [
        Trial(_label(rung), _patch_of(rung, facts), facts.micro_batch, facts.accumulation)
        for rung in rungs
        if _NVME not in rung[1:]  # whose folder only the user knows
    ][:num_wanted]


def _label(rung: Standing) -> str:
    stage, optimizer, param = rung
    places = [("optimizer", optimizer), ("parameters", param)]
    return ", ".join(
        [f"stage {stage}", *(f"{name} on the {place.upper()}" for name, place in places if place != "none")]
    )


def _patch_of(rung: Standing, facts: ConfigFacts) -> dict[str, Any]:
    """Return what makes a script's config one of a rung: offload that it has and the rung has not is removed."""
    from launcher.planner.ladder import standing_keys

    keys = standing_keys(rung)
    zero = keys["zero_optimization"]
    for name, place in (("offload_optimizer", facts.optimizer), ("offload_param", facts.param)):
        if place != "none" and name not in zero:
            zero[name] = None
        elif place == _NVME:
            zero[name]["nvme_path"] = None
    return keys


class _NotFollowedError(Exception):
    """The script does not make its batches as large as its config says."""


@dataclass
class Session:
    """The trials of one command, in their order, and what is known from them."""

    options: TuneOptions
    outcomes: list[Outcome] = field(default_factory=list)
    facts: ConfigFacts | None = None  # of the script's own config
    largest: int | None = None  # micro-batch, where it was looked for
    _shown: RankTrial | None = None  # that has shown how large the script's batches are
    _machines: str = ""
    _num_run: int = 0

    @property
    def best(self) -> Outcome | None:
        """The outcome to recommend; None where nothing ran."""
        return None if self.facts is None else best(self.outcomes, self.facts.data_ranks)

    def try_all(self) -> None:
        """Run all trials. Raises: LauncherError where the script fails."""
        own, reports = self._run(Trial(_OWN, {}, 0, 0))
        if own.refused is not None:
            raise LauncherError(own.refused)
        self.facts = reports[0].facts
        if self.facts is None:
            if own.oom_phase is not None:
                return
            hint = "it trains with launcher.initialize() or deepspeed.initialize(); see LAUNCH_ENGINE where both exist"
            raise LauncherError("the script has ended without an engine", where=self.options.script, hint=hint)
        if own.oom_phase is None and own.step_s is None:
            raise LauncherError(
                "the script has ended before its second optimizer step: nothing was timed",
                where=self.options.script,
                hint="give it more data or epochs, or smaller batches",
            )
        own_planned: Trial | None = None
        others: list[Trial] = []
        if own.step_s is not None and self.options.candidates:
            own_planned, others = planned(self.options, self.facts, reports, self._machines)
        if own_planned is not None:
            self.outcomes[0] = replace(own, trial=own_planned)
        for trial in others or candidates(self.facts, self.options.candidates, fits=own.step_s is not None):
            self._run(trial)
        if self.options.largest_micro_batch:
            base = self.best or [each for each in self.outcomes if each.refused is None][-1]
            self._find_largest(base, self.facts)
        self._confirm()

    def _run(self, trial: Trial) -> tuple[Outcome, list[RankTrial]]:
        self._num_run += 1
        is_again = any(each.trial.label == trial.label for each in self.outcomes)
        streams.say(f"trial {self._num_run}: {trial.label}{', again' if is_again else ''}")
        reports = run_trial(self.options, trial)
        facts = reports[0].facts
        if facts is not None:  # what the engine has made of the patch
            trial = replace(trial, micro_batch=facts.micro_batch, accumulation=facts.accumulation)
        outcome = outcome_of(trial, reports)
        self.outcomes.append(outcome)
        if self._shown is None and reports[0].input_shape is not None:
            self._shown = reports[0]
        if outcome.step_s is not None:  # all ranks have reported
            speeds = [RankSpeed(each.rank, each.node, each.host, each.device) for each in reports]
            self._machines = Speed("", "", named_apart(speeds)).key
        streams.say(f"  {_result(outcome, None if facts is None else facts.data_ranks)}")
        return outcome, reports

    def _confirm(self) -> None:
        """Run what is to be recommended once more, and the script's own config: chance must not decide between them."""
        chosen, own = self.best, self.outcomes[0]
        if chosen is None or chosen is own or own.step_s is None:
            return
        for place in (0, self.outcomes.index(chosen)):
            again, _ = self._run(self.outcomes[place].trial)
            self.outcomes[place] = repeated(self.outcomes[place], again)
            self.outcomes.pop()
            if again.oom_phase is not None and again.trial.micro_batch == self.largest:
                self.largest = None

    def _find_largest(self, base: Outcome, facts: ConfigFacts) -> None:
        """Find the largest micro-batch that fits at a setting, unless the script has no use for the config's."""
        samples = facts.micro_batch * facts.accumulation if facts.keeps_batch else None
        allowed = micro_batches(self.options.most, samples)
        fits, now = base.step_s is not None, base.trial.micro_batch
        undecided = [size for size in allowed if size != now and (size > now) == fits]
        num = len(undecided)
        choice = f"{num} to choose from, at most {counted(most_trials(num), 'trial')}" if num else "none to choose from"
        kept = f"; train_batch_size stays {samples * facts.data_ranks}" if samples else ""
        streams.say(f"micro-batches {'above' if fits else 'below'} {now} at {base.trial.label}: {choice}{kept}")
        try:
            # What is smaller than one that fits must fit, so the answers are sorted.
            place = bisect.bisect_left(undecided, True, key=lambda size: not self._fits(size, base, facts))
        except _NotFollowedError as error:
            streams.say(f"! no micro-batch is looked for: {error}")
            return
        self.largest = undecided[place - 1] if place else now if fits else None

    def _fits(self, micro_batch: int, base: Outcome, facts: ConfigFacts) -> bool:
        """Try a micro-batch. Raises: _NotFollowedError where the script makes its batches by something else."""
        from launcher.planner.ladder import combined

        keys, accumulation = with_micro_batch(micro_batch, facts)
        label = base.trial.label if base.trial.patch else "own config"
        trial = Trial(
            f"{label}, micro-batch {micro_batch}", combined(base.trial.patch, keys), micro_batch, accumulation
        )
        try:
            outcome, reports = self._run(trial)
        except TrialError as error:
            if error.exit_code != ExitCode.FAILURE:  # not the script's: a host was lost
                raise
            said = (error.details.strip().splitlines() or [error.diagnostics[0].message])[-1]
            raise _NotFollowedError(f"with one of {micro_batch} the script fails: {said}") from error
        # The first that has got to a forward shows nothing alone: the next one does.
        is_alone = self._shown in (None, reports[0])
        follows = None if self._shown is None or is_alone else is_followed(self._shown, reports[0])
        if follows or (follows is None and (is_alone or outcome.oom_phase is not None)):
            return outcome.step_s is not None
        self.outcomes.pop()  # it has not trained on what its label says
        raise _NotFollowedError(
            "the script's batches do not follow train_micro_batch_size_per_gpu; let its DataLoader have"
            " batch_size=engine.train_micro_batch_size_per_gpu(), or initialize() training_data="
        )

    def show(self) -> None:
        """Print what was measured, and what to take."""
        if not self.outcomes:
            return
        _show_table(self.outcomes, 1 if self.facts is None else self.facts.data_ranks)
        if self.largest is not None:
            kept = " of those that keep train_batch_size" if self.facts is not None and self.facts.keeps_batch else ""
            click.echo(f"the largest micro-batch that fits: {self.largest}{kept}")
        chosen = self.best
        if chosen is None or self.facts is None:
            click.echo("✗ no setting fits: smaller micro-batches, activation checkpointing or more ranks need less")
            return
        own, ranks = self.outcomes[0], self.facts.data_ranks
        rate = chosen.samples_per_s(ranks)
        if chosen is own:
            click.echo(f"{_OWN} is the quickest of what was tried: {rate:.3g} samples/s")
            return
        than = f"{rate / own.samples_per_s(ranks):.2f} × as quick as {_OWN}" if own.step_s else f"{_OWN} does not fit"
        click.echo(f"the quickest: {chosen.trial.label}, {rate:.3g} samples/s; {than}")
        samples = [each.trial.micro_batch * each.trial.accumulation * ranks for each in (own, chosen)]
        if samples[0] != samples[1]:
            click.echo(f"it changes the global batch from {samples[0]} to {samples[1]} samples")
        click.echo(json.dumps(chosen.trial.patch))

    def keep(self) -> None:
        """Write the files that were asked for, and what measured times say of predicted ones to the user's cache."""
        factors = learned(self.outcomes, datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S"))
        path = None if factors is None else kept_file(self._machines, FACTORS)
        if factors is not None and path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(factors.as_json()))
            except OSError as error:
                streams.say(f"! {path}: {error.strerror}")
        if self.options.json_path is not None:
            Path(self.options.json_path).write_text(json.dumps(self.as_json(), indent=2) + "\n")
        if self.options.write_path is not None and self.best is not None:
            config = tuned_config(self.options.script_args, self.best.trial.patch)
            Path(self.options.write_path).write_text(json.dumps(config, indent=2) + "\n")
            click.echo(f"written to {self.options.write_path}")

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        chosen, ranks = self.best, 1 if self.facts is None else self.facts.data_ranks
        return {
            "own": None if self.facts is None else dataclasses.asdict(self.facts),
            "trials": [
                {**dataclasses.asdict(each), "samples_per_s": each.samples_per_s(ranks)} for each in self.outcomes
            ],
            "best": None if chosen is None else self.outcomes.index(chosen),
            "largest_micro_batch": self.largest,
        }


def tuned_config(script_args: Sequence[str], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that a script's arguments name with a patch; the patch alone where they name none.

    Raises: ConfigError where it cannot be read.
    """
    from launcher.config.load import is_readable_here, load_config, patched
    from launcher.plan.engine_config import config_argument

    source = config_argument(script_args)
    if source is None or not is_readable_here(source):
        return patched({}, patch)
    return patched(load_config(source).raw, patch)


# ---- one trial ----


def run_trial(options: TuneOptions, trial: Trial) -> list[RankTrial]:
    """Run the ranks of a trial as a job of their own; return what they report, by rank, at least one.

    At Ctrl-C the job is ended first. Raises: TrialError where the script fails, or the job cannot be started.
    """
    from launcher.config.load import read_json
    from launcher.planner.ladder import combined

    users = read_json(os.environ.get(env.CONFIG_PATCH.name) or "{}", env.CONFIG_PATCH.name).value
    patch = combined(users if isinstance(users, dict) else {}, trial.patch)
    with tempfile.TemporaryDirectory(prefix="launch-tune-") as folder:
        run = [
            "run", "--quiet", "--plain", "--resume", "never", "--log-dir", folder,
            "--env", f"{env.CONFIG_PATCH.name}={json.dumps(patch)}",
            *options.run_words, "--module", _MODULE, *options.command,
        ]  # fmt: skip
        said = Path(folder, "said")
        with said.open("wb") as file:
            child = subprocess.Popen(
                [*own_argv("launcher.cli.main"), *run],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr if options.verbose else file,
                stderr=sys.stderr if options.verbose else file,
                start_new_session=True,  # Ctrl-C reaches it once, and from here
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        code = _wait(child)
        texts = [path.read_text(errors="replace") for path in Path(folder).glob("*/rank_*.log")]
        reports = reports_in(texts)
        if code == 0 and reports:
            return reports
        ended = [json.loads(path.read_text()) for path in Path(folder).glob("*/report.json")]
        failure = (ended[0] if ended else {}).get("failure") or {}
        return reports if _is_result(reports, failure) else _killed(reports, failure, trial, said, code)


def _wait(child: subprocess.Popen[bytes]) -> int:
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        streams.say_waiting("the trial to end (Ctrl-C again: kill it)")
        try:
            child.wait()
        except KeyboardInterrupt:
            child.kill()
            child.wait()
        raise


def _is_result(reports: Sequence[RankTrial], failure: Mapping[str, Any]) -> bool:
    """Whether a job that has failed has found something out: a rank had no memory, or the engine refused the config."""
    refusing = [each.rank for each in reports if each.refused is not None]
    return any(each.oom_phase is not None for each in reports) or failure.get("rank") in refusing


def _killed(
    reports: list[RankTrial], failure: Mapping[str, Any], trial: Trial, said: Path, code: int
) -> list[RankTrial]:
    """Return the reports with one of a rank that was killed for lack of memory, which could not report itself.

    Raises: TrialError where that is not why the job has failed.
    """
    last_lines = "\n".join(failure.get("last_lines", ()))
    is_aborted = failure.get("signal_name") == "SIGABRT" and any(words in last_lines for words in _NATIVE_OOM)
    if failure.get("oom") or is_aborted:
        facts = next((each.facts for each in reports if each.facts is not None), None)
        killed = RankTrial(failure["rank"], 0, failure["host"], "", facts, oom_phase=UNKNOWN_PHASE)
        return [*reports, killed]
    if failure.get("rank") is None:  # nothing was started, or a host was lost: launch says why
        details = said.read_text(errors="replace").rstrip()
        raise TrialError(
            f"the job of the trial has ended with {code}, and no rank has reported",
            where=trial.label,
            exit_code=code or ExitCode.FAILURE,
            details=details,
        )
    raise TrialError(
        f"the script fails: rank {failure['rank']} on {failure['host']}, {failure['reason']}",
        where=trial.label,
        exit_code=ExitCode.FAILURE,
        details=(failure.get("traceback") or last_lines).rstrip(),
        hint="--verbose shows all that it prints",
    )


# ---- how it looks ----


def _result(outcome: Outcome, data_ranks: int | None) -> str:
    if outcome.oom_phase is not None:
        return f"out of memory in {outcome.oom_phase}"
    if outcome.refused is not None:
        return f"not run by the engine: {outcome.refused}"
    if outcome.step_s is None:
        return "no step was timed"
    rate = "" if data_ranks is None else f" · {outcome.samples_per_s(data_ranks):.3g} samples/s"
    return f"{_seconds(outcome.step_s)} a step{rate} · {format_bytes(outcome.peak_bytes or 0)}"


def _show_table(outcomes: Sequence[Outcome], data_ranks: int) -> None:
    header = ["setting", "micro × accumulation", "predicted", "memory", "predicted step", "step", "samples/s", "result"]
    rows = []
    for outcome in outcomes:
        trial, ran = outcome.trial, outcome.step_s is not None
        rows.append([
            trial.label,
            f"{trial.micro_batch} × {trial.accumulation}" if trial.micro_batch else "",
            "" if trial.predicted_bytes is None else format_bytes(trial.predicted_bytes),
            format_bytes(outcome.peak_bytes) if outcome.peak_bytes and ran else "",
            "" if trial.predicted_s is None else _seconds(trial.predicted_s),
            _seconds(outcome.step_s) if outcome.step_s is not None else "",
            f"{outcome.samples_per_s(data_ranks):.3g}" if ran else "",
            "" if ran else _result(outcome, data_ranks),
        ])  # fmt: skip
    streams.echo_rows(header, rows, num_texts=1)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
