"""Line charts as SVG text, for reports that need no library and no network.

>>> chart("Batch", "sequences", {"running": [(0.0, 1.0), (1.0, 3.0)]}).startswith("<svg ")
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 44, 40
COLORS = ("#4C78A8", "#F58518", "#54A24B", "#E45756", "#72B7B2", "#B279A2", "#9D755D", "#EECA3B")
_INK, _FAINT, _GRID = "#333333", "#8A8A8A", "#E3E3E3"
_ROW = 14  # of a legend
_MOST_NAME = 120  # characters of a name in it, which fill a row
_MOST_POINTS = 1200  # of a line: a picture has no more columns


def chart(
    title: str,
    unit: str,
    lines: Mapping[str, Points],
    *,
    x_label: str = "seconds",
    is_log: bool = False,  # the vertical axis
    is_marked: bool = False,  # a dot at each point
    limits: Mapping[str, float] | None = None,  # dashed horizontal lines, by name
) -> str:
    """Return a line chart; points that are not finite interrupt their line."""
    found = {name: _thinned(points) for name, points in lines.items()}
    every = [point for points in found.values() for point in points if all(map(math.isfinite, point))]
    limits = limits or {}
    if is_log:
        every = [(x, y) for x, y in every if y > 0]
    if not every:
        return ""
    right = max(x for x, _ in every)
    left = min(0.0, min(x for x, _ in every))
    top = max([y for _, y in every] + list(limits.values()))
    low = min([y for _, y in every] + list(limits.values()))
    ticks = _decades(low, top) if is_log else _ticks(top)
    bottom, top = (ticks[0], max(ticks[-1], top)) if is_log else (0.0, max(ticks[-1], top))
    legend, down = _legend(list(found))
    above = _TOP + down
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - above - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        share = math.log(max(y, bottom) / bottom) / math.log(top / bottom) if is_log else y / (top or 1.0)
        return _LEFT + wide * (x - left) / ((right - left) or 1.0), above + high * (1 - share)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">']
    parts += [f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>', _text(12, 18, title, 13, _INK)]
    for tick in ticks:
        _, y = place(left, tick)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{_GRID}"/>')
        parts.append(_text(_LEFT - 6, y + 3.5, _short(tick), 10, _FAINT, "end"))
    for tick in _ticks(right):
        x, _ = place(tick, bottom)
        parts.append(_text(x, _HEIGHT - _BOTTOM + 15, _short(tick), 10, _FAINT, "middle"))
    parts.append(_text(_LEFT + wide / 2, _HEIGHT - 8, x_label, 10, _FAINT, "middle"))
    parts.append(_text(_WIDTH - _RIGHT, 18, unit, 10, _FAINT, "end"))
    for name, limit in limits.items():
        _, y = place(left, limit)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{_INK}" stroke-dasharray="4 3"/>')
        parts.append(_text(_WIDTH - _RIGHT, y - 3, name, 9, _INK, "end"))
    for number, points in enumerate(found.values()):
        color = COLORS[number % len(COLORS)]
        parts.append(f'<path d="{_path(points, place, is_log)}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        if is_marked:
            shown = [place(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not is_log)]
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"/>' for x, y in shown]
    parts += legend
    return "\n".join([*parts, "</svg>"])


def stacked(charts: Sequence[str]) -> str:
    """Return one picture of several charts, one below the other."""
    shown = [each for each in charts if each]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT * len(shown)}">'
    places = [each.replace("<svg ", f'<svg y="{_HEIGHT * number}" ', 1) for number, each in enumerate(shown)]
    size = f'width="{_WIDTH}" height="{_HEIGHT}" '
    return "\n".join([head, *(each.replace("<svg ", f"<svg {size}", 1) for each in places), "</svg>", ""])


def _legend(names: Sequence[str]) -> tuple[list[str], int]:
    """Return the legend, and how far its rows after the first reach down."""
    parts, x, down = [], 12.0, 0
    for number, name in enumerate(names):
        color, shown = COLORS[number % len(COLORS)], name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}…"
        width = 24 + 5.6 * len(shown)
        if x > 12 and x + width > _WIDTH:
            x, down = 12.0, down + _ROW
        parts.append(f'<rect x="{x:.0f}" y="{26 + down}" width="9" height="9" fill="{color}"/>')
        parts.append(_text(x + 13, 34 + down, shown, 10, _INK))
        x += width
    return parts, down


def _path(points: Points, place: object, is_log: bool) -> str:
    assert callable(place)
    found, is_open = [], False
    for x, y in points:
        if not math.isfinite(y) or (is_log and y <= 0):
            is_open = False
            continue
        at = place(x, y)
        found.append(f"{'L' if is_open else 'M'}{at[0]:.1f} {at[1]:.1f}")
        is_open = True
    return "".join(found)


def _text(x: float, y: float, text: str, size: int, color: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _thinned(points: Points) -> Points:
    step = -(-len(points) // _MOST_POINTS) or 1
    return points[::step]


def _ticks(most: float) -> list[float]:
    """Return about five round numbers from 0 to `most`.

    >>> _ticks(7.3)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    if not most > 0:
        return [0.0]
    rough = most / 4
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [step * number for number in range(math.ceil(most / step * 0.999) + 1)]


def _decades(low: float, most: float) -> list[float]:
    """Return the powers of ten around a range."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(most))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def _short(value: float) -> str:
    """Format a number on an axis.

    >>> _short(12000), _short(0.25), _short(3.0), _short(1e6)
    ('12k', '0.25', '3', '1M')
    """
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{suffix}"
    return f"{value:.4g}"
