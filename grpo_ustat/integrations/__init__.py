"""Other trainers: a callback for TRL, and our baselines in verl, SkyRL and slime."""
