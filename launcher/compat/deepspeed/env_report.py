"""`deepspeed.env_report`: what this machine has, by `launch report`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import launcher

__all__ = ["cli_main", "main"]


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report. Both options: part of DeepSpeed's signature. Raises: CalledProcessError where it fails."""
    # Not -m: no file of the working folder may take the package's place.
    subprocess.run([sys.executable, Path(launcher.__file__).with_name("__main__.py"), "report"], check=True)


cli_main = main

if __name__ == "__main__":
    main()
