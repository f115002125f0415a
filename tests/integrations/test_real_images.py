"""In TRL's own GRPOTrainer with images in the prompts: what it hands out is scored as its own
log-probabilities are, differentiated one completion at a time.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason='TRL is not installed: pip install -e ".[trl]"')

import trl_images  # noqa: E402

from grpo_ustat.integrations.trl.callback import unchanged  # noqa: E402
from grpo_ustat.integrations.trl.generation import Group, completions_of  # noqa: E402
from grpo_ustat.integrations.trl.images import row_images  # noqa: E402
from grpo_ustat.policy.loading import Policy  # noqa: E402
from grpo_ustat.policy.scores.backward import parameter_sizes  # noqa: E402
from grpo_ustat.policy.scores.groups import group_scores  # noqa: E402
from grpo_ustat.policy.scores.sketch import Sketch  # noqa: E402

pytestmark = pytest.mark.nightly(minutes=0.5)
READ_BY_TRL = (
    "pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids", "image_sizes",
    "pixel_attention_mask",
)  # fmt: skip


def length(completions, **_):
    return [float(len(messages[0]["content"])) for messages in completions]


def rows_for(kind):
    """Questions with pictures; for Mistral, whose prompts TRL and transformers read at once only if
    they are equally long, such ones.
    """
    rows = trl_images.questions(100)
    if kind != "mistral3":
        return rows[:8]
    size = rows[0]["image"].size
    return [r for r in rows if r["image"].size == size and len(r["prompt"][0]["content"]) == 5][:8]


@pytest.mark.parametrize("kind", trl_images.TOKENS)
@pytest.mark.parametrize("adapters", [False, True])
def test_scores_with_images_are_those_of_trls_own_log_probabilities(kind, adapters, tmp_path):
    """Of all parameters, the tower's too; of adapters wherever a q_proj is."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    given = trl_images.processor(kind)
    trainer = GRPOTrainer(
        model=trl_images.model_of(kind, given.tokenizer), processing_class=given,
        reward_funcs=length, train_dataset=Dataset.from_list(rows_for(kind)),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if adapters else None,
        args=GRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=8,
            num_generations=4, max_completion_length=12, max_steps=1, save_strategy="no",
            report_to=[], disable_tqdm=True, seed=0,
        ),
    )  # fmt: skip
    generate, compared = trainer._generate_and_score_completions, []

    def measured(inputs):
        output = generate(inputs)
        model, pad_token = trainer.model, trainer._tokenizer.pad_token_id
        rows = completions_of(output, pad_token)
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        trained = [p for p in model.parameters() if p.requires_grad]
        with unchanged(model):
            policy = Policy(model, trainer._tokenizer, frozenset(), pad_token)
            sketch = Sketch(parameter_sizes(model), 10**7)
            for first in range(0, len(rows), 4):
                rollouts = Group(rows[first : first + 4], np.zeros(4), np.zeros((4, 1))).rollouts()
                found = group_scores(
                    policy, rollouts, 0, 1.0, sketch, 4, images=row_images(output, first)
                )
                logps = trainer._get_per_token_logps_and_entropies(
                    model, ids, mask, output["completion_ids"].shape[1],
                    **{name: output[name] for name in READ_BY_TRL if name in output},
                )[0]  # fmt: skip
                sums = (logps * output["completion_mask"]).sum(dim=1)[first : first + 4]
                scores = torch.stack([
                    torch.cat([
                        gradient.flatten().double() for gradient in torch.autograd.grad(
                            one, trained, retain_graph=True, materialize_grads=True
                        )
                    ])
                    for one in sums
                ])  # fmt: skip
                compared.append((found.gram_GG, (scores @ scores.T).numpy()))
        return output

    trainer._generate_and_score_completions = measured
    trainer.train()
    assert len(compared) == 2
    for found, expected in compared:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * expected.max())
