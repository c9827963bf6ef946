"""A plot of points on logarithmic axes as SVG, one unit on both, with the diagonal of equal values."""

import math
from collections.abc import Mapping, Sequence

from line_plot import text_at

SIDE = 480
LEFT, RIGHT, TOP, BOTTOM = 64, 200, 36, 48
COLOURS = ("#3182bd", "#e6550d", "#31a354", "#756bb1", "#636363", "#d6a000", "#d6336c")
NICE = (1, 2, 5)  # ticks of a decade


def scatter_plot(
    points: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x: str, y: str, band: float
) -> str:
    """Return an SVG of (x, y) points by name, all above 0; `band` around the diagonal: 0.1 for 10 %."""
    values = [value for own in points.values() for pair in own for value in pair]
    least, most = math.log10(min(values) / 1.2), math.log10(max(values) * 1.2)
    width, height = LEFT + SIDE + RIGHT, TOP + SIDE + BOTTOM

    def across(value: float) -> float:
        return LEFT + SIDE * (math.log10(value) - least) / (most - least)

    def up(value: float) -> float:
        return TOP + LEFT + SIDE - across(value)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text_at(LEFT, 20, title, "start", 'font-weight="bold"'),
        f'<clipPath id="inside"><rect x="{LEFT}" y="{TOP}" width="{SIDE}" height="{SIDE}"/></clipPath>',
    ]
    for tick in _ticks(least, most):
        parts.append(
            f'<path d="M{across(tick):.1f} {TOP}v{SIDE}M{LEFT} {up(tick):.1f}h{SIDE}" stroke="#ddd"/>'
        )
        parts.append(text_at(across(tick), TOP + SIDE + 16, f"{tick:g}", "middle"))
        parts.append(text_at(LEFT - 6, up(tick) + 4, f"{tick:g}", "end"))
    low, high = 10**least, 10**most
    for factor, dashes in ((1.0, ""), (1 + band, "4 4"), (1 - band, "4 4")):
        ends = f"M{across(low):.1f} {up(low * factor):.1f}L{across(high):.1f} {up(high * factor):.1f}"
        parts.append(f'<path d="{ends}" stroke="#888" stroke-dasharray="{dashes}" clip-path="url(#inside)"/>')
    parts += [text_at(LEFT + SIDE / 2, height - 10, x, "middle"), text_at(8, TOP - 4, y, "start")]
    for number, (name, own) in enumerate(points.items()):
        look = f'fill="{COLOURS[number % len(COLOURS)]}" fill-opacity="0.7"'
        parts += [f'<circle cx="{across(a):.1f}" cy="{up(b):.1f}" r="3.5" {look}/>' for a, b in own]
        row = TOP + 14 + 18 * number
        parts.append(f'<circle cx="{LEFT + SIDE + 20}" cy="{row}" r="4" {look}/>')
        parts.append(text_at(LEFT + SIDE + 32, row + 4, name, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ticks(least: float, most: float) -> list[float]:
    decades = range(math.floor(least), math.ceil(most))
    ticks = [nice * 10.0**decade for decade in decades for nice in NICE]
    return [tick for tick in ticks if least <= math.log10(tick) <= most]
