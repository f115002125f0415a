"""Results: examples fit the records, pages name their keys, and what a file lacks is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from folders import completed, keys_of, record_in, unsaved_study
from readme import ROOT

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.registry import MEASUREMENTS, finished_study
from grpo_ustat.runs.contents import content_of, record_of
from grpo_ustat.runs.library import load_run
from grpo_ustat.runs.record import RunRecord
from grpo_ustat.runs.result import (
    StudyResult,
    TheoremResult,
    TrainResult,
)

# Keys of an earlier version.
CHECKSUMS = {"files", "digest"}
RECORDS = (TrainResult, StudyResult, TheoremResult)
EXAMPLES = sorted((ROOT / "docs/examples").rglob("result.json"))


def declared(record):
    """The dotted keys of a record and of those in it."""
    for key, (kind, _) in keys_of(record).items():
        yield key
        inner = record_in(kind)
        yield from (f"{key}.{below}" for below in (declared(inner) if inner else ()))


KEYS = {key for record in RECORDS for key in declared(record)}
for measurement in MEASUREMENTS:
    inner = record_in(measurement.record)
    KEYS |= {measurement.name, *(f"{measurement.name}.{key}" for key in declared(inner))}


def written(content, key=""):
    if isinstance(content, list):
        for entry in content:
            yield from written(entry, key)
    elif isinstance(content, dict):
        for name, value in content.items():
            yield f"{key}{name}"
            yield from written(value, f"{key}{name}.")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.parent.name)
def test_an_example_is_loaded_and_all_of_its_keys_are_declared(file):
    run = load_run(file.parent)
    assert run.result is not None and not run.notes
    free = {
        "alarms",
        "best_divisor",
        "left_out",
        "versions",
        "pool_versions",
        "files",
        "digest",
        "evals",
    }
    for key in written(run.result):
        assert key in KEYS or free & set(key.split(".")), key


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.parent.name)
def test_an_example_is_the_same_when_its_records_are_written_again(file):
    run = load_run(file.parent)
    if run.command != "mse":
        return
    study, content = Study(run), run.final_result
    whole = content_of(study.result)
    for measurement in MEASUREMENTS:
        if (record := study.of(measurement)) is not None:
            whole[measurement.name] = content_of(record)
    assert whole == {key: x for key, x in content.items() if key not in CHECKSUMS}


@pytest.mark.parametrize("record", RECORDS)
def test_a_key_that_is_missing_or_wrong_is_named(record):
    whole = completed(record)
    record_of(record, whole)
    for key in keys_of(record):
        if key in whole and not key.endswith(("_low", "_high")):
            less = {name: value for name, value in whole.items() if name != key}
            with pytest.raises(TypeError, match=key):
                record_of(record, less)
    with pytest.raises(TypeError, match="summary is 3, not str"):
        record_of(record, whole | {"summary": 3})


@pytest.mark.parametrize(
    "one", [one for one in MEASUREMENTS if one.always], ids=lambda one: one.name
)
def test_a_study_that_lacks_what_all_measure_is_not_shown_and_the_key_is_named(one):
    study = unsaved_study({})
    assert finished_study(study.run) is not None and study.need(one) is not None
    for damaged in ({}, {one.name: "x"}):
        rest = {name: x for name, x in study.run.final_result.items() if name != one.name}
        run = RunRecord(Path("runs/a"), result=rest | damaged)
        assert finished_study(run) is None and one.name in run.notes[-1]
        with pytest.raises(ConfigError, match=one.name):
            Study(run).need(one)


def test_a_study_of_equal_rewards_needs_no_measurement():
    study = unsaved_study({"equal_rewards": {"reward": 0.0, "completions": 8, "cut": 8}})
    assert finished_study(study.run) is not None
    assert not any(one.name in study.run.final_result for one in MEASUREMENTS)
