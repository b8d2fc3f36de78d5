"""What a run shows: lines of ranks, the status panel, the failure."""
