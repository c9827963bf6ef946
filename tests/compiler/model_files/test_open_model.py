import onnx

from partc.compiler.model_files.open_model import open_model

SUM = """
<ir_version: 10, opset_import: ["" : 21]>
sum (float[2] a, float[2] b) => (float[2] c) { c = Add (a, b) }
"""


def test_one_thread_and_no_look_for_memory() -> None:
    options = open_model(onnx.parser.parse_model(SUM)).get_session_options()

    assert options.intra_op_num_threads == 1
    assert not options.enable_mem_reuse
