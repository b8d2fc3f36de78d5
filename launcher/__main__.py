"""`python -m launcher` is the same as `launch`."""

from launcher.cli.main import main

main()
