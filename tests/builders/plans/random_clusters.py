"""Random clusters and training steps with tables, for what must hold wherever a step runs."""

import numpy as np
import onnx
from onnx import TensorProto, helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adagrad, Adam, Momentum
from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster
from partc.cost.cluster.machines import Device, Host, Link

OPTIMIZERS = (SGD(0.1), Momentum(0.1), Adam(0.1), Adagrad(0.1))


def random_cluster(seed: int) -> Cluster:
    """Draw 1 to 4 hosts of 1 to 3 devices: CPUs or GPUs, slow links among fast ones, few cores."""
    rng = np.random.default_rng(seed)
    is_gpu = bool(rng.integers(2))
    shared = bool(rng.integers(2))
    hosts = tuple(_host(rng, number, is_gpu, shared) for number in range(int(rng.integers(1, 5))))
    rate = 10 ** rng.uniform(7, 10)
    links = tuple(
        Link((host.name, "switch"), rate / (10 if rng.integers(5) == 0 else 1), 10 ** rng.uniform(-6, -4))
        for host in hosts
    )
    return Cluster(CLUSTER_FORMAT, f"random {seed}", hosts, switches=("switch",), links=links)


def _host(rng: np.random.Generator, number: int, is_gpu: bool, shared: bool) -> Host:
    name = f"host{number}"
    devices = tuple(
        Device(f"{name}/{worker}", "gpu", "titan-xp", index=worker)
        if is_gpu
        else Device(f"{name}/{worker}", "cpu", "cpu-core", threads=int(rng.integers(1, 3)))
        for worker in range(int(rng.integers(1, 4)))
    )
    cores = 1.0 if shared and not is_gpu else None
    return Host(name, devices, memory_bytes=2**33, server=number == 0 or bool(rng.integers(4)), cores=cores)


def random_table_step(seed: int) -> onnx.ModelProto:
    """Draw a training step of tables, their rows averaged, and dense layers behind them."""
    rng = np.random.default_rng(seed)
    width, batch = int(rng.choice([1, 4, 64, 256])), int(rng.choice([1, 8, 64]))
    nodes: list[onnx.NodeProto] = []
    inputs: list[onnx.ValueInfoProto] = []
    values: list[onnx.TensorProto] = [_integers("axis", [1])]
    found: list[str] = []
    for table in range(int(rng.integers(1, 4))):
        rows = int(10 ** rng.uniform(1, 4.5))
        inputs.append(helper.make_tensor_value_info(f"ids{table}", TensorProto.INT64, [batch, 3]))
        nodes.append(helper.make_node("Gather", [f"E{table}", f"ids{table}"], [f"rows{table}"]))
        nodes.append(helper.make_node("ReduceMean", [f"rows{table}", "axis"], [f"mean{table}"], keepdims=0))
        values.append(_drawn(rng, f"E{table}", (rows, width)))
        found.append(f"mean{table}")
    nodes.append(helper.make_node("Sum", found, ["h0"]))
    for layer in range(int(rng.integers(0, 3))):
        values.append(_drawn(rng, f"W{layer}", (width, width)))
        nodes.append(helper.make_node("MatMul", [f"h{layer}", f"W{layer}"], [f"a{layer}"]))
        nodes.append(helper.make_node("Tanh", [f"a{layer}"], [f"h{layer + 1}"]))
    last = nodes[-1].output[0]
    nodes.append(helper.make_node("Mul", [last, last], ["squared"]))
    nodes.append(helper.make_node("ReduceMean", ["squared"], ["loss"], keepdims=0))
    output = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "tables", inputs, [output], values)
    forward = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    clip = 1.0 if rng.integers(2) else None
    optimizer = OPTIMIZERS[int(rng.integers(len(OPTIMIZERS)))]
    return build_training_graph(forward, loss="loss", optimizer=optimizer, clip_global_norm=clip)


def _drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)


def _integers(name: str, values: list[int]) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.array(values, np.int64), name)
