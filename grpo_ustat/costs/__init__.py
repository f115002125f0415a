"""What a planned run costs: rollouts, tokens, memory, disk, time."""
