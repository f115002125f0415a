"""A small picture of curves over steps, as SVG text: drawn in no time and the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 30, 38  # margins
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito's
MOST = 400  # points of a curve


class Curve(NamedTuple):
    """A named line.

    Attributes:
        points: (step, value) in order.
        bars: (low, high) of each, or none.
    """

    name: str
    points: Sequence[tuple[float, float]]
    bars: Sequence[tuple[float, float]] = ()


def curve_svg(curves: Sequence[Curve]) -> str:
    """Curves over the same steps and heights; those with intervals have marks."""
    steps = [x for curve in curves for x, _ in curve.points]
    heights = [y for curve in curves for _, y in curve.points]
    heights += [y for curve in curves for bar in curve.bars for y in bar]
    across = _scale(0, max(steps, default=1) or 1, LEFT, WIDTH - RIGHT)
    low, high = min([0.0, *heights]), max(heights, default=1.0)
    up = _scale(low, high if high > low else low + 1, HEIGHT - BOTTOM, TOP)
    parts = [*_axes(max(steps, default=1), (low, high), across, up)]
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        parts += _curve(curve, colour, across, up)
        x = LEFT + 150 * number
        parts.append(f'<text x="{x}" y="16" fill="{colour}">{escape(curve.name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _scale(low: float, high: float, start: float, end: float):
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 1)


def _axes(last: float, heights: tuple[float, float], across, up) -> list[str]:
    low, high = heights
    marks = [low + (high - low) * i / 4 for i in range(5)]
    parts = [
        f'<path d="M{LEFT} {up(y)}H{WIDTH - RIGHT}" stroke="#ccc"/>'
        f'<text x="{LEFT - 6}" y="{up(y) + 4}" text-anchor="end">{y:.2g}</text>'
        for y in marks
    ]
    for x in (0, last / 2, last):
        place = f'x="{across(x)}" y="{HEIGHT - 20}" text-anchor="middle"'
        parts.append(f"<text {place}>{x:g}</text>")
    middle = f'x="{(LEFT + WIDTH - RIGHT) // 2}" y="{HEIGHT - 5}" text-anchor="middle"'
    return [*parts, f"<text {middle}>step</text>"]


def _curve(curve: Curve, colour: str, across, up) -> list[str]:
    every = -(-len(curve.points) // MOST) or 1
    line = " ".join(f"{across(x)},{up(y)}" for x, y in curve.points[::every])
    parts = [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
    for (x, y), (low, high) in zip(curve.points, curve.bars, strict=False):
        parts.append(f'<circle cx="{across(x)}" cy="{up(y)}" r="3" fill="{colour}"/>')
        parts.append(f'<path d="M{across(x)} {up(low)}V{up(high)}" stroke="{colour}"/>')
    return parts
