"""Data sets of questions, prompt formats, reward functions, and judges of answers."""
