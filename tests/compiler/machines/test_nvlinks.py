"""NVLinks as nvidia-smi prints them: pairs, meshes, an NVSwitch, and machines without."""

from pathlib import Path

import pytest

from partc.compiler.machines import make_cluster as module
from partc.compiler.machines.make_cluster import Wishes, make_cluster
from partc.compiler.machines.nvlinks import detect_nvlinks, join_gpus, read_topology
from partc.compiler.machines.this_machine import Hardware
from partc.cost.cluster.detect_gpus import Gpu
from partc.cost.cluster.machines import Device

# A ring of four, written as nvidia-smi prints it: a styled head, tabs, network cards and affinities.
RING = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV2\tSYS\tNV1\tPHB\t0-15\t0
GPU1\tNV2\t X \tNV1\tSYS\tSYS\t0-15\t0
GPU2\tSYS\tNV1\t X \tNV2\tSYS\t16-31\t1
GPU3\tNV1\tSYS\tNV2\t X \tPIX\t16-31\t1
NIC0\tPHB\tSYS\tSYS\tPIX\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def all_pairs(count: int, cell: str) -> str:
    """Return a matrix in which every two GPUs are joined alike."""
    names = [f"GPU{n}" for n in range(count)]
    rows = ["\t".join([a, *(" X " if a == b else cell for b in names), "0-63", "N/A"]) for a in names]
    return "\n".join(["\t" + "\t".join(names) + "\tCPU Affinity", *rows])


def gpus(profile: str, count: int) -> list[Device]:
    return [Device(f"node/gpu{n}", "gpu", profile, index=n) for n in range(count)]


def test_a_matrix_is_read_whatever_stands_beside_the_gpus() -> None:
    assert read_topology(RING) == {(0, 1): 2, (0, 3): 1, (1, 2): 1, (2, 3): 2}
    assert read_topology(all_pairs(3, "PHB")) == {}
    assert read_topology("nvidia-smi has failed") == {}


def test_pairs_have_links_as_wide_as_their_nvlinks_and_each_gpu_one_to_the_host() -> None:
    switches, links = join_gpus("node", gpus("v100", 4), read_topology(RING))

    assert switches == ()
    rates = {link.ends: link.bytes_per_s for link in links}
    assert rates[("node/gpu0", "node/gpu1")] == pytest.approx(2 * 0.9 * 25e9)
    assert rates[("node/gpu0", "node/gpu3")] == pytest.approx(0.9 * 25e9)
    assert {ends[0] for ends in rates if ends[1] == "node"} == {f"node/gpu{n}" for n in range(4)}
    assert len(rates) == 8


def test_more_links_than_a_gpu_has_are_a_switch() -> None:
    switches, links = join_gpus("node", gpus("a100", 8), read_topology(all_pairs(8, "NV12")))

    assert switches == ("node/nvswitch",)
    wide = [link for link in links if "node/nvswitch" in link.ends]
    assert len(wide) == 8
    assert {round(link.bytes_per_s) for link in wide} == {round(0.9 * 300e9)}


def test_types_without_nvlink_and_gpus_that_are_not_used_have_no_links() -> None:
    assert join_gpus("node", gpus("titan-xp", 4), read_topology(RING)) == ((), ())
    assert join_gpus("node", gpus("v100", 1), read_topology(RING)) == ((), ())


def test_the_cluster_of_this_machine_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat <<'END'\n{RING}END\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = [Gpu(n, "Tesla V100-SXM2-16GB", 16 * 2**30) for n in range(4)]
    monkeypatch.setattr(module, "detect_gpus", lambda host: found)
    monkeypatch.setattr(module, "look_at_this_machine", lambda: Hardware(32, 10**11))

    assert detect_nvlinks() == read_topology(RING)
    made = make_cluster("machine", Wishes())

    assert len(made.cluster.links) == 8
    assert any("PCIe" in line for line in made.assumed)
    assert make_cluster("machine", Wishes(devices="cpu")).cluster.links == ()
