import onnx_graphsurgeon as gs
import pytest
from onnx.shape_inference import infer_shapes

from partc.passes.roles.find_input_ranges import find_input_ranges
from tests.builders.graphs.foreign_steps import parse


@pytest.mark.parametrize(
    ("use", "high"),
    [
        ("flat = Reshape (ids, all)\n wide = Cast <to = 7> (flat)\n y = Gather (table, wide)", 50),
        ("column = Unsqueeze (ids, all)\n y = GatherElements <axis = 1> (table, column)", 7),
        ("column = Unsqueeze (ids, all)\n both = Concat <axis = 1> (column, column)\n"
         "y = ScatterElements <axis = 1> (table, both, ups)", 7),
        ("column = Unsqueeze (ids, all)\n y = ScatterND (table, column, rows)", 50),
        ("y = OneHot (ids, depth, values)", 9),
        ("loss = SoftmaxCrossEntropyLoss (logits, ids)\n y = Identity (loss)", 7),
        ("y = Cast <to = 1> (ids)", None),
        ("y = Gather (table, ids)\n z = GatherElements <axis = 0> (classes, ids)", 5),
    ],
)  # fmt: skip
def test_an_integer_input_stays_below_what_it_indexes(use: str, high: int | None) -> None:
    text = f"""
    g (int32[4] ids, float[50,7] table, float[4,2] ups, float[4,7] rows, float[4,7] logits, float[5] classes)
        => (y) <int64[1] all = {{-1}}, int64 depth = {{9}}, float[2] values = {{0, 1}}> {{ {use} }}
    """
    model = parse(text)

    assert find_input_ranges(gs.import_onnx(infer_shapes(model))).get("ids") == high
