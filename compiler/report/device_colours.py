"""Colours that tell devices apart, on light pages and dark ones.

Few devices have the eight colours of Okabe and Ito (Color Universal Design, 2008), which colour-blind readers
tell apart too. Of more devices, up to four of a host are shades of one hue.
"""

from collections.abc import Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass

FEW = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999")
SHADES = (0.30, 0.46, 0.64, 0.82)  # lightness
SATURATION = 0.7
TURN = 0.382  # between hues, of a whole turn: any few of them in a row are far apart (golden ratio)
BLACK, WHITE = "#000000", "#ffffff"
HALFWAY = 0.179  # the luminance on which black and white have the same contrast, by WCAG 2


@dataclass(frozen=True, slots=True)
class Colour:
    """A colour, `#rrggbb`, and that of text on it."""

    fill: str

    @property
    def ink(self) -> str:
        """Return black or white, whichever is read better."""
        return BLACK if luminance(self.fill) > HALFWAY else WHITE


def luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb`, 0 to 1 (WCAG 2.2, "relative luminance")."""
    red, green, blue = (_linear(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)


def colour_devices(hosts: Sequence[str]) -> tuple[Colour, ...]:
    """Return a colour for each device. `hosts`: the host of each, neighbours together."""
    if len(hosts) <= len(FEW):
        return tuple(Colour(fill) for fill in FEW[: len(hosts)])
    colours: list[Colour] = []
    hue = shade = -1
    for number, host in enumerate(hosts):
        shade += 1
        if number == 0 or host != hosts[number - 1] or shade == len(SHADES):
            hue, shade = hue + 1, 0
        rgb = hls_to_rgb(hue * TURN % 1, SHADES[shade], SATURATION)
        colours.append(Colour("#" + "".join(f"{round(255 * value):02x}" for value in rgb)))
    return tuple(colours)
