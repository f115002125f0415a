"""Pure functions on NumPy arrays: baselines, closed forms, the scaling law and intervals."""
