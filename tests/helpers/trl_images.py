"""Vision-language models for TRL's own GRPOTrainer: random weights and the processors of four
architectures, made without a hub and without torchvision, which has no build for CPUs on PyPI.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import trl_run

QWEN = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TILES = 2  # SmolVLM cuts an image in up to 2 x 2, beside the whole
TOKENS = {  # special ones, the image's first
    "qwen3_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "smolvlm": (
        "<image>", "<fake_token_around_image>", "<global-img>",
        *(f"<row_{i + 1}_col_{j + 1}>" for i in range(TILES) for j in range(TILES)),
    ),
}  # fmt: skip
PLACE = {"qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>"}  # of an image, in a prompt
PLACE |= {"qwen2_5_vl": PLACE["qwen3_vl"], "mistral3": "[IMG]", "smolvlm": "<image>"}
TEMPLATE = (
    "{%% for m in messages %%}{%% if m['content'] is string %%}{{ m['content'] }}{%% else %%}"
    "{%% for part in m['content'] %%}{%% if part['type'] == 'image' %%}%s"
    "{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}{%% endfor %%}"
)
MODULES = {  # transformers' folder of the images and of both; classes in them
    "qwen3_vl": ("qwen2_vl", "Qwen2VLImageProcessorPil", "qwen3_vl", "Qwen3VLProcessor"),
    "qwen2_5_vl": ("qwen2_vl", "Qwen2VLImageProcessorPil", "qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "mistral3": ("pixtral", "PixtralImageProcessorPil", "pixtral", "PixtralProcessor"),
    "smolvlm": ("smolvlm", "SmolVLMImageProcessorPil", "smolvlm", "SmolVLMProcessor"),
}
PATCH = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
SMALL = {"size": {"shortest_edge": 64, "longest_edge": 1024}}
IMAGES = {  # arguments of the images' processor, and of both's
    "qwen3_vl": (PATCH | SMALL, {}),
    "qwen2_5_vl": (PATCH | SMALL, {}),
    "mistral3": (
        {"patch_size": 4, "size": {"longest_edge": 32}}, {"patch_size": 4, "spatial_merge_size": 2}
    ),
    "smolvlm": (
        {"size": {"longest_edge": 8 * TILES}, "max_image_size": {"longest_edge": 8}},
        {"image_seq_len": 4, "video_processor": SimpleNamespace(num_frames=1, fps=1)},
    ),
}  # fmt: skip
WORDS = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0, max_position_embeddings=512,
)  # fmt: skip
MROPE = dict(
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
)
BLOCKS = dict(hidden_size=16, intermediate_size=24, depth=2, num_heads=2, patch_size=4,
              out_hidden_size=32)  # fmt: skip
TOWER = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
PARTS = {  # text_config, vision_config, others
    "qwen3_vl": (
        MROPE, BLOCKS | dict(deepstack_visual_indexes=[0], num_position_embeddings=64), {}
    ),
    "qwen2_5_vl": (MROPE, BLOCKS | dict(window_size=16, fullatt_block_indexes=[1]), {}),
    "mistral3": (
        dict(model_type="ministral3"),
        TOWER | dict(model_type="pixtral", image_size=32, patch_size=4),
        {"spatial_merge_size": 2},
    ),
    "smolvlm": (
        dict(model_type="llama"), TOWER | dict(image_size=8, patch_size=2), {"scale_factor": 2}
    ),
}  # fmt: skip


def processor(kind):
    """Of images and texts, without videos, which need torchvision."""
    from transformers import AutoTokenizer

    pictures, its_class, both, name = MODULES[kind]
    models = "transformers.models"
    pil = importlib.import_module(f"{models}.{pictures}.image_processing_pil_{pictures}")
    same = {f"{models}.{pictures}.image_processing_{pictures}": pil}  # of torchvision
    with mock.patch.dict(sys.modules, same):
        module = importlib.import_module(f"{models}.{both}.processing_{both}")
    if hasattr(module, "num2words"):
        module.num2words = str  # for videos

    class ImagesAlone(getattr(module, name)):
        def check_argument_for_proper_class(self, argument_name, argument):
            return type(argument)

    tokenizer = AutoTokenizer.from_pretrained(trl_run.MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS[kind])})
    of_images, of_both = IMAGES[kind]
    return ImagesAlone(
        image_processor=getattr(pil, its_class)(**of_images), tokenizer=tokenizer,
        chat_template=TEMPLATE % PLACE[kind], **of_both,
    )  # fmt: skip


def model_of(kind, tokenizer):
    """Random weights, all trained."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    image, *others = tokenizer.convert_tokens_to_ids(list(TOKENS[kind]))
    ids = {"image_token_id": image, "image_token_index": image}
    if "qwen" in kind:
        names = ("video_token_id", "vision_start_token_id", "vision_end_token_id")
        ids = {"image_token_id": image} | dict(zip(names, others, strict=True))
    text, vision, more = PARTS[kind]
    config = AutoConfig.for_model(
        kind, text_config=WORDS | {"vocab_size": len(tokenizer)} | text, vision_config=vision,
        tie_word_embeddings=True, **ids, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config)


def questions(count):
    """Sums, each with a picture of its own size."""
    from PIL import Image

    draws = np.random.default_rng(0)
    return [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"],
         "image": Image.fromarray(draws.integers(0, 255, (16 + 8 * (k % 3), 24, 3), np.uint8))}
        for k, row in enumerate(trl_run.questions(count))
    ]  # fmt: skip
