"""Model card of a finished run: README.md of the last checkpoint, in the format of the Hub.

Next to the card, the checkpoint contains the full configuration.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData

from grpo_ustat.config.command_line import typed_command
from grpo_ustat.config.secrets import redact_code
from grpo_ustat.config.train import TrainConfig
from grpo_ustat.pages.tables import plain
from grpo_ustat.runs.folder import versions
from grpo_ustat.terminal.console import warn
from grpo_ustat.train.context import TrainContext, TrainProgress
from grpo_ustat.train.evaluate import held_out_gain

NAME, CONFIG = "README.md", "grpo_ustat_config.yaml"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TEMPLATE = """\
---
{{ card_data }}
---

# {{ name }}

{{ kind }} {{ base }}, trained for {{ steps }} steps of GRPO with the baseline {{ baseline }} and
the objective {{ objective }} on {{ dataset }}, with {{ prompts }} prompts x {{ group_size }}
completions per step and seed {{ seed }}.

On {{ questions }} test questions, the {{ quantity }} is {{ mean }}, with 95 % interval
{{ interval }}. The change over the run is {{ gain }}. The intervals cover the choice of test
questions, but not the choice of the seed. Other tasks, other languages and safety were not tested.

{% if command %}Command:

````sh
{{ command }}
````

{% endif %}The full configuration is in `grpo_ustat_config.yaml`. Versions: {{ versions }}.
"""


def card_files(run: TrainContext, progress: TrainProgress) -> dict[str, str]:
    """Return the texts of the card and the configuration by file name.

    If writing the card fails, a warning is printed and the result is empty, so that the checkpoint
    is still written.
    """
    try:
        config = asdict(run.config) | {"output_root": "outputs"}
        return {
            NAME: card(run, progress),
            CONFIG: yaml.safe_dump(config, sort_keys=False),
        }
    except Exception as error:
        warn(f"no model card: {type(error).__name__}: {error}")
        return {}


def card(run: TrainContext, progress: TrainProgress) -> str:
    """Return the text of the card, given the progress after the last step."""
    config = run.config
    rows = [row for row in progress.evals if row["decoding"] == config.eval.decoding[0]]
    last, gain = rows[-1], held_out_gain(progress)
    kind = f"LoRA adapters of rank {config.lora.r} for" if config.lora.r else "A fine-tune of"
    names = {
        "name": config.run_name, "base": config.model.model_name_or_path,
        "baseline": config.baseline.name, "objective": config.objective.name,
        "dataset": config.dataset.name, "quantity": last["quantity"],
    }  # fmt: skip
    return str(
        ModelCard.from_template(
            metadata(config),
            template_str=TEMPLATE,
            kind=kind,
            command=redact_code(typed_command() or ""),
            steps=progress.step,
            prompts=config.prompts_per_step,
            group_size=config.group_size,
            seed=config.seed,
            questions=last["n"],
            mean=f"{last['mean_reward']:.3f}",
            interval=f"{last['low']:.3f} to {last['high']:.3f}",
            gain=f"{gain.estimate:+.3f}, from {gain.low:+.3f} to {gain.high:+.3f}",
            versions=", ".join(f"{name} {version}" for name, version in versions().items()),
            **{key: plain(text) for key, text in names.items()},
        )
    )


def metadata(config: TrainConfig) -> ModelCardData:
    """Return the metadata that the Hub reads from a card; local models and data are not named."""
    base, lora = config.model.model_name_or_path, config.lora.r > 0
    paths = (getattr(config.dataset, key, None) for key in ("path", "test_path"))
    return ModelCardData(
        library_name="peft" if lora else "transformers",
        pipeline_tag="text-generation",
        base_model=base if on_hub(base) else None,
        datasets=list(dict.fromkeys(path for path in paths if path and on_hub(path))) or None,
        tags=["grpo", "grpo-ustat", "reinforcement-learning", *(["lora"] if lora else [])],
    )


def on_hub(name: str) -> bool:
    """Return True for the name of a model or data set on the Hub, False for a local folder."""
    return bool(HUB_ID.fullmatch(name)) and not Path(name).expanduser().exists()
