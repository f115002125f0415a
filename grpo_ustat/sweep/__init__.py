"""How far the sweeps in a folder are."""
