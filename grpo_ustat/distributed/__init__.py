"""Multiple processes: ranks, workers, signals, SLURM."""
