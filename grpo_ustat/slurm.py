"""`python -m grpo_ustat.slurm`, as batch scripts call it: see `grpo_ustat.distributed.slurm`."""

from grpo_ustat.distributed.slurm import main

if __name__ == "__main__":
    main()
