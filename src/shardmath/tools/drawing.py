"""Pictures of measurements, drawn with Pillow as lines and boxes."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardmath.errors import BackendUnavailable

_INK, _GRID, _PAPER, _WAIT = "#222222", "#dddddd", "#ffffff", "#bbbbbb"
_OTHERS = "#777777"
_COLOURS = (
    *("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"),
    *("#ee7733", "#009988", "#997700", "#6699cc"),
)
_WIDTH, _MARGIN, _LINE, _TEXT = 1200, 12, 34, 13  # pixels
_TICKS = 10  # at most
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}  # seconds


class Bar(NamedTuple):
    """A box of a timeline: its line, its beginning and end in seconds, and its name. Without a name
    it is a wait, which is drawn upon the others. Boxes of one `group` have one colour; without one
    a box is of the group of its name.
    """

    line: int
    begun: float
    ended: float
    name: str
    group: str = ""


def unit_for(seconds: float) -> str:
    """The largest of `UNITS` of which so long a time has one at least, or else the smallest."""
    return next((unit for unit, one in UNITS.items() if seconds >= one), "ns")


def timeline(bars: Sequence[Bar], lines: Sequence[str]) -> Any:
    """A picture of bars along a common time axis, with a colour for each of the groups that take
    longest, and one for all others.
    """
    lasting: dict[str, float] = defaultdict(float)
    for bar in bars:
        if bar.name:
            lasting[bar.group or bar.name] += bar.ended - bar.begun
    longest = sorted(lasting, key=lambda name: -lasting[name])[: len(_COLOURS)]
    names = [*sorted(longest), *(["others"] if len(lasting) > len(longest) else [])]
    colours = dict(zip(names, (*_COLOURS[: len(longest)], _OTHERS), strict=False)) | {"": _WAIT}
    begun = min((bar.begun for bar in bars), default=0.0)
    span = max((bar.ended for bar in bars), default=0.0) - begun or 1e-9
    legend = [*names, ""]
    foot = _MARGIN + _LINE * len(lines)
    image, draw = _canvas(foot + 2 * _LINE + (_TEXT + 6) * ((len(legend) + 3) // 4))
    left = _MARGIN + max((_width(draw, name) for name in lines), default=0) + _MARGIN
    scale = (_WIDTH - left - _MARGIN) / span
    unit = unit_for(span)
    for tick in _ticks(span / UNITS[unit]):
        x = left + tick * UNITS[unit] * scale
        draw.line((x, _MARGIN, x, foot), fill=_GRID)
        words = f"{tick:g} {unit}"
        draw.text((min(x, _WIDTH - _MARGIN - _width(draw, words)), foot + 4), words, fill=_INK)
    for bar in sorted(bars, key=lambda bar: not bar.name):
        top = _MARGIN + _LINE * bar.line + (4 if bar.name else _LINE // 2)
        x = left + (bar.begun - begun) * scale
        box = x, top, max(x, x + (bar.ended - bar.begun) * scale), _MARGIN + _LINE * bar.line + 28
        draw.rectangle(box, fill=colours.get(bar.name and (bar.group or bar.name), _OTHERS))
        room = box[2] - box[0] - 8
        if room > 0 and _width(draw, bar.name) < room:
            draw.text((x + 4, top - 1), bar.name, fill=_PAPER)
    for i, name in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + _LINE * i + 10), name, fill=_INK)
    for i, name in enumerate(legend):
        x, y = left + i % 4 * (_WIDTH - left) // 4, foot + _LINE + i // 4 * (_TEXT + 6)
        draw.rectangle((x, y + 1, x + 10, y + 11), fill=colours[name])
        draw.text((x + 16, y), name or "waits for another rank", fill=_INK)
    return image


def columns(
    title: str, values: Sequence[tuple[str, float]], *, others: Sequence[tuple[str, float]] = ()
) -> Any:
    """A picture of named values that are not negative, with a horizontal bar for each.

    `others` are values of pictures that this one is compared with: all have the same scale.
    """
    image, draw = _canvas(2 * _MARGIN + _LINE * (len(values) + 1))
    draw.text((_MARGIN, _MARGIN), title, fill=_INK)
    left = 2 * _MARGIN + max((_width(draw, name) for name, _ in [*values, *others]), default=0)
    room = _WIDTH - left - 8 * _MARGIN
    most = max((value for _, value in [*values, *others]), default=0.0) or 1.0
    for i, (name, value) in enumerate(values):
        y = _MARGIN + _LINE * (i + 1)
        draw.text((_MARGIN, y + 6), name, fill=_INK)
        draw.rectangle((left, y, left + value / most * room, y + _LINE - 10), fill=_COLOURS[0])
        draw.text((left + value / most * room + 6, y + 6), f"{value:.4g}", fill=_INK)
    return image


def below(images: Sequence[Any]) -> Any:
    """One picture of several, one below the other."""
    whole, _ = _canvas(sum(image.size[1] for image in images))
    top = 0
    for image in images:
        whole.paste(image, (0, top))
        top += image.size[1]
    return whole


def save_beside(path: Path, draw: Callable[[], Any], command: str) -> list[str]:
    """Draw a picture, and write it as PNG beside the file of a command. The names of both files;
    without Pillow that of the file alone, and the command says why.
    """
    picture = path.with_suffix(".png")
    try:
        draw().save(picture, "PNG")
    except BackendUnavailable as error:
        print(f"shardmath {command}: no picture: {error}", file=sys.stderr)
        return [str(path)]
    return [str(path), str(picture)]


def _ticks(most: float) -> list[float]:
    """Round, equidistant numbers from 0 to `most`."""
    step = 10.0 ** math.floor(math.log10(most / _TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if most / (factor * step) <= _TICKS)
    return [number * step for number in range(int(most / step) + 1)]


def _canvas(height: int) -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise BackendUnavailable('pictures need Pillow: pip install "shardmath[plot]"') from None
    image = Image.new("RGB", (_WIDTH, height), _PAPER)
    draw = ImageDraw.Draw(image)
    draw.font = ImageFont.load_default(_TEXT)
    return image, draw


def _width(draw: Any, text: str) -> int:
    return int(draw.textlength(text))
