"""Tokenizers of the embedded policies: the same tokens whoever loads them."""

from __future__ import annotations

import json
import shutil
import string
from itertools import islice

import pytest
from transformers import AutoTokenizer

from grpo_ustat.config.model import ASSETS
from grpo_ustat.policy.tokenizer import load_tokenizer, save_tokenizer
from grpo_ustat.tasks.arithmetic import Ranges, stream

NAMES = ("tiny", "tiny_base", "tiny_direct")
SPECIAL = ("<|pad|>", "<|end|>", "<|unknown|>")
IDS = {  # the first tokenizer's, which the policies were trained with
    character: 3 + i
    for i, character in enumerate(sorted(["\n", *(c for c in string.printable if c.isprintable())]))
}
QUESTIONS = [
    text
    for question in islice(stream("train", Ranges(), 0), 100)
    for text in (f"{question.text}=", f" What is  {' '.join(question.text)} ?\n\nSay: ")
]


@pytest.fixture(scope="module", params=[(name, kind) for name in NAMES for kind in ("own", "new")])
def folder(request, tmp_path_factory):
    """An embedded policy's folder, or one that its tokenizer was saved to as checkpoints do."""
    name, kind = request.param
    if kind == "own":
        return ASSETS / name
    saved = tmp_path_factory.mktemp(name)
    shutil.copy(ASSETS / name / "config.json", saved)
    save_tokenizer(load_tokenizer(f"embedded:{name}"), saved)
    return saved


def test_a_bare_auto_tokenizer_reads_and_writes_the_same_tokens(folder):
    bare, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder))
    assert len(QUESTIONS) == 200
    for text in QUESTIONS:
        expected = [IDS[character] for character in text]
        for tokenizer in (bare, ours):
            assert tokenizer(text)["input_ids"] == expected
            assert tokenizer.decode(expected) == text
            ended = [*expected, tokenizer.eos_token_id, tokenizer.pad_token_id]
            assert tokenizer.decode(ended, skip_special_tokens=True) == text
    for tokenizer in (bare, ours):
        assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2]
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
        assert tokenizer.padding_side == "left" and len(tokenizer) == 99


def test_a_character_of_no_token_is_one_unknown_token(folder):
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer("1é日😀\t2<|end|>")["input_ids"]
    assert ids == [IDS["1"], 2, 2, 2, 2, IDS["2"], 1]
    assert tokenizer.decode(ids) == "1" + 4 * "<|unknown|>" + "2<|end|>"


def test_the_class_is_one_that_every_transformers_knows(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
