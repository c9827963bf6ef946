"""Words by Zipf's law at the paper's batch, from which the sparsity of a step is measured.

`zipf_words:lm_for_48` and its kin name the batches of 48 replicas together.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

BATCH = 128
Batch = dict[str, np.ndarray]


def _words(rng: np.random.Generator, shape: tuple[int, ...], vocabulary: int) -> np.ndarray:
    # Inverse of the log-uniform law, which Zipf's is for an exponent of 1.
    drawn = np.exp(rng.uniform(0, np.log(vocabulary + 1), shape)) - 1
    return np.minimum(drawn.astype(np.int64), vocabulary - 1)


def _lm(replicas: int) -> Iterator[Batch]:
    """Draw batches of the LM: words read and scored, and negatives that all replicas share."""
    rng = np.random.default_rng(0)
    while True:
        shape = (replicas * BATCH, 20)
        yield {
            "x": _words(rng, shape, 800_000),
            "y": _words(rng, shape, 800_000),
            "sampled": _words(rng, (8_192,), 800_000),
        }


def _nmt(replicas: int) -> Iterator[Batch]:
    """Draw batches of the translation model."""
    rng = np.random.default_rng(0)
    while True:
        shape = (replicas * BATCH, 27)
        yield {name: _words(rng, shape, 36_548) for name in ("source", "target", "labels")}


def __getattr__(name: str) -> Callable[[], Iterator[Batch]]:
    model, found, replicas = name.partition("_for_")
    if not found:
        raise AttributeError(name)
    return partial({"lm": _lm, "nmt": _nmt}[model], int(replicas))
