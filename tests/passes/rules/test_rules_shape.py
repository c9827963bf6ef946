import pytest

from partc.passes.rules.rules_shape import common_factors


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((3, 8, 4), (24, 4), ([["f0"], ["f1"], ["f2"]], [["f0", "f1"], ["f2"]])),
        ((24, 4), (3, 8, 4), ([["f0", "f1"], ["f2"]], [["f0"], ["f1"], ["f2"]])),
        ((4, 6), (4, 6), ([["f0"], ["f1"]], [["f0"], ["f1"]])),
        ((4, 1, 6), (4, 6), ([["f0"], [], ["f1"]], [["f0"], ["f1"]])),
        ((4, 6), (1, 24), ([["f0"], ["f1"]], [[], ["f0", "f1"]])),
        ((2, 12), (4, 6), ([["f0"], ["f1", "f2"]], [["f0", "f1"], ["f2"]])),
        ((4, 6), (6, 4), ([["s0"], ["s1"]], [["t0"], ["t1"]])),
        ((5, 4, 6), (5, 6, 4), ([["f0"], ["s0"], ["s1"]], [["f0"], ["t0"], ["t1"]])),
        ((8,), (8,), ([["f0"]], [["f0"]])),
        ((), (1, 1), ([], [[], []])),
    ],
)
def test_two_shapes_are_refined_into_common_factors(
    source: tuple[int, ...], target: tuple[int, ...], expected: tuple[list[list[str]], list[list[str]]]
) -> None:
    source_dims, target_dims, sizes = common_factors(source, target)

    assert ([list(d) for d in source_dims], [list(d) for d in target_dims]) == expected
    for dims, shape in ((source_dims, source), (target_dims, target)):
        for factors, size in zip(dims, shape, strict=True):
            product = 1
            for factor in factors:
                product *= sizes[factor]
            assert product == size
