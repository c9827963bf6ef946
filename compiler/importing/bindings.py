"""What a training graph's tensors mean: which output is which variable's next value, and the rest.

    {"state": {"W": "W_next"}, "loss": "loss", "gradients": {"W": {"dense": "dW"}},
     "sample_axes": {"x": 0, "lr": null}, "forward_outputs": ["probs"], "initial": "start.npz"}

It comes from `--state`, from a sidecar (train.onnx.json beside train.onnx), or from the model's own
metadata_props under "partc.training". Every key but "state" is optional.
"""

from pathlib import Path

import msgspec
import onnx

from partc.passes.graph.training_graph import Gradient, TrainingGraph
from partc.runtime.errors import BadModel
from partc.runtime.plan.members import Holds
from partc.runtime.plan.plan_json import NOT_DECODED
from partc.runtime.plan.record import Record
from partc.runtime.plan.written_json import decode_written

METADATA_KEY = "partc.training"


class GradientTensors(Record, frozen=True, omit_defaults=True):
    """The tensors of one gradient, as in passes/graph/training_graph.py."""

    dense: str | None = None
    ids: str | None = None
    rows: str | None = None


class Bindings(Record, frozen=True, omit_defaults=True):
    """The meaning of a flat training graph's inputs and outputs; `state` maps variable to next value."""

    state: dict[str, str] = msgspec.field(default_factory=dict)
    loss: str | None = None
    gradients: dict[str, GradientTensors] = msgspec.field(default_factory=dict)
    sample_axes: dict[str, int | None] = msgspec.field(default_factory=dict)
    forward_outputs: tuple[str, ...] = ()
    initial: str | None = None  # .npz or .safetensors file, beside the model
    shards: dict[str, Holds] = msgspec.field(default_factory=dict)  # input -> what the runtime gives it
    found: bool = False  # the gradients are what partc found: who reads the file again finds them again

    @property
    def tensors(self) -> set[str]:
        """The tensors that are named: the loss, gradients, next values and what a forward model returns."""
        gradients = self.gradients.values()
        parts = {name for gradient in gradients for name in (gradient.dense, gradient.ids, gradient.rows)}
        named = {self.loss, *self.state.values(), *self.forward_outputs, *parts}
        return {name for name in named if name is not None}


def read_bindings(model: onnx.ModelProto, path: Path | None) -> Bindings:
    """Return what the sidecar says, or else the metadata; nothing if there is neither."""
    if path is not None and (sidecar := path.with_name(path.name + ".json")).is_file():
        return _decode(sidecar.read_bytes(), at=str(sidecar))
    for entry in model.metadata_props:
        if entry.key == METADATA_KEY:
            # protobuf returns bytes where a string is no text
            text: str | bytes = entry.value
            raw = text if isinstance(text, bytes) else text.encode()
            return _decode(raw, at=f"metadata_props {METADATA_KEY!r}")
    return Bindings()


def _decode(text: bytes, at: str) -> Bindings:
    try:
        return decode_written(text, Bindings)
    except NOT_DECODED as error:
        raise BadModel(
            f"bindings that cannot be read: {error}",
            at=at,
            fix='write {"state": {"variable": "its next value", ...}, ...}',
        ) from error


def bindings_of(graph: TrainingGraph) -> Bindings:
    """Return what is known about a training graph, as it is written into a model file."""
    return Bindings(
        state={variable.name: variable.next for variable in graph.variables.values()},
        loss=graph.loss,
        gradients={name: _tensors(gradient) for name, gradient in graph.gradients.items()},
        sample_axes={name: entry.sample_axis for name, entry in graph.data_inputs.items()},
        forward_outputs=graph.forward_outputs,
        shards={name: shard_input.holds for name, shard_input in graph.shard_inputs.items()},
        found=graph.are_gradients_found,
    )


def _tensors(gradient: Gradient) -> GradientTensors:
    return GradientTensors(dense=gradient.dense, ids=gradient.ids, rows=gradient.rows)


def write_bindings(model: onnx.ModelProto, bindings: Bindings) -> None:
    """Put the bindings into the model's metadata, in place of those it has."""
    other_entries = [entry for entry in model.metadata_props if entry.key != METADATA_KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(other_entries)
    text = msgspec.json.encode(bindings, order="deterministic").decode()
    model.metadata_props.add(key=METADATA_KEY, value=text)


def annotated_source(graph: TrainingGraph) -> bytes:
    """Return the model file as the user wrote it, with all that is known of it by now as metadata.

    Variables' initializers are not in it.
    """
    model = onnx.ModelProto.FromString(graph.source)
    write_bindings(model, bindings_of(graph))
    return bytes(model.SerializeToString(deterministic=True))
