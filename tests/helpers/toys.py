"""Toy models as folders: bytes as tokens, chat formats, a model with code of its own."""

from __future__ import annotations

import json

from fakes import random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from grpo_ustat.records import Question

SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{{ bos_token }}{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind."
    "<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}\n{% endfor %}"
)
DEAF = (
    "{% for m in messages if m['role'] != 'system' %}"
    "[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
)
QUESTIONS = [
    Question(f"q{i}", f"[red]{i}+1[/red]", str(i + 1), "sum", f"#### {i + 1}") for i in range(3)
]


def tokenizer(chat_template=None):
    """A token for every byte, `<s>` before every text, as Llama's and Gemma's have one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"], chat_template=chat_template,
    )  # fmt: skip


def folder(path, chat_template=None, positions=64):
    """A random model of two layers and its tokenizer, in save_pretrained layout."""
    tokens = tokenizer(chat_template)
    model = random_model(vocab=len(tokens))
    model.config.max_position_embeddings = positions
    model.config.eos_token_id = model.generation_config.eos_token_id = 2
    model.save_pretrained(path)
    tokens.save_pretrained(path)
    return path


OWN = """
from transformers import Qwen2Config, Qwen2ForCausalLM

print("code of the model runs")


class OwnConfig(Qwen2Config):
    model_type = "own"


class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig
"""


def with_own_code(path):
    """A folder whose config.json asks for code that lies beside it."""
    folder(path)
    (path / "own.py").write_text(OWN)
    file = path / "config.json"
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config = json.loads(file.read_text()) | {"model_type": "own", "auto_map": classes}
    file.write_text(json.dumps(config | {"architectures": ["OwnForCausalLM"]}))
    return path
