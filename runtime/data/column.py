"""One input's samples, in memory or mapped from files: pieces that follow each other along an axis."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from partc.runtime.errors import BadData

Array = np.ndarray[Any, np.dtype[Any]]


class Column:
    """Pieces of one element type, alike but along `axis`. Raises BadData if they are not.

    `shape`: of all pieces together; `axis` None: of the only piece. `name`: as messages call it.
    """

    def __init__(self, pieces: Sequence[Array], axis: int | None, name: str = "") -> None:
        first = pieces[0]
        self._pieces = list(pieces)
        self._axis = axis
        self.dtype = first.dtype
        self.shape = first.shape
        if axis is None or axis >= first.ndim:
            return
        for piece in pieces:
            self._check_alike(piece, first, axis, name)
        self._ends = np.cumsum([piece.shape[axis] for piece in pieces])
        self.shape = (*first.shape[:axis], int(self._ends[-1]), *first.shape[axis + 1 :])

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self._pieces)

    def whole(self) -> Array:
        """Return all pieces as one array."""
        if len(self._pieces) == 1:
            return self._pieces[0]
        assert self._axis is not None, "several pieces lie along an axis"
        return np.concatenate(self._pieces, axis=self._axis)

    def take(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> Array:
        """Return samples in the order of their indices, in C order. Neighbours are copied at once."""
        assert self._axis is not None, "samples lie along an axis"
        owners = np.searchsorted(self._ends, indices, side="right")
        shape = (*self.shape[: self._axis], len(indices), *self.shape[self._axis + 1 :])
        taken = np.empty(shape, self.dtype)
        before = (slice(None),) * self._axis
        for owner in np.unique(owners):
            (places,) = np.nonzero(owners == owner)
            begin = int(self._ends[owner - 1]) if owner else 0
            taken[(*before, as_slice(places))] = self._pieces[owner][
                (*before, as_slice(indices[places] - begin))
            ]
        return taken

    def _check_alike(self, piece: Array, first: Array, axis: int, name: str) -> None:
        def of_sample(array: Array) -> tuple[object, ...]:
            return array.dtype, array.shape[:axis], array.shape[axis + 1 :]

        if of_sample(piece) != of_sample(first):
            raise BadData(
                f"{first.dtype}{list(first.shape)} in one file, {piece.dtype}{list(piece.shape)} in another",
                at=f"data input {name!r}",
                fix=f"let files differ in the number of samples (axis {axis}) alone",
            )


def as_slice(
    places: np.ndarray[Any, np.dtype[np.int64]],
) -> slice | np.ndarray[Any, np.dtype[np.int64]]:
    """Return ascending neighbours as a slice, which is copied without an index; others as they are."""
    first, count = (int(places[0]), len(places)) if len(places) else (0, 0)
    is_run = count == 0 or bool((np.diff(places) == 1).all())
    return slice(first, first + count) if is_run else places
