"""Jobs that run many small cases with transformers, since an import of it takes seconds; and what each returned.

A module of cases has functions `case_NAME(folder)`, which every rank calls, in the order of the names given. What one
returns goes to its test as JSON. One that raises on all ranks does not disturb the others; its error goes to its test.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.launch.command import ROOT, Result, run_launch
from harness.launch.forked_ranks import in_forks
from harness.scripts import write
from harness.train.forked import Target, run_ranks

NUM_RANKS = 2
IMPORTS = "harness.train.hf_imports"


def run_cases(
    folder: Path, module: str, names: Sequence[str], num_ranks: int = NUM_RANKS, env: dict[str, str] | None = None
) -> dict[str, list[Any]]:
    """Run the cases of `module` on forks that have transformers; return what each rank returned, by name of the case.

    module: several may be named, with commas between them.

    A case that has raised has {"error": "Type: message", "traceback": text} on its rank. Transformers is that of
    PYTHONPATH where there is one. Working folder and `folder` of the cases: this one.
    """
    result = run_with_transformers(folder, main, module, *names, num_ranks=num_ranks, env=env)
    return _noted(folder, names, num_ranks, result)


def run_with_transformers(
    folder: Path, target: Target, *arguments: str | Path, num_ranks: int = NUM_RANKS, env: dict[str, str] | None = None
) -> Result:
    """Run a script or a module's function on forks that have imported transformers: see `run_ranks`."""
    env = {**environment(), **(env or {})}
    return run_ranks(folder, num_ranks, target, *arguments, env=env, preload=IMPORTS)


def launch_cases(
    folder: Path, module: str, names: Sequence[str], last: str | None = None
) -> tuple[dict[str, list[Any]], Result]:
    """Do what `run_cases` does in a job of `launch`; return also how that ended.

    last: a case whose error ends it, uncaught.
    """
    script = write(folder, "from harness.train.hf_job import main\nmain()\n", "job.py")
    words = in_forks(script, module, *names, *([f"{last}!"] if last else []), preload=IMPORTS)
    result = run_launch(folder, f"--num_gpus={NUM_RANKS}", *words, env=environment())
    return _noted(folder, names, NUM_RANKS, result), result


def _noted(folder: Path, names: Sequence[str], num_ranks: int, result: Result) -> dict[str, list[Any]]:
    found: list[dict[str, Any]] = []
    for rank in range(num_ranks):
        path = folder / f"cases_of_rank_{rank}.json"
        found.append(json.loads(path.read_text()) if path.exists() else {})
    lost = {"error": "the job ended before", "traceback": result.out + result.err}
    return {name: [of_rank.get(name, lost) for of_rank in found] for name in names}


def environment() -> dict[str, str]:
    """Return what ranks need of the environment: this package, the tests, and the transformers that these test."""
    search = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": search, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def returned(found: dict[str, list[Any]], name: str) -> list[Any]:
    """Return what each rank returned; fail with the stack trace where one has raised."""
    for rank, value in enumerate(found[name]):
        assert not (isinstance(value, dict) and "traceback" in value), f"rank {rank}: {value['traceback']}"
    return found[name]


def begin_anew() -> None:
    """Let what follows begin as a new process would: no state of accelerate, no configuration that is alive."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    gc.collect()


def _read_metadata_once() -> None:
    """Keep what the metadata of packages says: before every run their versions are asked for, many times each."""
    every_time: Any = importlib.metadata.Distribution.metadata
    setattr(importlib.metadata, "distribution", functools.cache(importlib.metadata.distribution))  # noqa: B010
    setattr(importlib.metadata.Distribution, "metadata", property(functools.cache(every_time.fget)))  # noqa: B010


def main() -> None:
    """Run the cases, on a rank."""
    # What is imported stays: searches for garbage, of which there are many here, leave it out.
    gc.disable()
    modules, names = sys.argv[1].split(","), sys.argv[2:]
    cases = {name: case for module in modules for name, case in vars(importlib.import_module(module)).items()}
    path = Path(f"cases_of_rank_{os.environ['RANK']}.json").resolve()
    found: dict[str, Any] = {}
    importlib.import_module("transformers.trainer")
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000)  # runs end with a search
    _read_metadata_once()
    for name in names:
        if name.endswith("!"):
            cases[f"case_{name[:-1]}"](Path.cwd())
            continue
        try:
            found[name] = cases[f"case_{name}"](Path.cwd())
        except Exception as error:  # noqa: BLE001  # it is the result of the case
            found[name] = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        path.write_text(json.dumps(found))
        begin_anew()


if __name__ == "__main__":
    main()
