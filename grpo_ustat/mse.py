"""`python -m grpo_ustat.mse`: a gradient-MSE study."""

from __future__ import annotations

from grpo_ustat.cli import main as run_entry
from grpo_ustat.config import MseConfig
from grpo_ustat.runs.folder import RunFolder


def work(config: MseConfig, folder: RunFolder) -> float | None:
    """Run the study and return the first curve's first mean squared error."""
    from grpo_ustat.study.run import run

    return run(config, folder)


def main() -> None:
    """Console entry."""
    run_entry("mse", MseConfig, work)


if __name__ == "__main__":
    main()
