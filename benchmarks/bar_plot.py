"""A plot of bars in groups as SVG, for instance of systems on several works: a legend, values on the bars."""

from collections.abc import Mapping

from line_plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, frame, scale, text_at

COLOURS = ("#9ecae1", "#3182bd", "#08306b", "#e6550d", "#31a354")
GAP = 0.3  # of a bar's width, twice between groups
KEY = 130  # a name of the legend, below the bars


def bar_plot(groups: Mapping[str, Mapping[str, float]], *, title: str, y: str) -> str:
    """Return an SVG of a bar for each name of each group; the vertical axis begins at 0.

    A group need not have all names: there is no bar then.
    """
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    to_y, ticks = scale(max(max(values.values()) for values in groups.values()), HEIGHT - BOTTOM, TOP)
    parts = frame(title, y, ticks, to_y)
    wide = (WIDTH - LEFT - RIGHT) / len(groups)
    bar = wide / (len(names) + 2 * GAP)
    for place, (group, values) in enumerate(groups.items()):
        left = LEFT + place * wide
        parts.append(text_at(left + wide / 2, HEIGHT - BOTTOM + 16, group, "middle", 'font-size="11"'))
        for name, value in values.items():
            x, tall = left + bar * (GAP + names.index(name)), -value * to_y
            parts.append(_rectangle(x, HEIGHT - BOTTOM - tall, bar, tall, names.index(name)))
            above = HEIGHT - BOTTOM - tall - 3
            parts.append(text_at(x + bar / 2, above, f"{value:.2g}", "middle", 'font-size="10"'))
    for number, name in enumerate(names):
        x, y_legend = LEFT + KEY * number, HEIGHT - 20
        parts += [_rectangle(x, y_legend, 12, 12, number), text_at(x + 18, y_legend + 10, name, "start")]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rectangle(x: float, y: float, width: float, height: float, number: int) -> str:
    colour = COLOURS[number % len(COLOURS)]
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
