"""Several processes: ranks, workers, signals, SLURM."""
