"""Layer 4: one agent per node spawns, streams and supervises its ranks. Standard library only."""
