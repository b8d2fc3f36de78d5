"""Floor 3: flat units, their layout, gradient reduction and the sharded step."""
