"""Functions for several processes: ranks, workers, locks, signals and SLURM."""
