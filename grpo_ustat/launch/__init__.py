"""Starting of a run in this process or in ranks, and requeueing of a stopped run."""
