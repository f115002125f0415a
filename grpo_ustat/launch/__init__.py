"""Starting a run, in this process or in ranks, and requeueing it when it is stopped."""
