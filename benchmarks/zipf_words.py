"""Words by Zipf's law, for 48 replicas at the paper's batch: what the sparsity of a step is measured from."""

from collections.abc import Iterator

import numpy as np

REPLICAS = 48
BATCH = 128
Batch = dict[str, np.ndarray]


def _words(rng: np.random.Generator, shape: tuple[int, ...], vocabulary: int) -> np.ndarray:
    # Inverse of the log-uniform law, which Zipf's is for an exponent of 1.
    drawn = np.exp(rng.uniform(0, np.log(vocabulary + 1), shape)) - 1
    return np.minimum(drawn.astype(np.int64), vocabulary - 1)


def lm() -> Iterator[Batch]:
    """Draw batches of the LM: words read and scored, and negatives that all replicas share."""
    rng = np.random.default_rng(0)
    while True:
        shape = (REPLICAS * BATCH, 20)
        yield {
            "x": _words(rng, shape, 800_000),
            "y": _words(rng, shape, 800_000),
            "sampled": _words(rng, (8_192,), 800_000),
        }


def nmt() -> Iterator[Batch]:
    """Draw batches of the translation model."""
    rng = np.random.default_rng(0)
    while True:
        shape = (REPLICAS * BATCH, 27)
        yield {name: _words(rng, shape, 36_548) for name in ("source", "target", "labels")}
