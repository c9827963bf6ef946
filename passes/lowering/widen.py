"""Give ranks the entries of their neighbours that windows read: a part of an axis becomes a widened one.

    rank 0    rank 1    rank 2            rank 0      rank 1      rank 2
    a b c d | e f g h | i j k l    ->     0 a b c d e | d e f g h i | h i j k l 0

Every rank sends its last entries to the member behind and its first to the member before; the first and
the last, which get nothing from one side, pad there, so that all ranks share one segment.

Of parts of any size: overlap.py.
"""

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.layouts.layouts import Replicate, Widened
from partc.passes.layouts.reshard import Transfer
from partc.passes.lowering.lowered_graph import constant
from partc.passes.lowering.lowering import Lowering
from partc.passes.lowering.overlap import fill_value

INT64 = np.dtype(np.int64)


def widen(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    """Return the value that holds `tensor` widened along a mesh axis, as wanted along all others."""
    widening = _Widening(lowering, tensor, transfer)
    is_whole = isinstance(transfer.source.along(transfer.axis), Replicate)
    return widening.cut() if is_whole else widening.exchange()


class _Widening:
    """Emits what widens a tensor along one axis of the mesh."""

    def __init__(self, lowering: Lowering, tensor: str, transfer: Transfer) -> None:
        target, mesh_axis = transfer.target, transfer.axis
        placement = target.along(mesh_axis)
        assert isinstance(placement, Widened)
        self.lowering = lowering
        self.out = lowering.out
        self.tensor = tensor
        self.source = transfer.source
        self.target = target
        self.mesh_axis = mesh_axis
        self.widened = placement
        self.parts = lowering.graph.meshes.size(target.site, mesh_axis)
        self.dtype = lowering.facts.dtypes[tensor]
        self.name = lowering.value_name(tensor, target)
        self.shape = lowering.local_sizes(tensor, target)

    def exchange(self) -> gs.Tensor:
        """Widen a part by what its neighbours send."""
        at = self.widened
        part = self.lowering.need(self.tensor, self.source)
        if self.parts == 1:
            return self._pad(part, self.name)
        own = self.shape[at.axis] - at.before - at.after
        pieces: list[gs.Tensor] = [part]
        if at.before:
            last = self._slice(part, own - at.before, own, f"{self.name}.last")
            arrived = self._receive(last, "ShiftAhead", f"{self.name}.before")
            pieces.insert(0, self._filled(arrived, 0))
        if at.after:
            first = self._slice(part, 0, at.after, f"{self.name}.first")
            arrived = self._receive(first, "ShiftBack", f"{self.name}.behind")
            pieces.append(self._filled(arrived, self.parts - 1))
        return self.out.emit("Concat", pieces, self.name, self.dtype, self.target.site, axis=at.axis)

    def cut(self) -> gs.Tensor:
        """Cut a widened part out of what is whole along the mesh axis."""
        at, site = self.widened, self.target.site
        whole = self.lowering.need(self.tensor, self.source)
        padded = self._pad(whole, f"{self.name}.padded")
        size = self.shape[at.axis]
        position = self.lowering.coordinate(self.target.site, self.mesh_axis)
        step = constant(f"{self.name}.step", [size - at.before - at.after], np.int64)
        length = constant(f"{self.name}.length", [size], np.int64)
        axis = constant(f"{self.name}.axis", [at.axis], np.int64)
        start = self.out.emit("Mul", [position, step], f"{self.name}.start", INT64, site)
        end = self.out.emit("Add", [start, length], f"{self.name}.end", INT64, site)
        return self.out.emit("Slice", [padded, start, end, axis], self.name, self.dtype, site)

    def _receive(self, strip: gs.Tensor, op: str, name: str) -> gs.Variable:
        """Send a strip to a neighbour, and return what the other neighbour sends: zeros at the end."""
        arrived = gs.Variable(name, dtype=self.dtype)
        self.out.shapes[name] = self.out.shapes[strip.name]
        self.out.nbytes[name] = self.out.nbytes[strip.name]
        self.out.communicate(op, [strip], [arrived], site=self.target.site, axes=(self.mesh_axis,))
        return arrived

    def _filled(self, arrived: gs.Tensor, end: int) -> gs.Tensor:
        """Pad with what the windows read as padding where the rank is at an end."""
        if self.widened.fill == "zero":
            return arrived
        site, name = self.target.site, f"{arrived.name}.filled"
        number = constant(f"{arrived.name}.end", [end], np.int64)
        position = self.lowering.coordinate(self.target.site, self.mesh_axis)
        is_end = self.out.emit(
            "Equal", [position, number], f"{arrived.name}.is_end", np.dtype(np.bool_), site
        )
        self._size(name, arrived.name)
        return self.out.emit("Where", [is_end, self._fill(name), arrived], name, self.dtype, site)

    def _slice(self, part: gs.Tensor, start: int, stop: int, name: str) -> gs.Tensor:
        axis = self.widened.axis
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        known = self.out.shapes[self.name]
        self.out.shapes[name] = tuple(size if own else None for size, own in zip(shape, known, strict=True))
        self.out.nbytes[name] = self.out.nbytes[self.name] * (stop - start) // self.shape[axis]
        bounds = [
            constant(f"{name}.{what}", [number], np.int64)
            for what, number in (("start", start), ("end", stop), ("axis", axis))
        ]
        return self.out.emit("Slice", [part, *bounds], name, self.dtype, self.target.site)

    def _pad(self, tensor: gs.Tensor, name: str) -> gs.Tensor:
        at, rank = self.widened, len(self.shape)
        pads = np.zeros((2, rank), np.int64)
        pads[:, at.axis] = at.before, at.after
        operands = [tensor, constant(f"{name}.pads", pads.ravel().tolist(), np.int64), self._fill(name)]
        return self.out.emit("Pad", operands, name, self.dtype, self.target.site)

    def _fill(self, name: str) -> gs.Constant:
        return gs.Constant(f"{name}.fill", np.array(fill_value(self.widened.fill, self.dtype), self.dtype))

    def _size(self, name: str, like: str) -> None:
        self.out.shapes[name], self.out.nbytes[name] = self.out.shapes[like], self.out.nbytes[like]
