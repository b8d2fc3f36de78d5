"""Floor 2: timers and throughput."""
