"""Pure maths on arrays: baselines, closed forms, the scaling law, intervals. NumPy only."""
