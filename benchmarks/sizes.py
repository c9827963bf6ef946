"""The works' sizes, and a batch of each."""

import numpy as np

# A new network with batch normalisation is chaotic: with a rate of 1e-3, weights that differ by 1e-7 give
# losses that differ by 1 % two steps later, in PyTorch too.
RESNET50 = {"batch": 8, "image": 224, "classes": 1000, "lr": 1e-5, "momentum": 0.9}
GPT2 = {"batch": 2, "tokens": 128, "vocab": 50257, "positions": 1024, "width": 768, "heads": 12, "layers": 12}
GPT2 |= {"lr": 1e-4, "weight_decay": 0.01}
LM = {"batch": 16, "steps": 20, "vocab": 100_000, "embedding": 512, "cells": 2048, "projection": 512}
LM |= {"samples": 4096, "lr": 0.1}

REPLICAS = 64  # at most
WORKS = ("resnet50", "gpt2", "lm")
# What the step time may be of PyTorch's.
TARGETS = {"resnet50": 0.80, "gpt2": 0.90, "lm": 0.80}


def batch_of_replica(work: str, step: int, replica: int) -> dict[str, np.ndarray]:
    """Return what a replica, one of REPLICAS at most, is fed in a step; negatives are all replicas'."""
    return batch_of(work, step * REPLICAS + replica)


def batch_of(work: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a batch, its inputs in the order that the models take them."""
    random = np.random.default_rng(seed)
    if work == "resnet50":
        shape = (RESNET50["batch"], 3, RESNET50["image"], RESNET50["image"])
        images = random.standard_normal(shape, np.float32)
        return {"x": images, "labels": random.integers(0, RESNET50["classes"], RESNET50["batch"])}
    if work == "gpt2":
        shape = (GPT2["batch"], GPT2["tokens"])
        return {name: random.integers(0, GPT2["vocab"], shape) for name in ("ids", "labels")}
    shape = (LM["batch"], LM["steps"])
    words = {name: _zipf(random, shape) for name in ("x", "y")}
    return words | {"sampled": _zipf(np.random.default_rng(seed // REPLICAS), (LM["samples"],))}


def _zipf(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw words by the log-uniform law that the sampled softmax corrects for."""
    return (np.exp(random.random(shape) * np.log(LM["vocab"] + 1)) - 1).astype(np.int64)
