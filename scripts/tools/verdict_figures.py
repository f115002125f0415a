"""Draw published claims: each policy's measurement, and the range in which a claim holds.

    python scripts/tools/verdict_figures.py
    python scripts/tools/verdict_figures.py "tiny_base=outputs/mse/NAME/seed-0" more studies

The script draws the records in docs/examples/verdicts.csv. Studies with `experiment=verdicts` can
be passed as NAME=FOLDER, where NAME is shown in the figures. Their results are first added to the
records and replace records with the same name.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

ROOT = Path(__file__).resolve().parents[2]
ENDS = {"number": "", "low": "_low", "high": "_high"}
COLUMNS = ["policy", "claim", "measured", *ENDS, "least", "most", "holm_p", "verdict"]
SHARE = "prompts' share of the noise"
# Panels of a figure, each with the beginning of the claim, the axis label, and True if the axis can
# be logarithmic.
STEP_SIZE = [
    ("a step of 8192", "rollouts at which half of a step\nis noise, n_c(16)", True),
    ("512 x 16", "extra error of 128 x 64\nover 512 x 16", False),
]
# Beginnings of claims about stale rollouts. Only these claims are taken from a study of stale
# rollouts.
OF_AGE = ("stale rollouts", "the effective sample", "ratios of the sequence")
# An axis that can be logarithmic is logarithmic if the ratio of its ends exceeds this.
WIDE = 4
SHADE = "#56B4E9"
COLOURS = {"holds": "#0072B2", "does not hold": "#D55E00", "not decided": "#666666"}
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

Record = dict[str, str]


def taken(policy: str, folder: Path) -> list[Record]:
    """Return a study's records: its verdicts, and the prompts' share of the noise at every G.

    From a study of stale rollouts only the claims about staleness are taken, because the other
    records belong to the policy that wrote the rollouts.
    """
    result = json.loads((folder / "result.json").read_text())
    if not result.get("verdicts"):
        raise SystemExit(f"{folder} has no verdicts: run the study with experiment=verdicts")

    def record(row: Mapping, number: str, **words: object) -> Record:
        cells = dict(words)
        cells |= {name: row.get(f"{number}{end}") for name, end in ENDS.items()}
        written = {
            name: f"{value:.6g}" if isinstance(value, float) else str(value)
            for name, value in cells.items()
            if value is not None
        }
        return dict.fromkeys(COLUMNS, "") | {"policy": policy} | written

    columns = ("claim", "measured", "least", "most", "holm_p", "verdict")
    judged = [
        record(row, "number", **{name: row.get(name) for name in columns})
        for row in result["verdicts"]
    ]
    shares = [
        record(row, "prompt_share", claim=SHARE, measured=f"{row['group_size']:g}")
        for row in result["noise"]["curve"]
    ]
    aged = [row for row in judged if row["claim"].startswith(OF_AGE)]
    return aged or judged + shares


def forest(panels: list[tuple[str, str, bool]], records: list[Record], path: Path) -> None:
    """Draw 95 % intervals by policy, arrows for missing upper ends, and the claims' ranges."""
    shown = [[r for r in records if r["claim"].startswith(start)] for start, _, _ in panels]
    names = list(dict.fromkeys(r["policy"] for rows in shown for r in rows))
    image, axes = plt.subplots(
        1, len(panels), figsize=(2.4 + 2.5 * len(panels), 1.5 + 0.24 * len(names)), sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axis, (_, label, logs), rows in zip(axes[0], panels, shown, strict=True):
        estimated = [r for r in rows if r["number"] or r["low"]]
        ends = [float(r[key]) for r in estimated for key in ENDS if r[key]]
        bounds = [float(rows[0][key]) for key in ("least", "most") if rows[0][key]]
        low, high = min([*ends, *bounds]), max([*ends, *bounds])
        log = logs and 0 < WIDE * low < high
        if log:
            low, high = low / 1.15, high * 1.15
            axis.set_xscale("log")
            # Ticks are at 1, 2 and 5 times powers of ten, or at powers of ten only.
            digits = (1, 2, 5) if high < 100 * low else (1,)
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            ticks = [digit * 10.0**power for power in powers for digit in digits]
            axis.set_xticks([x for x in ticks if low <= x <= high])
            axis.minorticks_off()
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.10g}".replace(",", " "))
        else:
            margin = 0.07 * (high - low)
            low, high = low - margin, high + margin
            axis.xaxis.set_major_locator(MaxNLocator(5))
        least, most = (float(rows[0][key] or end) for key, end in (("least", low), ("most", high)))
        axis.axvspan(max(least, low), min(most, high), color=SHADE, alpha=0.2, linewidth=0)
        for r in rows:
            y, colour = names.index(r["policy"]), COLOURS.get(r["verdict"], COLOURS["not decided"])
            if r not in estimated:
                axis.text(0.5, y, r["verdict"], transform=axis.get_yaxis_transform(), va="center",
                          ha="center", fontsize=8, color=colour)  # fmt: skip
                continue
            ending = float(r["high"]) if r["high"] else high
            axis.plot([float(r["low"] or low), ending], [y, y], color=colour, linewidth=1.6)
            if not r["high"]:
                axis.plot(high, y, ">", color=colour, clip_on=False)
            if r["number"]:
                axis.plot(float(r["number"]), y, "o", color=colour, markersize=5)
        axis.set(xlim=(low, high), xlabel=label, yticks=range(len(names)), yticklabels=names)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.grid(axis="x", alpha=0.3)
    used = [word for word in COLOURS if any(r["verdict"] == word for rows in shown for r in rows)]
    marks: list = [Line2D([], [], color=COLOURS[x], marker="o", markersize=5) for x in used]
    marks.append(Rectangle((0, 0), 1, 1, facecolor=SHADE, alpha=0.2))
    image.legend(
        marks, [*used, "the claim holds here"], loc="outside lower center", ncols=2 + len(panels),
        columnspacing=1, handlelength=1.5, frameon=False, fontsize=8,
    )  # fmt: skip
    image.suptitle("Lines: 95 % intervals", fontsize=8, x=0.01, ha="left")
    image.savefig(path, dpi=100)
    plt.close(image)


def prompt_shares(records: list[Record], path: Path) -> None:
    """Draw the prompts' share of the noise against G, with a line and a 95 % band per policy."""
    image, axis = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    rows = [r for r in records if r["claim"] == SHARE and r["number"]]
    for policy, colour in zip(dict.fromkeys(r["policy"] for r in rows), cycle(LINES), strict=False):
        policy_rows = [r for r in rows if r["policy"] == policy]
        sizes, *ends = zip(
            *([float(r[x]) for x in ("measured", *ENDS)] for r in policy_rows), strict=True
        )
        axis.plot(sizes, ends[0], ".-", color=colour, label=policy)
        axis.fill_between(sizes, ends[1], ends[2], color=colour, alpha=0.15, linewidth=0)
    axis.axhline(0.5, color="black", linestyle="--", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set(
        xlabel="group size G (bands: 95 % intervals)",
        ylabel="prompts' share of the noise",
        ylim=(0, 1),
    )
    axis.grid(alpha=0.3)
    image.legend(loc="outside right upper", frameon=False, fontsize=8)
    image.savefig(path, dpi=100)
    plt.close(image)


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", help="studies to add, as NAME=FOLDER")
    parser.add_argument("--records", type=Path, default=ROOT / "docs/examples/verdicts.csv")
    parser.add_argument("--images", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args()
    records = list(csv.DictReader(options.records.open())) if options.records.exists() else []
    for study in options.studies:
        name, _, folder = study.partition("=")
        rows = taken(name, Path(folder))
        records = [r for r in records if r["policy"] != name] + rows
    if not records:
        parser.error(f"{options.records} has no records: pass studies as NAME=FOLDER")
    if options.studies:
        with options.records.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(records)
    judged = [panel for panel in STEP_SIZE if any(r["claim"].startswith(panel[0]) for r in records)]
    if judged:
        forest(judged, records, options.images / "rollouts_8192.png")
    prompt_shares(records, options.images / "prompt_share.png")
    print(f"Drew the figures of {options.records} into {options.images}")


if __name__ == "__main__":
    main()
