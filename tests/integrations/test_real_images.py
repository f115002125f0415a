"""In TRL's own GRPOTrainer with images in the prompts: what it hands out is scored as its own
log-probabilities are, differentiated one completion at a time.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason='TRL is not installed: pip install -e ".[trl]"')

import trl_run  # noqa: E402

from grpo_ustat.integrations.trl.callback import unchanged  # noqa: E402
from grpo_ustat.integrations.trl.generation import Group, completions_of  # noqa: E402
from grpo_ustat.integrations.trl.images import row_images  # noqa: E402
from grpo_ustat.policy.loading import Policy  # noqa: E402
from grpo_ustat.policy.scores.backward import parameter_sizes  # noqa: E402
from grpo_ustat.policy.scores.groups import group_scores  # noqa: E402
from grpo_ustat.policy.scores.sketch import Sketch  # noqa: E402

pytestmark = pytest.mark.nightly(minutes=0.5)
TOKENS = [f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")]
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
READ_BY_TRL = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")


def processor():
    """Of Qwen3-VL, for patches of 4 x 4 pixels; without videos, which need torchvision."""
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    class ImagesAlone(Qwen3VLProcessor):
        def check_argument_for_proper_class(self, argument_name, argument):
            return type(argument)

    tokenizer = AutoTokenizer.from_pretrained(trl_run.MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    size = {"shortest_edge": 64, "longest_edge": 1024}
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    return ImagesAlone(image_processor=images, tokenizer=tokenizer, chat_template=TEMPLATE)


def model_of(tokenizer):
    from transformers import AutoConfig, AutoModelForImageTextToText

    image, video, start, end = tokenizer.convert_tokens_to_ids(TOKENS)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = AutoConfig.for_model(
        "qwen3_vl", image_token_id=image, video_token_id=video, vision_start_token_id=start,
        vision_end_token_id=end, tie_word_embeddings=True,
        text_config=dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48,
                         num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                         head_dim=8, pad_token_id=0, max_position_embeddings=512,
                         rope_parameters=rope),
        vision_config=dict(hidden_size=16, intermediate_size=24, depth=2, num_heads=2, patch_size=4,
                           out_hidden_size=32, deepstack_visual_indexes=[0],
                           num_position_embeddings=64),
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config)


def questions():
    """Sums, each with a picture of its own size."""
    from PIL import Image

    draws = np.random.default_rng(0)
    return [
        {"prompt": [{"role": "user", "content": row["prompt"]}],
         "image": Image.fromarray(draws.integers(0, 255, (16 + 8 * (k % 3), 24, 3), np.uint8))}
        for k, row in enumerate(trl_run.questions(8))
    ]  # fmt: skip


def length(completions, **_):
    return [float(len(messages[0]["content"])) for messages in completions]


@pytest.mark.parametrize("adapters", [False, True])
def test_scores_with_images_are_those_of_trls_own_log_probabilities(adapters, tmp_path):
    """Of all parameters, the tower's too; of adapters, of the language part's."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    given = processor()
    trainer = GRPOTrainer(
        model=model_of(given.tokenizer), processing_class=given, reward_funcs=length,
        train_dataset=Dataset.from_list(questions()),
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
                    **{name: output[name] for name in READ_BY_TRL},
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
