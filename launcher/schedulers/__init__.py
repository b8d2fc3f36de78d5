"""Who has started this process, as the environment tells: Slurm, MPI, or a scheduler of nodes."""
