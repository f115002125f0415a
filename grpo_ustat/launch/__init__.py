"""Start of a run in this process or in several processes (ranks), and restart of a stopped run."""
