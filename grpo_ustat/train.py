"""`python -m grpo_ustat.train`: GRPO fine-tuning."""

from __future__ import annotations

from grpo_ustat.cli import main as run_entry


def main() -> None:
    """Console entry."""
    run_entry("train")


if __name__ == "__main__":
    main()
