"""Cut a part out of a tensor that a rank has whole along a mesh axis; no communication.

A factor that does not lead its axis is brought to the front for that, and back.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.layouts.layouts import WORKER, Layout, Replicate, Split
from partc.passes.layouts.reshard import Transfer
from partc.passes.lowering.lowered_graph import Number, PartNumber, constant
from partc.passes.lowering.lowering import Lowering

INT64 = np.dtype(np.int64)


def cut_part(lowering: Lowering, tensor: str, whole: gs.Tensor, transfer: Transfer) -> gs.Tensor:
    """Cut a part along a mesh axis out of a tensor that is whole there."""
    target, split = transfer.target, transfer.target.along(transfer.axis)
    assert isinstance(split, Split)
    name = lowering.value_name(tensor, target)
    if isinstance(whole, gs.Constant) and not split.uneven and _is_uniform(whole, split.axis):
        length = whole.values.shape[split.axis] // lowering.graph.meshes.size(target.site, transfer.axis)
        return gs.Constant(name, whole.values.take(range(length), axis=split.axis))
    sizes = lowering.local_sizes(tensor, transfer.source)
    if split.outer == 1:
        return _slice_part(lowering, tensor, whole, split.axis, split, sizes, name, transfer)
    fold = Fold(lowering, tensor, transfer.source, split)
    front = fold.to_front(whole)
    factor = (sizes[split.axis] // fold.outer,)
    part = _slice_part(lowering, tensor, front, 0, split, factor, f"{name}.front", transfer)
    return fold.back(part, name)


def _is_uniform(tensor: gs.Constant, axis: int) -> bool:
    first = tensor.values.take([0], axis=axis)
    return bool(np.array_equal(tensor.values, np.broadcast_to(first, tensor.values.shape)))


def _slice_part(
    lowering: Lowering,
    tensor: str,
    whole: gs.Tensor,
    axis: int,
    split: Split,
    shape: tuple[int, ...],
    name: str,
    transfer: Transfer,
) -> gs.Tensor:
    """Slice the part out of `axis` of a value, which has the factor in front there."""
    out, site, mesh_axis = lowering.out, transfer.source.site, transfer.axis
    position = lowering.coordinate(site, mesh_axis)
    ranks = lowering.graph.meshes.size(site, mesh_axis)
    along = constant(f"{name}.axis", [axis], np.int64)
    if split.uneven:
        part = lowering.part_number(tensor, transfer.source, split, mesh_axis)
        ends = (out.numbers(site, (replace(part, tells=what),)) for what in ("start", "stop"))
        return out.emit("Slice", [whole, *ends, along], name, whole.dtype, site)
    varies = out.shapes.get(whole.name, shape)[axis] is None
    is_fixed = lowering.graph.has_fixed_pieces(tensor, transfer.source)
    if isinstance(whole, gs.Constant) or (is_fixed and not varies):
        size: gs.Tensor = constant(f"{name}.size", [shape[axis] // ranks], np.int64)
    else:
        sizes = out.emit("Shape", [whole], f"{name}.sizes", INT64, site)
        length = out.emit("Gather", [sizes, along], f"{name}.length", INT64, site)
        parts = constant(f"{name}.ranks", [ranks], np.int64)
        size = out.emit("Div", [length, parts], f"{name}.size", INT64, site)
    start = out.emit("Mul", [position, size], f"{name}.start", INT64, site)
    end = out.emit("Add", [start, size], f"{name}.end", INT64, site)
    return out.emit("Slice", [whole, start, end, along], name, whole.dtype, site)


def local_blocks(lowering: Lowering, layout: Layout, split: Split) -> Number:
    """Return how many of the blocks before a split factor a rank has under a layout."""
    within = [p for _, p in layout.splits() if p.axis == split.axis and p.outer < split.outer]
    remaining = (p if p in within else Replicate() for p in layout.placements)
    return lowering.local_number(Layout(layout.site, *remaining), split.axis, split.outer)


class Fold:
    """Brings a factor of an axis (outer x factor x inner) to the front, and back.

    `layout` is whole along the mesh axis that divides the factor.
    """

    def __init__(self, lowering: Lowering, tensor: str, layout: Layout, split: Split) -> None:
        self.out = lowering.out
        self.site = layout.site
        self.lowering = lowering
        self.shape = lowering.local_sizes(tensor, layout)
        sizes = lowering.facts.shape(tensor)
        self.numbers = [lowering.local_number(layout, axis, size) for axis, size in enumerate(sizes)]
        self.fixed = [lowering.facts.fixed_size(tensor, axis) is not None for axis in range(len(sizes))]
        self.axis = split.axis
        self.blocks = local_blocks(lowering, layout, split)
        self.outer = lowering.largest(layout.site, self.blocks)
        others = [p for p in layout.placements if not isinstance(p, Replicate)]
        self.tensor = lowering.value_name(tensor, layout) if others or layout.site != WORKER else tensor
        own = "" if lowering.graph.configuration.is_one_mesh or "@" in self.tensor else f"@{layout.site}"
        self.name = f"{self.tensor}{own}.fold{split.axis}.{split.outer}"
        rank = len(self.shape) + (self.outer > 1)
        moved = self.axis + (self.outer > 1)
        self.order = [moved, *(axis for axis in range(rank) if axis != moved)]

    def to_front(self, tensor: gs.Tensor) -> gs.Tensor:
        """Bring the factor, or a part of it, to the front."""
        name = f"{self.name}.{tensor.name}"
        if self.outer > 1:
            tensor = self._reshape(tensor, [self.blocks, -1], 1, f"{name}.apart")
        return self.out.emit("Transpose", [tensor], f"{name}.front", tensor.dtype, self.site, perm=self.order)

    def front_shape(self, split: Split | None, parts: int) -> tuple[int | None, ...]:
        """Return the shape with the factor in front, or of one of the parts into which it is split.

        None where it follows the data or the rank.
        """
        apart = [
            n if isinstance(n, int) and fixed else None
            for n, fixed in zip(self.numbers, self.fixed, strict=True)
        ]
        inner, is_fixed = self.shape[self.axis] // self.outer, self.fixed[self.axis]
        blocks = self.blocks if isinstance(self.blocks, int) and is_fixed else None
        apart[self.axis : self.axis + 1] = [inner] if self.outer == 1 else [blocks, inner]
        _, *rest = [apart[axis] for axis in self.order]
        varies = isinstance(self.numbers[self.axis], PartNumber) and isinstance(self.blocks, int)
        is_same = is_fixed and not varies and not (split is not None and split.uneven)
        return (inner // parts if is_same else None, *rest)

    def back(self, tensor: gs.Tensor, name: str) -> gs.Tensor:
        """Bring the factor, or a part of it, from the front to its place."""
        inverse = [int(axis) for axis in np.argsort(self.order)]
        target = name if self.outer == 1 else f"{name}.apart"
        transposed = self.out.emit("Transpose", [tensor], target, tensor.dtype, self.site, perm=inverse)
        if self.outer == 1:
            return transposed
        return self._reshape(transposed, [-1], 2, name)

    def _reshape(self, tensor: gs.Tensor, factors: Sequence[Number], taken: int, name: str) -> gs.Tensor:
        """Write factors in the place of as many axes as are `taken`; sizes that only the data tells stay."""
        is_fixed, behind = self.fixed[self.axis + 1 :], self.numbers[self.axis + 1 :]
        before = zip(self.numbers[: self.axis], self.fixed, strict=False)
        front = [*(number if fixed else 0 for number, fixed in before), *factors]  # 0: as it is
        if all(is_fixed):
            sizes = self.lowering.numbers(f"{name}.sizes", [*front, *behind], self.site)
        else:
            first = self.lowering.numbers(f"{name}.first_sizes", front, self.site)
            rest = self._sizes_from(tensor, self.axis + taken, name)
            sizes = self.out.emit("Concat", [first, rest], f"{name}.sizes", INT64, self.site, axis=0)
        return self.out.emit("Reshape", [tensor, sizes], name, tensor.dtype, self.site)

    def _sizes_from(self, tensor: gs.Tensor, axis: int, name: str) -> gs.Tensor:
        sizes = self.out.emit("Shape", [tensor], f"{name}.all_sizes", INT64, self.site)
        start, end = (constant(f"{name}.{of}", [at], np.int64) for of, at in (("from", axis), ("to", 64)))
        return self.out.emit("Slice", [sizes, start, end], f"{name}.last_sizes", INT64, self.site)
