"""The command `advise`: advice on the group size from a run, a log of rollouts, or rewards."""
