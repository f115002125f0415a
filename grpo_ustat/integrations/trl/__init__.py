"""Gradient noise of a TRL `GRPOTrainer` during training, and token-exact completion logs.

    from grpo_ustat.integrations.trl import GradientNoiseCallback, record

    trainer = GRPOTrainer(..., reward_funcs=[reward, record])
    trainer.add_callback(GradientNoiseCallback(trainer, every=10))

This package never imports TRL: it only uses the trainer object that the user passes. The installed
version of TRL is checked at import, because versions before 1.16 lack some attributes of the
trainer that the package uses.
"""

from importlib import metadata

from packaging.version import Version

MIN_TRL = "1.16"
INSTALL = f'pip install "trl>={MIN_TRL}"'

try:
    _installed = metadata.version("trl")
except metadata.PackageNotFoundError:
    raise ImportError(
        f"grpo_ustat.integrations.trl needs TRL, which is not installed: {INSTALL}"
    ) from None
if Version(_installed).release < Version(MIN_TRL).release:
    raise ImportError(
        f"grpo_ustat.integrations.trl needs TRL {MIN_TRL} or newer, but {_installed} is installed: "
        f"{INSTALL}"
    )

from grpo_ustat.integrations.trl.callback import GradientNoiseCallback  # noqa: E402
from grpo_ustat.integrations.trl.recorder import record  # noqa: E402

__all__ = ["GradientNoiseCallback", "record"]
