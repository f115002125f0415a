"""`python -m grpo_ustat.train`: GRPO fine-tuning."""

from __future__ import annotations

from grpo_ustat.cli import main as run_entry
from grpo_ustat.config import TrainConfig
from grpo_ustat.runs.folder import RunFolder


def work(config: TrainConfig, folder: RunFolder) -> float | None:
    """Train and return the final held-out accuracy."""
    from grpo_ustat.training.trainer import fit

    return fit(config, folder)


def main() -> None:
    """Console entry."""
    run_entry("train", TrainConfig, work)


if __name__ == "__main__":
    main()
