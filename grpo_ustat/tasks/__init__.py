"""Questions, prompts, reward functions, and judging of answers."""
