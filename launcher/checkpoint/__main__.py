"""`python -m launcher.checkpoint COMMAND`: what `launch checkpoint` runs in a process of its own, which has torch."""

from __future__ import annotations

import importlib
import logging
import sys

from launcher.base.errors import LauncherError
from launcher.base.exit_codes import ExitCode

# Command -> the module whose `run(arguments)` does it.
COMMANDS = {
    "to-fp32": "launcher.checkpoint.zero_to_fp32",
    "export": "launcher.checkpoint.convert.to_hugging_face",
    "import": "launcher.checkpoint.convert.to_ours",
    "export-dcp": "launcher.checkpoint.convert.to_dcp",
    "export-deepspeed": "launcher.checkpoint.convert.to_deepspeed",
}


def main() -> None:
    """Run one command; end with a message and the exit code of the error where it fails."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    command, arguments = sys.argv[1], sys.argv[2:]
    try:
        importlib.import_module(COMMANDS[command]).run(arguments)
    except LauncherError as error:
        sys.stderr.write("".join(f"✗ {finding}\n" for finding in error.diagnostics))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except (ValueError, OSError) as error:  # of zero_to_fp32, which is not to import anything of this package
        sys.stderr.write(f"✗ {error}\n")
        sys.exit(ExitCode.FAILURE)


if __name__ == "__main__":
    main()
