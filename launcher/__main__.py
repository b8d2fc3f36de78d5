"""`python -m launcher` is the same as `launch`, and so is `python PATH/launcher/__main__.py`.

The latter is for batch scripts: no file of the folder where it runs can take the place of one of ours or of Python's.
"""

import os
import sys

if not __package__:
    # Started by its path: python has put this folder first on the module search path, in place of the package's own.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    if (root := os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) not in sys.path:
        sys.path.append(root)


def main() -> None:
    """Load and run the command line; Ctrl-C while it loads is not an error to be shown, and a notice then is kept."""
    try:
        from launcher.base.signals import hear_of_children, hold_notices, leave_at_interrupt

        hear_of_children()
        leave_at_interrupt()
        hold_notices()
        from launcher.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
