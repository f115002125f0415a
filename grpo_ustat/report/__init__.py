"""Pages, tables and figures of a run, and of any set of run folders together."""
