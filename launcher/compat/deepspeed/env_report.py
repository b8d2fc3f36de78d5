"""`deepspeed.env_report`: what this machine has, by `launch report`."""

from __future__ import annotations

import subprocess
import sys

__all__ = ["cli_main", "main"]


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report; `python -m deepspeed.env_report` does the same. Both options: part of DeepSpeed's signature."""
    subprocess.run([sys.executable, "-m", "launcher", "report"], check=False)


cli_main = main

if __name__ == "__main__":
    main()
