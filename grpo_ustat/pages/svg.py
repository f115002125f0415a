"""Matplotlib's SVG as part of a page: no style attributes, ids of its own, light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
LEFT_OUT = {"metadata", "style", "title", "desc"}  # the style is a default that `inlined` repeats
ELEMENTS = {
    "g", "defs", "path", "rect", "circle", "text", "tspan", "use", "clipPath", "pattern", "image",
}  # fmt: skip
GEOMETRY = {
    "d", "x", "y", "width", "height", "transform", "r", "cx", "cy", "patternUnits",
    "preserveAspectRatio",
}  # fmt: skip
PAINT = {"fill", "stroke"}
STYLES = PAINT | {
    "fill-opacity", "fill-rule", "stroke-width", "stroke-opacity", "stroke-dasharray",
    "stroke-dashoffset", "stroke-linejoin", "stroke-linecap", "stroke-miterlimit", "opacity",
    "text-anchor", "font-size", "font-style", "font-weight", "image-rendering",
}  # fmt: skip
IGNORED = {"style", "id", "version", "viewBox", "type", "font-family", "gid"}
FONT = re.compile(
    r"(?:(?P<style>italic|oblique)\s+)?(?:(?P<weight>bold|\d00)\s+)?(?P<size>[\d.]+px)"
)
PICTURE = "data:image/png;base64,"
VISIBLE = 0.2  # relative luminance from which a line is seen on a dark page


@dataclass(frozen=True)
class Inlined:
    """A picture within a page.

    Attributes:
        markup: an `svg` element, of known elements and attributes alone.
        wide: whether it is wider than a phone can show by shrinking it.
        colours: `#rrggbb` of its lines and areas, but for black and white.
    """

    markup: str
    wide: bool
    colours: frozenset[str]


def inlined(svg: str, name: str) -> Inlined:
    """One of matplotlib's pictures; its black becomes the page's ink, its white the page's paper.

    Args:
        svg: its text, copy with `svg.fonttype: none`.
        name: what its ids begin with; the element `<name>-title` of the page says what it shows.

    Raises:
        ValueError: it is no SVG, or holds what matplotlib's do not.
    """
    try:
        root = ElementTree.fromstring(svg)
        box = [float(number) for number in root.get("viewBox", "").split()]
    except (ElementTree.ParseError, ValueError) as error:
        raise ValueError(f"not an SVG of matplotlib: {error}") from error
    if root.tag != f"{SVG}svg" or len(box) != 4:
        raise ValueError(f"not an SVG of matplotlib: it is <{root.tag}> with viewBox {box}")
    reader = _Reader(name)
    picture = ElementTree.Element(
        "svg", {
            "viewBox": " ".join(f"{number:g}" for number in box),
            "width": f"{box[2] * 4 / 3:.0f}",  # points
            "role": "img", "aria-labelledby": f"{name}-title", "fill": "currentColor",
            "stroke-linejoin": "round", "stroke-linecap": "butt",
        },
    )  # fmt: skip
    picture.extend(reader.children(root))
    markup = ElementTree.tostring(picture, encoding="unicode")
    return Inlined(markup, wide=box[2] > 600, colours=frozenset(reader.colours))


class _Reader:
    """Copies elements; their style becomes attributes, which no policy forbids.

    Args:
        name: what the ids begin with.
    """

    def __init__(self, name: str):
        self._name = name
        self._ids: dict[str, str] = {}
        self.colours: set[str] = set()

    def children(self, parent: ElementTree.Element) -> list[ElementTree.Element]:
        """Copies of an element's children, but for what is not shown."""
        named = [(child, str(child.tag).removeprefix(SVG)) for child in parent]
        return [self._copy(child, tag) for child, tag in named if tag not in LEFT_OUT]

    def _copy(self, element: ElementTree.Element, tag: str) -> ElementTree.Element:
        if tag not in ELEMENTS:
            raise ValueError(f"an SVG of matplotlib holds no <{tag}>")
        copy = ElementTree.Element(tag)
        if tag in ("path", "clipPath", "pattern") and "id" in element.attrib:
            copy.set("id", self._id(element.attrib["id"]))
        for name, value in element.attrib.items():
            key = name.rpartition("}")[2]
            if key in GEOMETRY:
                copy.set(key, value)
            elif key == "clip-path":
                copy.set(key, f"url(#{self._id(_inner(value))})")
            elif key == "href" and tag == "use" and value.startswith("#"):
                copy.set(key, f"#{self._id(value[1:])}")
            elif key == "href" and tag == "image" and value.startswith(PICTURE):
                copy.set(key, value)
            elif key in STYLES:
                self._style(copy, key, value)
            elif key not in IGNORED:
                raise ValueError(f"an SVG of matplotlib holds no {key}={value[:40]!r}")
        for declaration in filter(str.strip, element.get("style", "").split(";")):
            self._style(copy, *map(str.strip, declaration.split(":", 1)))
        if tag in ("text", "tspan"):
            copy.text, copy.tail = element.text, element.tail
        copy.extend(self.children(element))
        return copy

    def _style(self, copy: ElementTree.Element, key: str, value: str = "") -> None:
        if key in PAINT:
            copy.set(key, self._paint(copy, key, value.lower()))
        elif key == "font":
            match = FONT.match(value)
            parts = match.groupdict() if match else {}
            copy.attrib.update({f"font-{k}": text for k, text in parts.items() if text})
        elif key in STYLES:
            copy.set(key, value)

    def _paint(self, copy: ElementTree.Element, key: str, value: str) -> str:
        if value.startswith("url("):
            return f"url(#{self._id(_inner(value))})"
        if value == "#000000":
            return "currentColor"
        if value == "#ffffff":
            copy.set("class", " ".join(filter(None, [copy.get("class"), f"paper-{key}"])))
        elif re.fullmatch("#[0-9a-f]{6}", value):
            self.colours.add(value)
        elif value != "none":
            raise ValueError(f"an SVG of matplotlib has no {key} {value[:40]!r}")
        return value

    def _id(self, old: str) -> str:
        return self._ids.setdefault(old, f"{self._name}-{len(self._ids)}")


def _inner(reference: str) -> str:
    """The id of `url(#id)`; whatever else is there leads nowhere."""
    return reference.removeprefix("url(#").removesuffix(")")


def dark_rules(colours: Iterable[str]) -> list[str]:
    """CSS that lightens colours which a dark page would swallow.

    >>> dark_rules(["#e69f00", "#332288"])
    ['[fill="#332288"]{fill:#857ab8}', '[stroke="#332288"]{stroke:#857ab8}']
    """
    lighter = {colour: _lightened(colour) for colour in sorted(colours)}
    return [
        f'[{key}="{old}"]{{{key}:{new}}}'
        for old, new in lighter.items()
        if new != old
        for key in sorted(PAINT)
    ]


def _lightened(colour: str) -> str:
    """Mixed with as little white, in steps of a twentieth, as makes it visible on a dark page."""
    channels = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    for share in range(21):
        mixed = [round(x + (255 - x) * share / 20) for x in channels]
        linear = [
            x / 12.92 if (x := channel / 255) <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4
            for channel in mixed
        ]
        luminance = sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
        if luminance >= VISIBLE:  # relative luminance of sRGB, WCAG 2.2
            break
    return "#" + "".join(f"{x:02x}" for x in mixed)
