import pytest

from partc.runtime.engines.allotted_nodes import spell_out_counts, spell_out_nodes
from partc.runtime.errors import BadUsage


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", "login"),
        ("node[1-4,7]", "node1 node2 node3 node4 node7"),
        ("node[08-11],login", "node08 node09 node10 node11 login"),
        ("n[1],n[3-3]", "n1 n3"),
        ("rack[1-2]node[5-6]", "rack1node5 rack1node6 rack2node5 rack2node6"),
        ("gpu-[001-002].cluster,a-b", "gpu-001.cluster gpu-002.cluster a-b"),
    ],
)
def test_short_lists_of_nodes_are_spelled_out(text: str, names: str) -> None:
    assert spell_out_nodes(text, "here") == tuple(names.split())


def test_counts_repeat() -> None:
    assert spell_out_counts("16(x2),8", "here") == (16, 16, 8)


@pytest.mark.parametrize("text", ["", "n[", "n[1-]", "n[4-1]", "n[a-b]", "a,,b", "n]1[", "n[1-99999999999]"])
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(BadUsage, match="is no list of nodes\n  at:  here"):
        spell_out_nodes(text, "here")


def test_what_are_no_counts_is_refused() -> None:
    with pytest.raises(BadUsage):
        spell_out_counts("16(xx)", "here")
