"""`python -m grpo_ustat.gap`: the paper's theorems, tested."""

from __future__ import annotations

from grpo_ustat.cli import main as run_entry


def main() -> None:
    """Console entry."""
    run_entry("gap")


if __name__ == "__main__":
    main()
