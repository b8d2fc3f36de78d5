"""Slurm: allocations, batch scripts, the queue, and agents started by srun."""
