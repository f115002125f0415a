"""`grpo-ustat report`: what any runs found, together."""

from __future__ import annotations

from grpo_ustat.cli.app import report


def main() -> None:
    """Console entry."""
    report()


if __name__ == "__main__":
    main()
