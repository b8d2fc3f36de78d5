"""What a batch job of `launcher.submit` runs, on its first node; the argument is the folder of the job."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from launcher.api.execute import execute
from launcher.api.outcome import Ended
from launcher.api.output import ConsoleOutput
from launcher.api.parameters import Parameters
from launcher.api.submit import ENDED_FILE, REQUEST_FILE
from launcher.base import env
from launcher.base.errors import LauncherError
from launcher.base.exit_codes import ExitCode
from launcher.base.private_files import write_private


def main() -> int:
    """Run the request in the folder, leave how it ended, and return the exit code of the job."""
    folder = Path(sys.argv[1])
    parameters: Parameters = pickle.loads((folder / REQUEST_FILE).read_bytes())
    os.environ.pop(env.JOB_ID.name, None)  # of a job that has submitted this one: the nodes here are ours
    left: Ended | LauncherError
    try:
        left = ended = execute(parameters, ConsoleOutput(), folder.name, _run_folder(folder))
        code = ended.report.exit_code
    except LauncherError as error:
        sys.stderr.write(f"{error}\n")
        left, code = error, error.exit_code
    if code != ExitCode.REQUEUE:  # else the job goes back into the queue, and has not ended
        write_private(folder / ENDED_FILE, pickle.dumps(left), is_durable=True)
    return int(code)


def _run_folder(folder: Path) -> Path:
    """Return where logs go: each time that the job comes back from the queue, to a folder of their own."""
    num_requeues = os.environ.get(env.SLURM_RESTART_COUNT.name, "0")
    return folder if num_requeues == "0" else folder / f"requeue_{num_requeues}"
