"""A plot of a few lines as SVG: axes with round numbers, a legend, nothing else."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 48, 44
# Later lines are thinner and lie on earlier ones, so that equal ones are all seen.
STYLES = (
    ("#9ecae1", 7.0, ""),
    ("#3182bd", 3.5, ""),
    ("#08306b", 1.5, ""),
    ("#e6550d", 1.5, "2 5"),
    ("#31a354", 1.5, "6 4"),
)
TICKS = 5


def line_plot(lines: Mapping[str, Sequence[float]], *, title: str, x: str, y: str, every: float = 1.0) -> str:
    """Return an SVG of lines by name, whose values are at x = `every`, 2 `every` and so on; y begins at 0."""
    longest = max(len(values) for values in lines.values())
    to_x, x_ticks = scale(longest * every, LEFT, WIDTH - RIGHT)
    to_y, y_ticks = scale(max(max(values) for values in lines.values()), HEIGHT - BOTTOM, TOP)
    parts = frame(title, y, y_ticks, to_y)
    for tick in x_ticks:
        parts.append(text_at(tick * to_x + LEFT, HEIGHT - BOTTOM + 16, f"{tick:g}", "middle"))
    parts.append(text_at((LEFT + WIDTH) / 2, HEIGHT - 8, x, "middle"))
    for number, (name, values) in enumerate(lines.items()):
        colour, width, dashes = STYLES[number % len(STYLES)]
        look = f'fill="none" stroke="{colour}" stroke-width="{width}"'
        look += f' stroke-dasharray="{dashes}"' if dashes else ""
        points = " ".join(
            f"{LEFT + step * every * to_x:.1f},{HEIGHT - BOTTOM + value * to_y:.1f}"
            for step, value in enumerate(values, 1)
        )
        parts.append(f'<polyline points="{points}" {look}/>')
        height = TOP + 14 + 18 * number
        parts.append(f'<path d="M{WIDTH - 220} {height}h36" {look}/>')
        parts.append(text_at(WIDTH - 176, height + 4, name, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def frame(title: str, y: str, ticks: Sequence[float], to_y: float) -> list[str]:
    """Return the beginning of an SVG: its title, what the vertical axis is, and lines at its ticks."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text_at(LEFT, 20, title, "start", 'font-weight="bold"'),
        text_at(8, TOP - 12, y, "start"),
    ]
    for tick in ticks:
        height = HEIGHT - BOTTOM + tick * to_y
        parts.append(f'<path d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(text_at(LEFT - 6, height + 4, f"{tick:g}", "end"))
    return parts


def scale(largest: float, start: float, end: float) -> tuple[float, list[float]]:
    """Return units per value, from 0 at `start` to the first tick beyond the largest at `end`, and ticks."""
    rough = largest / TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in (1, 2, 5, 10) if nice * power >= rough)
    ticks = [step * number for number in range(math.ceil(largest / step) + 1)]
    return (end - start) / ticks[-1], ticks


def text_at(x: float, y: float, text: str, anchor: str, look: str = "") -> str:
    """Return a text element; `anchor`: start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {look}>{escape(text)}</text>'
