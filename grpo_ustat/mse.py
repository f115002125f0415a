"""`python -m grpo_ustat.mse`: a gradient-MSE study."""

from __future__ import annotations

from grpo_ustat.cli import main as run_entry


def main() -> None:
    """Console entry."""
    run_entry("mse")


if __name__ == "__main__":
    main()
