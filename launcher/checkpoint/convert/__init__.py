"""Checkpoints written out in another form; each module has the `run(arguments)` of a command."""
