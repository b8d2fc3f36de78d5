"""Layer 5: jobs that are found again: their entries, and their logs."""
