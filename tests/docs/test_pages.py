"""The README and the pages of docs/: every link, path, module and field that they name is there."""

from __future__ import annotations

import ast
import csv
import dataclasses
import functools
import importlib
import importlib.util
import re
import tomllib

import pytest
import trl_room  # noqa: F401  # pages name grpo_ustat.integrations.trl, which wants TRL at its import
import yaml
from readme import PAGES, ROOT, anchor, headings, links, prose

from grpo_ustat.config.load import SCHEMAS, all_fields
from grpo_ustat.config.presets import RECIPES
from grpo_ustat.estimators.baselines import BASELINES, Baseline
from grpo_ustat.pages.symbols import SYMBOLS, legend

TOP = "|".join(("grpo_ustat", "scripts", "conf", "tests", "docs"))
# Of entry points.
GROUPS = {f"grpo_ustat.{name}" for name in ("baselines", "tasks", "rewards")}
OTHER_NAMES = {  # of baselines, of the words of a page, of other programs
    "baseline_options", "median", "digits", "field", "install", "torch", "net", "ipv4",
    "tcp_retries2", "scale_rewards",
    "per_device_train_batch_size", "adv_estimator", "loss_agg_mode", "prompts_together",
    "rows", "scaler", "every", "strict", "parameters",
    "norm_adv_by_std_in_grpo", "logging_steps", "save_steps", "completions", "answer", "by_layer",
}  # fmt: skip
OF_OTHERS = {"docs/verl.md"}  # fields of this program, see there


def test_every_link_and_picture_is_there():
    for page in PAGES:
        for target in links(PAGES[page]):
            assert not re.match(r"https?:", target), f"{page}, {target}: pages name no hosts"
            file, _, fragment = target.partition("#")
            path = (ROOT / page).parent / file if file else ROOT / page
            assert path.is_file(), (page, target)
            if fragment:
                other = path.resolve().relative_to(ROOT).as_posix()
                assert fragment in map(anchor, headings(PAGES[other])), (page, target)


def test_every_page_is_in_the_index():
    assert "docs/README.md" in links(PAGES["README.md"])
    targets = {(ROOT / "docs" / link).resolve() for link in links(PAGES["docs/README.md"])}
    assert {ROOT / page for page in PAGES if not page.endswith("README.md")} <= targets


def test_the_glossary_has_every_symbol_that_a_page_prints():
    bold = re.findall(r"^- \*\*(.+)\*\*: ", PAGES["docs/glossary.md"], re.MULTILINE)
    terms = "\n".join(bold).replace("\\", "")
    assert list(legend([terms + "\nJ*"])) == list(SYMBOLS)
    assert "J\\* is the largest" in PAGES["docs/glossary.md"]


def test_every_path_is_there():
    for page in PAGES:
        for path in re.findall(rf"(?<![\w/.-])(?:\./)?((?:{TOP})/[\w./-]*)", PAGES[page]):
            assert (ROOT / path.rstrip(".")).exists(), (page, path)


def defined(dotted):
    """Whether a dotted name is a module, or a name in one."""
    head, _, name = dotted.rpartition(".")
    module = importlib.import_module(head)
    is_package = hasattr(module, "__path__")
    return hasattr(module, name) or (is_package and importlib.util.find_spec(dotted) is not None)


def test_every_module_and_name_is_there():
    for page in PAGES:
        names = set(re.findall(r"\bgrpo_ustat(?:\.\w+)+", PAGES[page])) - GROUPS
        for code in re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("grpo_ustat"):
                    names |= {f"{node.module}.{alias.name}" for alias in node.names}
        for name in sorted(names):
            assert defined(name), (page, name)


def test_the_layers_are_those_of_the_contract():
    """docs/architecture.md shows the layers of pyproject.toml."""
    page = PAGES["docs/architecture.md"]
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = "\n".join(contract["contracts"][0]["layers"]).replace("grpo_ustat.", "")
    (block,) = re.findall(r"```text\n(.*?)\n```", page, re.DOTALL)
    assert block == layers


def test_the_map_is_the_package():
    """docs/architecture.md draws every room once, and no others."""
    (tree,) = re.findall(r"```\ngrpo_ustat/\n(.*?)\n```", PAGES["docs/architecture.md"], re.DOTALL)
    drawn = re.findall(r"^    (\w+)/ ", tree, re.MULTILINE)
    rooms = [init.parent.name for init in (ROOT / "grpo_ustat").glob("*/__init__.py")]
    assert sorted(drawn) == sorted(rooms)


@functools.cache
def field_names():
    """Every field, key of conf/, group, baseline and option, and what is of another program."""
    names = {path.name for path in (ROOT / "conf").rglob("*") if path.is_dir()}
    for schema in SCHEMAS.values():
        names |= {name for field in all_fields(schema) for name in field.path.split(".")}
    documents = [yaml.safe_load(path.read_text()) for path in (ROOT / "conf").rglob("*.yaml")]
    while documents:
        document = documents.pop()
        if isinstance(document, dict):
            names |= document.keys()
            documents += document.values()
    names |= {field.name for field in dataclasses.fields(Baseline)}
    options = {option for baseline in BASELINES.values() for option in baseline.options}
    return names | options | BASELINES.keys() | OTHER_NAMES


def test_every_field_is_one_of_the_configurations():
    """Of `model.dtype=...` in code, each word."""
    for page in PAGES.keys() - OF_OTHERS:
        shell = "\n".join(re.findall(r"```bash\n(.*?)```", PAGES[page], re.DOTALL))
        spans = "\n".join(re.findall(r"`([^`\n]+)`", prose(PAGES[page])))
        for dotted in re.findall(r"(?<![\w.\-])([a-z]\w*(?:\.\w+)*)=", f"{shell}\n{spans}"):
            assert set(dotted.split(".")) <= field_names(), (page, dotted)


def test_the_page_of_objectives_says_what_to_type_for_each_recipe():
    page = PAGES["docs/objectives.md"]
    rows = re.findall(r"^\| ([^|]+) \| `(objective=[^|]+)` \| (\d+) \|", page, re.MULTILINE)
    assert rows == [
        (name.split(" (")[0], " ".join(recipe.overrides), str(recipe.group_size))
        for name, recipe in RECIPES.items()
    ]


def test_the_table_of_claims_has_the_words_of_the_page():
    words = re.findall(r"^\*\*(.*?)\.?\*\*", PAGES["docs/verdicts.md"], re.MULTILINE)
    starts = tuple(text.replace("\\", "").lower() for text in words)
    for row in csv.DictReader((ROOT / "docs/examples/claims.csv").open()):
        assert row["claim and source"].lower().startswith(starts), row["claim and source"]


QUOTED = {  # how a claim begins in the records, and its paragraph on the page; digits
    "the noise is that of a prompt's": ('The noise of a step is "dominated', 2),
    "in mixed groups": ("Group advantages", 3),
    "a filter by reward": ("Filtering by reward", 2),
    "the mean over": ("The mean over", 2),
    "stale rollouts": ("Large staleness", 2),
    "the effective sample": ("The effective sample size", 2),
    "ratios of the sequence": ("Ratios should be per sequence", 2),
    "the noise of a prompt is": ("The noise of a prompt is proportional", 2),
    "the noise of a completion": ("The variance of a completion", 2),
}
QUOTED_POLICIES = ("tiny_base", "5 updates old")


@pytest.mark.parametrize("claim", QUOTED)
def test_verdicts_quote_their_records(claim):
    """A number and its interval, of `tiny_base` or of its rollouts that are 5 updates old."""
    start, digits = QUOTED[claim]
    paragraphs = PAGES["docs/verdicts.md"].split("\n\n")
    (paragraph,) = [text for text in paragraphs if text.startswith(f"**{start}")]
    records = csv.DictReader((ROOT / "docs/examples/verdicts.csv").open())
    numbers = [
        record[key]
        for record in records
        if record["claim"].startswith(claim) and record["policy"] in QUOTED_POLICIES
        for key in ("number", "low", "high")
        if record["number"]
    ]
    assert numbers
    for number in numbers:
        written = f"{float(number):.{digits}f}"
        assert re.search(rf"(?<![\d.]){re.escape(written)}(?!\d)", paragraph), written
