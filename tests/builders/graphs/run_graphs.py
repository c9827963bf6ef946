"""Run a graph in ONNX Runtime, as it is written: one thread, nothing fused."""

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort

from partc.passes.graph.training_graph import TrainingGraph
from tests.builders.graphs.foreign_steps import parse


def graph_of(text: str) -> TrainingGraph:
    """Return a graph in ONNX text, without variables."""
    return TrainingGraph(gs.import_onnx(parse(text)), {}, {}, (), None, {})


def run_graph(training: TrainingGraph, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the graph's outputs."""
    model = gs.export_onnx(training.graph)
    model.ir_version = 10
    model.functions.extend(training.functions)
    domains = {function.domain for function in training.functions}
    model.opset_import.extend(onnx.helper.make_opsetid(domain, 1) for domain in domains)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    copies = {
        name: value.copy() for name, value in feeds.items()
    }  # BatchNormalization writes on what it reads
    return dict(zip(names, session.run(names, copies), strict=True))
