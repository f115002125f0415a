"""Scores of vision-language models: the language part by the rules, what images pass through by
plain differentiation; images in the prompts, or none.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from fakes import LetterTokenizer, random_rollouts
from peft import LoraConfig, get_peft_model
from scored import agree, one_by_one, packed
from slow_cases import slow_after

from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.scores.backward import completion_scores, parameter_sizes
from grpo_ustat.policy.scores.by_layer import LayerByLayer
from grpo_ustat.policy.scores.check import check_scores
from grpo_ustat.policy.scores.groups import group_scores
from grpo_ustat.policy.scores.images import outside_language
from grpo_ustat.policy.scores.sketch import Sketch

IMAGE, VOCAB, TEXT = 30, 32, 20  # the image token, all tokens, those of texts
WORDS = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    pad_token_id=0,
)  # fmt: skip
TOWER = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
BLOCKS = dict(hidden_size=16, intermediate_size=24, depth=2, num_heads=2, patch_size=2,
              out_hidden_size=16)  # fmt: skip
MROPE = dict(
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
)
QWEN_IMAGES = {  # patches of 2 x 2 pixels and 2 frames, 4 of them a token
    "pixel_values": (8 + 16, 24),
    "image_grid_thw": torch.tensor([[1, 2, 4], [1, 4, 4]]),
}


def typed(name):
    """Which tokens of a prompt are images, under the name that the model has for it."""
    return {name: lambda prompt: torch.tensor([[int(token == IMAGE) for token in prompt]])}


MODELS = {  # configuration, tokens of each image, and what the processor returns for both
    "qwen3_vl": (
        dict(text_config=WORDS | MROPE, vision_config=BLOCKS | dict(
            deepstack_visual_indexes=[0], num_position_embeddings=16)),
        (2, 4), QWEN_IMAGES | typed("mm_token_type_ids"),
    ),
    "qwen2_5_vl": (
        dict(text_config=WORDS | MROPE | dict(num_attention_heads=2, num_key_value_heads=1),
             vision_config=BLOCKS | dict(window_size=8, fullatt_block_indexes=[1])),
        (2, 4), QWEN_IMAGES | typed("mm_token_type_ids"),
    ),
    "mistral3": (
        dict(text_config=WORDS | dict(model_type="ministral3"), spatial_merge_size=2,
             vision_config=TOWER | dict(model_type="pixtral", image_size=16, patch_size=2)),
        (4, 2),  # 8 x 8 and 4 x 8 pixels
        {"pixel_values": (2, 3, 8, 8), "image_sizes": torch.tensor([[8, 8], [4, 8]])},
    ),
    "smolvlm": (
        dict(text_config=WORDS | dict(model_type="llama"), scale_factor=2,
             vision_config=TOWER | dict(image_size=8, patch_size=2)),
        (4, 4),
        {"pixel_values": (1, 2, 3, 8, 8),
         "pixel_attention_mask": torch.ones(1, 2, 8, 8, dtype=torch.int64)},
    ),
    "gemma3": (
        dict(text_config=WORDS | dict(sliding_window=6), mm_tokens_per_image=4,
             vision_config=TOWER | dict(image_size=8, patch_size=2)),
        (4, 4), {"pixel_values": (2, 3, 8, 8)} | typed("token_type_ids"),
    ),
}  # fmt: skip
every_model = pytest.mark.parametrize("name", slow_after(1, MODELS))


def build(name):
    """A model in evaluation mode, every parameter moved away from its initial value."""
    options = dict(image_token_id=IMAGE, image_token_index=IMAGE, tie_word_embeddings=True)
    config = transformers.AutoConfig.for_model(name, **options | MODELS[name][0])
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def prompt_of(name):
    """Token ids of a prompt with two images, and what the model reads beside them."""
    first, second = MODELS[name][1]
    prompt = [2, *[IMAGE] * first, 3, 4, *[IMAGE] * second, 5]
    generator, images = torch.Generator().manual_seed(1), {}
    for key, value in MODELS[name][2].items():
        if isinstance(value, tuple):
            value = torch.randn(value, generator=generator)
        images[key] = value(prompt) if callable(value) else value
    return prompt, images


def with_images(name):
    """One prompt with two images, five completions of different lengths, and the images."""
    prompt, images = prompt_of(name)
    rollouts = random_rollouts([len(prompt)], group_size=5, longest=6, vocab=TEXT)
    rollouts.prompt_tokens[0] = prompt
    return rollouts, images


def plain(model, rollouts, images, temperature=1.0):
    """Scores of all completions, [B, parameters], each run alone; names sorted."""
    inputs = {
        key: torch.nn.functional.pad(value, (0, rollouts.mask_PGT.shape[2]))
        if "token_type" in key else value.double() if value.is_floating_point() else value
        for key, value in images.items()
    }  # fmt: skip

    class Reader(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            length = input_ids.shape[1]
            own = {k: v[:, :length] if "token_type" in k else v for k, v in inputs.items()}
            return model(input_ids=input_ids, use_cache=use_cache, **own)

    reader = Reader()
    reader.named_parameters = model.named_parameters
    return one_by_one(reader, rollouts, temperature)


def assert_scores(model, rollouts, images, **way):
    scores = plain(model, rollouts, images, 0.7)
    agree(model, rollouts, scores, temperature=0.7, images=images, **way)
    return scores


def freeze_outside(model):
    for module in outside_language(model):
        module.requires_grad_(False)


@every_model
@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by_layer"])
def test_language_part_with_images_in_the_prompt(name, by_layer):
    model = build(name)
    freeze_outside(model)
    assert LayerByLayer(model).layers
    rollouts, images = with_images(name)
    seen = assert_scores(model, rollouts, images, by_layer=by_layer, passes=(3, 2))
    other = {k: v + 1 if v.is_floating_point() else v for k, v in images.items()}
    assert (plain(model, rollouts, other, 0.7) - seen).abs().max() > 1e-3, "images do not matter"


@every_model
def test_what_images_pass_through_is_differentiated_plainly(name):
    """Towers and projectors are trained, too; and as well with rows that need no mask."""
    model = build(name)
    tower = {
        n for n, p in model.named_parameters()
        if any(p is q for top in outside_language(model) for q in top.parameters())
    }  # fmt: skip
    assert 0 < len(tower) < len(list(model.named_parameters()))
    rollouts, images = with_images(name)
    assert_scores(model, rollouts, images, contiguous=True)


@every_model
def test_text_alone(name):
    """Prompts of different lengths; what no image passes through has a gradient of 0."""
    assert_scores(build(name), random_rollouts([2, 6, 4], 4, longest=7, vocab=TEXT), {})


@every_model
def test_adapters_of_language_part_and_tower(name):
    """As TRL's examples make them: projections of queries and values, wherever they are; with the
    hooks that gradient checkpointing needs.
    """
    model = get_peft_model(build(name), LoraConfig(r=3, target_modules=r".*\.(q_proj|v_proj|qkv)"))
    model.enable_input_require_grads()
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn_like(parameter)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert any("language_model" in n or "text_model" in n for n in trained)
    assert any("vision" in n or "visual" in n for n in trained)
    rollouts, images = with_images(name)
    assert_scores(model, rollouts, images)
    check_scores(model, *packed(rollouts, np.arange(2)), images=images)


@pytest.mark.parametrize("name", ["qwen3_vl", "mistral3"])
def test_groups_with_images(name):
    """In passes of at most two, some of whose completions are equal."""
    model = build(name)
    freeze_outside(model)
    rollouts, images = with_images(name)
    rollouts.tokens_PGT[0, 3], rollouts.mask_PGT[0, 3] = (
        rollouts.tokens_PGT[0, 2],
        rollouts.mask_PGT[0, 2],
    )
    policy = Policy(model, LetterTokenizer(), frozenset({1}), 0)
    sketch = Sketch(parameter_sizes(model), 10**7)
    found = group_scores(policy, rollouts, 0, 1.0, sketch, at_once=2, images=images)
    scores = plain(model, rollouts, images)
    expected = (scores @ scores.T).numpy()
    np.testing.assert_allclose(found.gram_GG, expected, rtol=0, atol=1e-9 * expected.max())


def test_what_a_model_remembers_of_the_last_images_stays():
    model = build("qwen3_vl")
    rollouts, images = with_images("qwen3_vl")
    remembered = torch.tensor([[7]])
    model.model.rope_deltas = remembered
    freeze_outside(model)
    assert_scores(model, rollouts, images)
    model.model.rope_deltas = remembered
    completion_scores(model, *packed(rollouts, np.arange(2)), images=images)
    assert model.model.rope_deltas is remembered
