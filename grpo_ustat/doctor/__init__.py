"""What `grpo-ustat doctor` examines; each check is a function of the output folder."""
