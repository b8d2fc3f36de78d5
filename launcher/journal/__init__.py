"""What a run records of itself, line by line: the one source of panel, `top`, reports, verdicts and metrics."""
