#!/usr/bin/env python
"""Redraw the MSE of the gradient against the group size from a study's curves.csv.

    python scripts/tools/redraw_figure4.py outputs/mse/NAME/seed-0     # writes figure4.png there

This script is a starting point for your own figures. Change its selection, style or quantities as
needed.
"""

import argparse
from pathlib import Path

import matplotlib

# Draw to files, which needs no screen.
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas

parser = argparse.ArgumentParser(description="Redraw a study's figure.")
parser.add_argument("folder", type=Path, help="run folder of a finished study")
folder = parser.parse_args().folder
if not (folder / "curves.csv").is_file():
    parser.error(f"{folder} has no curves.csv: name the folder of a finished study")

# The file has one row per method, baseline, target, setting and group size. Choose here which rows
# to show.
curves = pandas.read_csv(folder / "curves.csv")
first = curves.iloc[0]
shown = curves[
    (curves.method == first.method)
    & (curves.target == first.target)
    & (curves.setting == first.setting)
]

plt.style.use("tableau-colorblind10")
figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
for baseline, rows in shown.groupby("baseline", sort=False):
    rows = rows.sort_values("group_size")
    (line,) = axes.plot(rows.group_size, rows.mse, marker="o", markersize=4, label=baseline)
    axes.fill_between(rows.group_size, rows.low, rows.high, color=line.get_color(), alpha=0.2)

axes.set_xscale("log", base=2)
axes.set_yscale("log")
sizes = sorted(shown.group_size.unique())
axes.set_xticks(sizes, [str(size) for size in sizes])
axes.set_xlabel("group size G")
axes.set_ylabel("mean squared error of the gradient")
axes.set_title(f"{first.method}, {first.setting}; bands: 95 % intervals", fontsize=9)
axes.grid(alpha=0.3)
axes.legend(frameon=False)
figure.savefig(folder / "figure4.png", dpi=150)
print(f"Wrote {folder / 'figure4.png'}")
