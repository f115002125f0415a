"""What `python -m grpo_ustat.doctor` looks at; each check is a function of the output folder."""
