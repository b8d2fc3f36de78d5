"""Layer 2: optimizers over flat shards, and learning-rate schedules."""
