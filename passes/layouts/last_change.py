"""The way from a layout to another on the same mesh, one mesh axis at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from partc.passes.layouts.layouts import Layout, Partial, Replicate, Split


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """A tensor's way into a layout: its layout before the last step, and the mesh axis that changes then."""

    before: Layout
    axis: int


def last_change(
    native: Layout, target: Layout, divides: Callable[[Layout], bool], moments: int | None = None
) -> LayoutChange:
    """Return the last step from a layout to another on the same mesh.

    Local cuts come first, since they make what is sent smaller, and gathering last. Mesh axes that cut at
    one place lie within each other: only the innermost may be undone, or another be cut within it.
    `divides` tells whether a layout makes parts of equal size: those on the way do as well.
    `moments`: the axis of micro-batches, if there is one. Each rank sums over these before anything that is
    a term along another axis too is sent, so that it is sent once and not for every micro-batch.
    """
    count = max(len(native.placements), len(target.placements))
    undone: list[int] = []
    cut: list[int] = []
    for place in {(split.axis, split.outer) for _, split in (*native.splits(), *target.splits())}:
        has, wants = (
            [(a, split) for a, split in layout.splits() if (split.axis, split.outer) == place]
            for layout in (native, target)
        )
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(has, wants, strict=False)))
        if wants[shared:]:
            cut.append(wants[-1][0])
        elif has[shared:] and isinstance(target.along(has[shared][0]), Replicate):
            undone += [has[shared][0]] if divides(target.with_along(*has[shared])) else []
    changing = [axis for axis in range(count) if native.along(axis) != target.along(axis)]
    pairs = {axis: (native.along(axis), target.along(axis)) for axis in changing}
    reduced = [axis for axis, pair in pairs.items() if not any(isinstance(p, Split) for p in pair)]
    is_sent = any(isinstance(own, Partial) for axis, (own, _) in pairs.items() if axis != moments)
    if moments is not None and moments in reduced and is_sent and isinstance(native.along(moments), Partial):
        reduced.remove(moments)
    if cut and not (undone or reduced):
        axis = max(cut, key=lambda a: (isinstance(native.along(a), Partial), a))
        source = native.along(axis)
        return LayoutChange(
            target.with_along(axis, source if isinstance(source, Partial) else Replicate()), axis
        )
    axis = min(undone or reduced)
    return LayoutChange(target.with_along(axis, native.along(axis)), axis)
