"""Programs that answer a question of the command line which needs torch, as one line of JSON. Never imported by it."""
