"""Start of a run in this process or in several ranks, and requeueing of a stopped run."""
