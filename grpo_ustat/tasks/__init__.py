"""Questions, prompts and judging."""
