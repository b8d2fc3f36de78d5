"""Layer 2: timers and throughput."""
