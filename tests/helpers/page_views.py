"""The page of a run folder of any command."""

from __future__ import annotations

from grpo_ustat.gap.page import VIEW as GAP
from grpo_ustat.measurements.study_page import VIEW as MSE
from grpo_ustat.pages.run_page import run_page
from grpo_ustat.runs.record import RunRecord
from grpo_ustat.train.page import VIEW as TRAIN

VIEWS = {"train": TRAIN, "mse": MSE, "gap": GAP}


def page_of(folder, result=None, now=None):
    """`run_page` in the view of the command whose run the folder holds."""
    return run_page(folder, VIEWS[RunRecord(folder).command], result, now)
