"""Names of other trainers and plain words, each refused with what to type in its place."""

from __future__ import annotations

import subprocess
import sys

import pytest

from grpo_ustat.cli import compose
from grpo_ustat.cli.choices import RUN_SCHEMAS
from grpo_ustat.cli.compose import parse
from grpo_ustat.cli.errors import check_names
from grpo_ustat.cli.hydra_api import parse_overrides
from grpo_ustat.cli.names import CHOICES, NAMES, OTHER_VALUES, has
from grpo_ustat.config.load import SCHEMAS
from grpo_ustat.config.schema import ConfigError

WRITE = {  # a line: what to type
    "mse policy=tiny": "model=tiny",
    "train policy=Qwen/Qwen2.5-0.5B": "model=Qwen/Qwen2.5-0.5B",
    "gap policy=softmax": "theorem.problem=softmax",
    "mse polcy=tiny": "model=tiny",
    "train algo=grpo": "objective=grpo",
    "train algo=leave_one_out": "baseline=leave_one_out",
    "train algorithm.adv_estimator=grpo": "baseline=group_std",
    "mse estimator=rloo": "baseline=leave_one_out",
    "mse baseline=rloo": "baseline=leave_one_out",
    "train data=gsm8k": "dataset=gsm8k",
    "mse task=math": "dataset=math",
    "mse data=my/rows.jsonl": "dataset=jsonl dataset.path=my/rows.jsonl",
    "train G=8": "group_size=8",
    "mse G=8": "'group_sizes=[8]'",
    "mse G=[4,8]": "'group_sizes=[4,8]'",
    "train group=8": "group_size=8",
    "train group-size=8": "group_size=8",
    "train num_generations=8": "group_size=8",
    "train actor_rollout_ref.rollout.n=8": "group_size=8",
    "train n=1024": "budget.rollouts=1024",
    "mse n=1024": "study.rollouts=1024",
    "gap n=64": "theorem.rollouts=64",
    "train lr=1e-5": "learning_rate=1e-5",
    "train -m lr=1e-4,1e-5": "-m learning_rate=1e-4,1e-5",
    "train actor.optim.lr=1e-6": "learning_rate=1e-6",
    "train steps=10": "max_steps=10",
    "gap steps=10": "theorem.steps=10",
    "train kl_coef=0.01": "objective.beta=0.01",
    "train clip_ratio=0.2": "objective.epsilon=0.2",
    "train max_new_tokens=256": "max_completion_length=256",
    "train output_dir=runs": "output_root=runs",
    "train wandb=true": "logger=wandb",
    "train use_vllm=true": "rollout=vllm",
    "train scheduler=cosine": "schedule.lr_scheduler_type=cosine",
    "train reward_fn=my.py:score": "'reward_funcs=[my.py:score]'",
    "gap theorem=7": "theorem=theorem7",
    "gap lemma=6": "theorem=lemma6",
    "report path=outputs": "runs=outputs",
}


def refusal(line):
    entry, *words = line.split()
    with pytest.raises(ConfigError) as caught:
        parse(entry, words)
    return str(caught.value)


@pytest.fixture(autouse=True)
def nothing_is_composed(monkeypatch):
    def composing(*_):
        raise AssertionError("composed")

    monkeypatch.setattr(compose, "composing", composing)


@pytest.mark.parametrize("line", WRITE)
def test_a_name_of_others_is_refused_with_what_to_type_which_is_taken(line):
    assert refusal(line).endswith(f"write {WRITE[line]}")
    words = [word.strip("'") for word in WRITE[line].split() if word != "-m"]
    check_names(parse_overrides(words), SCHEMAS[line.split()[0]])


@pytest.mark.parametrize("line, parts", [
    ("mse lr=1e-5", ("learning_rate of train", "grpo-ustat train learning_rate=1e-5")),
    ("mse steps=10", ("max_steps of train", "grpo-ustat train max_steps=10")),
    ("mse learning_rate=1e-5", ("train",)),
    ("mse epochs=3", ("in train", "max_steps")),
    ("train algo=ppo", ("objective=NAME", "trl_dapo")),
    ("mse experiment=figure5", ("train has figure5_gsm8k, figure5_offline", "figure4")),
    ("mse study.questionz=3", ("study.questions",)),
    ("mse budget=nope", ("study, study_smoke",)),
    ("train group_size=abc", ("group_size=8",)),
    ("train foo=1", ("--help all",)),
])  # fmt: skip
def test_a_line_without_a_name_of_its_own_says_where_to_look(line, parts):
    said = refusal(line)
    assert all(part in said for part in parts) and len(said.splitlines()) == 1


@pytest.mark.parametrize("words", [
    ["model=tiny", "seed=1", "dataset.levels=[3]", "hydra.verbose=true", "hydra/launcher=basic"],
    ["+dataset.options.size=3", "baseline_options.group_std.epsilon=0.1", "baselines=[none]"],
    ["experiment=null", "budget=glob(study*)", "seed=${study.questions}"],
    ["prompt.template_options.x=1", "model=tiny,hub", "study.questions=null"],
])  # fmt: skip
def test_what_there_may_be_is_left_to_hydra(words):
    check_names(parse_overrides(words), SCHEMAS["mse"])


def test_every_name_that_is_suggested_is_a_field_or_a_group():
    names = {name for names in NAMES.values() for name in names} | set(CHOICES)
    schemas = SCHEMAS.values()
    assert not [name for name in names if not any(has(schema, name) for schema in schemas)]
    assert not NAMES.keys() & OTHER_VALUES.keys()


@pytest.mark.parametrize("entry", RUN_SCHEMAS)
def test_a_choice_by_another_name_is_a_choice(entry):
    schema = SCHEMAS[entry]
    words = [f"{group}={choice}" for group, of in CHOICES.items() for choice in of.values()]
    here = [word for word in words if has(schema, word.partition("=")[0])]
    check_names(parse_overrides(here), schema)


@pytest.mark.slow
def test_a_refusal_imports_nothing_slow(tmp_path):
    program = (
        "import sys; sys.argv = ['mse', 'policy=tiny']\n"
        "from grpo_ustat.mse.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 2\n"
        "slow = {'torch', 'transformers', 'datasets', 'scipy', 'matplotlib', 'rich', 'jinja2'}\n"
        "assert not slow & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0 and "write model=tiny" in done.stderr
