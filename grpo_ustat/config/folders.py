"""Place of `conf/`, in a checkout and in a wheel."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
CONF = next(c for c in (PACKAGE / "conf", PACKAGE.parent / "conf") if (c / "mse.yaml").is_file())
