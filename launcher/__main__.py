"""`python -m launcher` is the same as `launch`."""

import sys


def main() -> None:
    """Load and run the command line; Ctrl-C while it loads is no error to be shown, and a notice then is kept."""
    try:
        from launcher.base.signals import hold_notices, leave_at_interrupt

        leave_at_interrupt()
        hold_notices()
        from launcher.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
