"""What differs between jobs: what they were given, where they ran, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.base.secrets import mask_arguments, mask_text
from launcher.base.units import format_bytes, format_duration
from launcher.cli.views.facts import Run
from launcher.cluster.nodeset import fold
from launcher.journal.history import History

_DIGEST_CHARS = 12
_SET, _NOT_SET = "given", "—"


@dataclass(frozen=True)
class Difference:
    """A row of the table: the same thing of each job."""

    name: str
    values: tuple[str, ...]


def differences(runs: Sequence[Run]) -> dict[str, list[Difference]]:
    """Return what is not the same in all jobs, by groups."""
    groups: dict[str, list[Difference]] = {}
    for group, facts in _GROUPS:
        found = [facts(run) for run in runs]
        names = dict.fromkeys(name for each in found for name in each)
        for name in sorted(names) if group in _SORTED else names:
            values = tuple(each.get(name, _NOT_SET) for each in found)
            if len(set(values)) > 1:
                groups.setdefault(group, []).append(Difference(name, values))
    return groups


def flat_config(config: Any, prefix: str = "") -> dict[str, str]:
    """Return the values of a config by dotted keys, secrets masked."""
    if not isinstance(config, dict):
        return {}
    found: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            found |= flat_config(value, f"{name}.")
        else:
            found[name] = masked(name, _text(value))
    return found


def masked(key: str, value: str) -> str:
    """Return a value without secrets, by the last name of its dotted key and by its form."""
    name = key.rpartition(".")[2]
    word = mask_arguments([f"--{name}={value}"])[0]
    return mask_text(word.removeprefix(f"--{name}="))


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _results(run: Run) -> dict[str, str]:
    summary = run.summary
    found: dict[str, str] = {}
    if summary.rate is not None:
        found["rate"] = f"{summary.rate.median:,.4g} {summary.rate.unit}"
    if summary.first_loss is not None and summary.last_loss is not None:
        found["first loss"] = f"{summary.first_loss:.4g}"
        found["last loss"] = f"{summary.last_loss:.4g}"
    if summary.last_step is not None:
        found["last step"] = f"{summary.last_step:,}"
    if summary.goodput is not None:
        found["goodput"] = f"{summary.goodput:.0%}"
    if summary.peak_bytes:
        found["peak memory"] = format_bytes(max(summary.peak_bytes.values()))
    if summary.duration_s is not None:
        found["duration"] = format_duration(summary.duration_s)
    found["restarts"] = str(len(summary.tries) - 1)
    found["exit code"] = _text(summary.exit_code)
    return found


def _size(run: Run) -> dict[str, str]:
    summary = run.summary
    return {
        "world size": str(summary.world_size),
        "hosts": fold(summary.hosts) if summary.hosts else _NOT_SET,
        "working directory": str(summary.cwd),
        "command": " ".join(summary.command),
    }


def _config(run: Run) -> dict[str, str]:
    return flat_config(run.history.engine.get("config"))


def _code(run: Run) -> dict[str, str]:
    return code_of(run.history)


def code_of(history: History) -> dict[str, str]:
    """Return commit, whether files differed from it, and the script's digest, as far as they are known."""
    code = history.environment.get("code")
    if not isinstance(code, dict):
        return {}
    found = {}
    if code.get("commit"):
        found["commit"] = str(code["commit"])[:_DIGEST_CHARS]
        found["files differ from it"] = "yes" if code.get("is_changed") else "no"
    if code.get("script_sha256"):
        found["script (SHA-256)"] = str(code["script_sha256"])[:_DIGEST_CHARS]
    return found


def _versions(run: Run) -> dict[str, str]:
    return versions_of(run.history)


def versions_of(history: History) -> dict[str, str]:
    """Return the versions of launch, Python and torch, and the device."""
    engine, job = history.engine, history.job
    facts = {
        "launch": job.get("launch") or packages_of(history).get("launch-zero"),
        "Python": history.environment.get("python"),
        "torch": engine.get("torch"),
        "device": engine.get("device"),
    }
    return {name: str(value) for name, value in facts.items() if value}


def packages_of(history: History) -> dict[str, str]:
    """Return the packages of the launcher's environment."""
    packages = history.environment.get("packages")
    return {str(name): str(value) for name, value in packages.items()} if isinstance(packages, dict) else {}


def _packages(run: Run) -> dict[str, str]:
    return packages_of(run.history)


def variables_of(history: History) -> list[str]:
    """Return the names of the environment variables that ranks were given."""
    names = history.job.get("variables")
    return [str(name) for name in names] if isinstance(names, list) else []


def _variables(run: Run) -> dict[str, str]:
    return dict.fromkeys(variables_of(run.history), _SET)


_GROUPS = (
    ("Result", _results),
    ("Run", _size),
    ("Config", _config),
    ("Code", _code),
    ("Versions", _versions),
    ("Packages", _packages),
    ("Variables", _variables),
)
_SORTED = {"Config", "Packages", "Variables"}
