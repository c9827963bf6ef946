"""Devices have different colours, and numbers are read on all of them."""

import pytest

from partc.compiler.report.device_colours import colour_devices, luminance

SHAPES = ((1, 1), (1, 4), (2, 4), (4, 4), (8, 6), (16, 4), (1, 16))


@pytest.mark.parametrize(("hosts", "devices"), SHAPES)
def test_each_device_has_a_colour_of_its_own_with_readable_ink(hosts: int, devices: int) -> None:
    colours = colour_devices([f"host{host}" for host in range(hosts) for _ in range(devices)])

    assert len({colour.fill for colour in colours}) == hosts * devices
    for colour in colours:
        darker, lighter = sorted((luminance(colour.fill), luminance(colour.ink)))
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, colour  # WCAG 2.2, level AA


def test_luminance_is_that_of_the_standard() -> None:
    assert [luminance(f"#{red}0000") for red in ("00", "ff")] == pytest.approx([0.0, 0.2126])
    assert luminance("#777777") == pytest.approx(0.184, abs=1e-3)  # the grey that white is just read on
