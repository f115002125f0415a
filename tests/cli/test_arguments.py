"""Wrong command lines, each refused in one plain line that says what to type."""

from __future__ import annotations

import re
import shlex

import pytest

from grpo_ustat.cli.compose import parse
from grpo_ustat.config.load import CONF, SCHEMAS, all_fields
from grpo_ustat.config.schema import ConfigError, did_you_mean
from grpo_ustat.config.values import example_value, quote_for_shell

MODELS = (
    "choose from hub, qwen2_5_0_5b, qwen2_5_0_5b_instruct, qwen2_5_1_5b_instruct, qwen2_5_math_7b, "
    "smollm2_135m, tiny, tiny_base, tiny_direct"
)
MODEL = f"{MODELS}, or write model=org/name or model=FOLDER"
TRAIN = {
    ("group_size=abc",): "group_size=abc: a whole number is needed, such as group_size=8",
    ("group_size=8.5",): "group_size=8.5: a whole number is needed, such as group_size=8",
    ("group_size=8.0",): "group_size=8.0: a whole number is needed, such as group_size=8",
    ("group_size=true",): "group_size=true: a whole number is needed, such as group_size=8",
    ("group_size=",): "group_size= has no value: a whole number is needed, such as group_size=8",
    ("group_size=[4,8]",): (
        "group_size=[4,8]: a whole number is needed, not a list; for one run per value: "
        "-m group_size=4,8"
    ),
    ("group_size=4,8",): (
        "group_size=4,8 has several values: add -m for one run per value, as in "
        "grpo-ustat train -m group_size=4,8"
    ),
    ("group_size",): "group_size has no value: write group_size=8",
    ("group_size", "=", "8"): "group_size has no value: write group_size=8",
    ("group_size=", "8"): (
        "the argument 8 is not KEY=VALUE: write KEY=VALUE, as in grpo-ustat train group_size=16 "
        "max_steps=200"
    ),
    ("group_size", "=8"): "group_size has no value: write group_size=8",
    ("group_size = 8",): "group_size = 8: remove the blanks, write group_size=8",
    ("group_size==8",): "group_size==8: a whole number is needed, such as group_size=8",
    ("=8",): (
        "=8 is not KEY=VALUE: write KEY=VALUE, as in grpo-ustat train group_size=16 max_steps=200"
    ),
    ("--group_size", "8"): (
        "unknown flag --group_size: fields have no dashes, write group_size=..."
    ),
    ("--group-size=8",): ("unknown flag --group-size: fields have no dashes, write group_size=..."),
    ("-group_size=8", "seed=1"): (
        "unknown flag -group_size: fields have no dashes, write group_size=..."
    ),
    ("--dry-run",): "unknown flag --dry-run: fields have no dashes, write dry_run=...",
    ("--mulitrun", "seed=0,1"): "unknown flag --mulitrun: did you mean --multirun?",
    ("seed=null",): "seed=null: a whole number is needed, such as seed=0",
    ("learning_rate=fast",): (
        "learning_rate=fast: a number is needed, such as learning_rate=0.007"
    ),
    ("bf16=3",): "bf16=3: true or false is needed, such as bf16=false",
    ("bf16=maybe",): "bf16=maybe: true or false is needed, such as bf16=false",
    ("launch=3",): "launch=3: it has fields of its own, see --help launch",
    ("eval.decoding=[sampled,", "greedy]"): (
        "eval.decoding=[sampled,: a list of words is needed, such as eval.decoding=[sampled]"
    ),
    ("eval.decoding=[sampled",): (
        "eval.decoding=[sampled: a list of words is needed, such as eval.decoding=[sampled]"
    ),
    (
        "model.name='abc",
    ): "model.name='abc: the value cannot be read: check its brackets and quotes",
    ("model.name=a(b",): (
        "model.name=a(b: the value cannot be read, quote it: \"model.name='a(b'\""
    ),
    ("seed=range(0,3",): "seed=range(0,3: a whole number is needed, such as seed=0",
    ("model=tny",): f"unknown model 'tny': did you mean tiny? {MODEL}",
    ("model=qwen2_5_1_5",): (
        f"unknown model 'qwen2_5_1_5': did you mean qwen2_5_1_5b_instruct? {MODEL}"
    ),
    ("model=",): f"model= has no value: {MODELS}",
    ("tiny",): "the argument tiny is not KEY=VALUE: write model=tiny",
    ("model",): "model has no value: write model=NAME, a name that --help model lists",
    ("objective.loss_type=dappo",): (
        "unknown objective.loss_type 'dappo': did you mean dapo? "
        "choose from sum, dr_grpo, dapo, grpo, bnpo, luspo, sapo, cispo, vespo"
    ),
    ("dataset.kind=arithmetik",): (
        "unknown dataset.kind 'arithmetik': did you mean arithmetic? "
        "choose from arithmetic, one_step, gsm8k, math, jsonl, own"
    ),
    ("dataset.kind=0",): (
        "unknown dataset.kind 0: choose from arithmetic, one_step, gsm8k, math, jsonl, own"
    ),
    ("dataset=null",): "dataset=null: a name is needed, see --help dataset",
    ("dataset=True",): "dataset=True: a name is needed, see --help dataset",
    ("logger=wandbb",): (
        "unknown logger 'wandbb': did you mean wandb? choose from none, tensorboard, trackio, wandb"
    ),
    ("+grup_size=1",): "unknown key grup_size: did you mean group_size?",
    ("grup_size=1",): "unknown key grup_size: did you mean group_size=1?",
    ("modle=tiny",): "unknown key modle: did you mean model=tiny?",
    ("modle=x",): "unknown key modle: did you mean model?",
    ("lanch=3",): "unknown key lanch: did you mean launch?",
    ("baseline=grpo",): (
        "unknown baseline 'grpo': write baseline=group_std, or objective=grpo for the loss"
    ),
    ("rloo",): "the argument rloo is not KEY=VALUE: write baseline=leave_one_out",
    ("baseline=trl_dapo",): "unknown baseline 'trl_dapo': write objective=trl_dapo",
    ("dataset=few_shot",): "unknown dataset 'few_shot': write prompt=few_shot",
}
MSE = {
    ("polcy=tiny",): "unknown key polcy: write model=tiny",
    ("group_sizes=8",): "group_sizes=8: a list is needed: group_sizes=[8]",
    ("group_sizes=abc",): (
        "group_sizes=abc: a list of whole numbers is needed, such as group_sizes=[2,4,8]"
    ),
    ("group_sizes=[2,x]",): (
        "group_sizes=[2,x]: a list of whole numbers is needed, such as group_sizes=[2,4,8]"
    ),
    ("group_sizes={4,8}",): (
        "group_sizes={4,8}: a list of whole numbers is needed, such as group_sizes=[2,4,8]"
    ),
    ("group_sizes=[2,", "4]", "seed=1"): (
        "group_sizes=[2,: a list of whole numbers is needed, such as group_sizes=[2,4,8]"
    ),
    ("group_sizes=[4,8]]",): (
        "group_sizes=[4,8]]: a list of whole numbers is needed, such as group_sizes=[2,4,8]"
    ),
    ("pool=[a",): "pool=[a: the value cannot be read: check its brackets and quotes",
    ("group_sizes=4,8",): (
        "group_sizes=4,8 has several values: write group_sizes=[4,8], or add -m for one run "
        "per value, as in grpo-ustat mse -m 'group_sizes=[4],[8]'"
    ),
    ("baselines=oracle",): "baselines=oracle: a list is needed: baselines=[oracle]",
    ("study.methods=[close_form]",): (
        "unknown study.methods 'close_form': did you mean closed_form? "
        "choose from closed_form, monte_carlo"
    ),
    ("study.questions=many",): (
        "study.questions=many: a whole number is needed, such as study.questions=8"
    ),
    ("study=figure",): "study=figure: it has fields of its own, see --help study",
    ("study=3",): "study=3: it has fields of its own, see --help study",
    ("study=figure4",): "study=figure4: write experiment=figure4",
    ("study=lemma6",): "study=lemma6: write grpo-ustat gap theorem=lemma6",
    ("grop_sizes=4",): "unknown key grop_sizes: did you mean 'group_sizes=[4]'?",
    ("theorem=lemma6",): "grpo-ustat mse has no theorem; it is a field of grpo-ustat gap",
}
GAP = {
    ("theorem.replicates=1e3",): (
        "theorem.replicates=1000.0: a whole number is needed, such as theorem.replicates=1000"
    ),
    ("theorem.constant_rates=0.5",): (
        "theorem.constant_rates=0.5: a list is needed: theorem.constant_rates=[0.5]"
    ),
    ("theorem.steps=true",): (
        "theorem.steps=true: a whole number is needed, such as theorem.steps=1000"
    ),
    ("study=lemma6",): "study=lemma6: write theorem=lemma6",
    ("baselines=oracle",): (
        "grpo-ustat gap has no baselines; it is a field of grpo-ustat mse; here it is "
        "theorem.baselines"
    ),
    ("theorem=lemma6,theorem7",): (
        "theorem=lemma6,theorem7 has several values: add -m for one run per value, as in "
        "grpo-ustat gap -m theorem=lemma6,theorem7"
    ),
    ("theorem.problem=coin",): (
        "unknown theorem.problem 'coin': did you mean coins? "
        "choose from coins, uneven_coins, unequal_coins, softmax"
    ),
}
REPORT = {
    ("outputs/train", "outputs/mse", "name=x"): (
        "the argument outputs/train is not KEY=VALUE: write KEY=VALUE, as in grpo-ustat report "
        "runs=outputs/train"
    ),
    ("--runs", "outputs/train"): ("unknown flag --runs: fields have no dashes, write runs=..."),
    ("steps=4",): "steps=4: a list is needed: steps=[4]",
    ("runs=a,b",): (
        "runs=a,b has several values: write runs=[a,b], or if it is a single value, quote it: "
        "\"runs='a,b'\""
    ),
}
CASES = [
    pytest.param(entry, words, line, id=f"{entry} {' '.join(words)}")
    for entry, lines in {"train": TRAIN, "mse": MSE, "gap": GAP, "report": REPORT}.items()
    for words, line in lines.items()
]


def refusal(entry, *words):
    with pytest.raises(ConfigError) as caught:
        parse(entry, list(words))
    return str(caught.value)


EVERY_FIFTH_FAST = [
    pytest.param(
        *case.values, id=case.id, marks=() if place % 5 == 0 else pytest.mark.slow(minutes=0.02)
    )
    for place, case in enumerate(CASES)
]


@pytest.mark.parametrize("entry, words, line", EVERY_FIFTH_FAST)
def test_a_wrong_command_line_is_refused_in_one_plain_line(entry, words, line):
    assert refusal(entry, *words) == line


@pytest.mark.slow
def test_all_bad_points_of_a_sweep_are_named_once():
    assert refusal("train", "-m", "group_size=x,y,4", "seed=0,1").splitlines() == [
        "4 of the sweep's 6 runs cannot start:",
        "  group_size=x: a whole number is needed, such as group_size=8",
        "  group_size=y: a whole number is needed, such as group_size=8",
    ]
    assert refusal("train", "-m", "group_size=x,4", "seed=0,1") == (
        "group_size=x: a whole number is needed, such as group_size=8"
    )


@pytest.mark.slow(minutes=0.02)
def test_of_many_bad_points_five_are_named():
    lines = refusal("gap", "-m", f"theorem={','.join('tuvwxyz')}").splitlines()
    assert lines[0] == "7 of the sweep's 7 runs cannot start:" and lines[-1] == "  and 2 more"
    assert [line.split(":")[0] for line in lines[1:-1]] == [
        f"  unknown theorem '{x}'" for x in "tuvwx"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("words", [
    ["seed=1", "group_sizes=[2,4]"], ["group_sizes=[2, 4]"], ["pool='a [b'"], ["pool=a=1"],
    ["-m", "seed=0,1"], ["+baseline_options.median={}"], ["hydra.run.dir=a/${seed}"],
])  # fmt: skip
def test_right_words_are_left_alone(words):
    """`median` is no rule here, but the words are well formed."""
    try:
        parse("mse", [*words, "dry_run=true"])
    except ConfigError as error:
        assert "write" not in str(error) and "quote" not in str(error)


def test_examples_are_values_of_the_files():
    fields = {field.path: field for field in all_fields(SCHEMAS["mse"])}
    assert example_value(fields["seed"], CONF) == "0"
    assert example_value(fields["group_sizes"], CONF) == "[2,4,8]"
    assert example_value(fields["objective.epsilon"], CONF) is None


def test_a_value_with_a_dollar_is_quoted_so_that_no_shell_reads_it():
    assert quote_for_shell("name", "a(b") == "\"name='a(b'\""
    assert "$" in quote_for_shell("name", "$HOME") and quote_for_shell("name", "$HOME")[0] == "'"


def test_short_words_are_near_to_nothing():
    assert did_you_mean("", ("a", "b")) == "" and did_you_mean("gpu", ("cpu", "cuda")) == ""


SPACED = "runs of may,june"  # a path with blanks and a comma
HINTED = [  # a wrong command line
    ("train", "seed = 4"), ("train", "seed =4"), ("train", " seed=4"), ("train", "seed"),
    ("train", "-m", "seed = 4,5"), ("train", "seed=4,5"), ("train", "tiny_base"),
    ("train", f"output_root={SPACED}"), ("train", f"output_root = {SPACED}"),
    ("mse", f"pool={SPACED}"), ("mse", "pool=it's,mine"), ("train", f"hydra.run.dir={SPACED}"),
    ("train", "output_root=a(b c,d"), ("train", "output_root=a;b"), ("train", "output_root=it's"),
    ("train", "output_root=${x"), ("train", "output_root=$(x"), ("train", "output_root=a!b"),
    ("train", "reward_funcs=task,brevity"), ("train", "group_size=[4,8]"),
    ("train", "group_size=4.0"), ("train", "dry_run=2"), ("train", "seed==4"),
    ("mse", "group_sizes=4"), ("mse", "model=glob(tiny*)"), ("train", "seed=range(4,6)"),
    ("report", "runs = outputs"), ("mse", "group_sizes=2,4"), ("train", "-p", "model"),
    ("train", "--config-path", str(CONF)),
    ("report", "runs=x,y"),
]  # fmt: skip


def typed(line):
    """The command lines that a message says to type, as a shell splits them."""
    line = line.partition(", where ")[0]
    hint = re.split(
        r"(?:write|quote it[:,]|such as|as in|is needed:|per value:) ", line, maxsplit=1
    )[1]
    hint = re.sub(
        r"(, or )(?:add -m for one run per value, as in|if it is a single value, quote it:"
        r"|quote it,) ",
        r"\1",
        hint,
    )
    for words in re.split(",? or ", hint):
        yield [x for x in shlex.split(words) if x not in ("grpo-ustat", "train", "mse", "report")]


@pytest.mark.parametrize(
    "entry, words",
    [
        pytest.param(entry, words, id=f"{entry} {' '.join(words)}",
                     marks=() if place % 8 == 0 else pytest.mark.nightly(minutes=0.02))
        for place, (entry, *words) in enumerate(HINTED)
    ],
)  # fmt: skip
def test_what_is_said_to_be_typed_can_be_typed(entry, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refusal(entry, *words)
    assert len(line.splitlines()) == 1
    for hint in typed(line):
        runs = [] if entry != "report" or any("runs" in x for x in hint) else ["runs=x"]
        sweep = ["-m"] if "-m" in words else []
        parse(entry, [*sweep, *hint, *runs])


@pytest.mark.slow
def test_a_path_with_blanks_and_a_comma_is_one_value_as_it_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = next(typed(refusal("train", f"output_root={SPACED}")))
    assert parse("train", first).planned_runs[0].config.output_root == SPACED
    model = tmp_path / SPACED
    model.mkdir()
    said = refusal("train", f"model={model}")
    assert f"{model} contains no model: no config.json" in refusal("train", *next(typed(said)))


@pytest.mark.parametrize("words, line", [
    (["--config-path", "/a b"], "--config-path=/a b would hide the built-in configuration: write "
     "'--config-dir=/a b', where files override the built-in files"),
    (["-cp", "conf", "-m", "seed=1,2"], "--config-path=conf would hide the built-in"),
    (["--experimental-rerun", "x.pickle"], "--experimental-rerun=x.pickle is not supported"),
    (["--resolve"], "--resolve only changes the output of --cfg: write --cfg job --resolve"),
    (["--package", "model"], "--package=model only changes the output of --cfg: write --cfg"),
    (["--config-dir", "/nowhere"], "--config-dir=/nowhere: there is no such folder"),
    (["seed=1\n2"], "seed=1 2: a whole number is needed"),
    (["name=a\udcff"], r"'name=a\udcff' is not valid UTF-8"),
])  # fmt: skip
def test_a_flag_that_would_change_nothing_is_refused(words, line):
    for entry in ("train", "report"):
        said = refusal(entry, *words)
        assert said.startswith(line) or entry == "report"
        assert len(said.splitlines()) == 1


def test_report_reads_the_folder_of_config_dir(tmp_path):
    (tmp_path / "report.yaml").write_text("defaults: [report_schema, /report, _self_]\nname: own\n")
    (tmp_path / "own.yaml").write_text("defaults: [report, _self_]\nname: mine\n")
    node = parse("report", ["--config-dir", str(tmp_path), "--config-name=own", "runs=x"]).node
    assert node.name == "mine"
