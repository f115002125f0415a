"""Questions, prompts, reward functions and the judging of answers."""
