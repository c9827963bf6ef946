"""Small compilations with their pages, for the tests of the report."""

import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from partc.compiler.compilation import Compilation
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import compile_graph
from partc.compiler.report import units
from partc.cost.cluster.cluster import Cluster, read_cluster
from partc.cost.cluster.machines import Device, Host, Link
from partc.cost.strategy import Mode
from partc.models.catalogue import build_model

EXAMPLES = Path(__file__).parents[3] / "examples"
CLUSTERS = ("cluster-1x4", "cluster-2x2", "cluster-8x6-titanxp", "ten hosts")
VOID = frozenset({"meta"})


@dataclass(frozen=True)
class Compiled:
    """A compilation with the page that went into its folder."""

    compilation: Compilation
    cluster: Cluster
    folder: Path

    @property
    def page(self) -> str:
        return (self.folder / "report.html").read_text(encoding="utf-8")

    @property
    def text(self) -> str:
        """What a reader sees, all space between words made single and plain."""
        return TextReader.read(self.page)


class TextReader(HTMLParser):
    """Collects what a reader sees, and checks that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @classmethod
    def read(cls, page: str) -> str:
        reader = cls()
        reader.feed(page)
        assert reader.open == []
        return re.sub(r"\s+", " ", " ".join(reader.words))


def ten_hosts() -> Cluster:
    """More hosts than are drawn, with names longer than their boxes."""
    names = [f"a-machine-with-a-name-longer-than-most-{index}" for index in range(10)]
    return Cluster(
        format="partc-cluster/1",
        name="ten hosts",
        hosts=tuple(
            Host(name, (Device(f"{name}/the-only-processor", "cpu", "cpu-core"),), memory_bytes=8 * 10**9)
            for name in names
        ),
        switches=("switch",),
        links=tuple(Link((name, "switch"), bytes_per_s=125e6, latency_s=50e-6) for name in names),
    )


def compile_lm(cluster: str, out: Path, strategy: Mode = "auto") -> Compiled:
    """Compile a small language model, whose tables are large next to what a step touches."""
    options = {"vocab": 20_000, "embedding": 32, "cells": 32, "projection": 32, "steps": 3, "samples": 64}
    forward = build_model("lm", **options, batch=8)
    step = build_training_graph(forward, loss="loss", optimizer=Adagrad(0.1), clip_global_norm=10.0)
    hosts = ten_hosts() if cluster == "ten hosts" else read_cluster(EXAMPLES / f"{cluster}.json")
    compilation = compile_graph(import_training_graph(step), hosts, out, Options(strategy=strategy))
    return Compiled(compilation, hosts, out)


def compile_everywhere(folder: Path) -> dict[str, Compiled]:
    """Compile for every cluster of CLUSTERS."""
    return {cluster: compile_lm(cluster, folder / cluster) for cluster in CLUSTERS}


def plain(text: str) -> str:
    """Return the text as `Compiled.text` has it."""
    return text.replace(units.NO_BREAK, " ")
