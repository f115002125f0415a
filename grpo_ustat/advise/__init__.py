"""Is this group size good: keep, raise or lower it, from a run, a log of rollouts or rewards."""
