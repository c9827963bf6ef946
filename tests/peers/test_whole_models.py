"""Whole models of transformers, forward exported by PyTorch: partc's gradients and AdamW against PyTorch's.

Small random configurations: nothing is downloaded.
"""

import json
from collections.abc import Callable, Iterable

import numpy as np
import onnx
import onnxruntime
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.parameters.find_parameters import FORWARD_KEY
from partc.compiler.differentiation.updates.optimizers import SGD, AdamW

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
onnxscript = pytest.importorskip("onnxscript")
pytestmark = pytest.mark.peers

BATCH, TOKENS, WORDS = 2, 6, 32
GRADIENT_RTOL = 1e-4  # of a gradient's largest element, and of the largest of all by a hundredth
ADAMW_RTOL = 1e-3  # of a parameter's largest change
EPSILON = 1e-4  # Adam's: with 1e-8, gradients that are rounding noise become full steps, in either system


class Ending(torch.nn.Module):
    """A model that returns one number of its first output, smooth in all of it."""

    def __init__(self, model: "torch.nn.Module", options: dict[str, object]) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, *inputs: "torch.Tensor") -> "torch.Tensor":
        result = self.model(*inputs, **self.options, return_dict=False)[0]
        weights = torch.linspace(-1, 1, result.numel()).reshape(result.shape)
        return (torch.tanh(result) * weights).mean()


def ids() -> "torch.Tensor":
    return torch.randint(0, WORDS, (BATCH, TOKENS))


def pixels() -> "torch.Tensor":
    return torch.randn(BATCH, 3, 32, 32)


TEXT = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"intermediate_size": 24, "max_position_embeddings": 16}
UNTIED = {"tie_word_embeddings": False}  # the exporter stores a tied table twice, once transposed
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert() -> Ending:
    config = transformers.BertConfig(**TEXT, **NO_DROPOUT, **UNTIED)
    return Ending(transformers.BertForMaskedLM(config), {})


def gpt2() -> Ending:
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, **UNTIED, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return Ending(transformers.GPT2LMHeadModel(config), {"use_cache": False})


def llama() -> Ending:
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=1)
    return Ending(transformers.LlamaForCausalLM(config), {"use_cache": False})


def mixtral() -> Ending:
    config = transformers.MixtralConfig(**TEXT, num_key_value_heads=1, num_local_experts=4)
    config._experts_implementation = "batched_mm"
    return Ending(transformers.MixtralForCausalLM(config), {"use_cache": False})


class Seq2Seq(torch.nn.Module):
    """T5 reads its second input by name."""

    def __init__(self, model: "torch.nn.Module") -> None:
        super().__init__()
        self.model = model

    def forward(self, given: "torch.Tensor", asked: "torch.Tensor", **options: object) -> object:
        return self.model(input_ids=given, decoder_input_ids=asked, **options)


def t5() -> Ending:
    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, attn_implementation="eager", **UNTIED)
    model = transformers.T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # tied all the same
    return Ending(Seq2Seq(model), {"use_cache": False})


def vit() -> Ending:
    sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "intermediate_size": 24}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    return Ending(transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **NO_DROPOUT)), {})


def resnet() -> Ending:
    """Batch normalisation with its running statistics: the exporter writes training as inference."""
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    return Ending(transformers.ResNetForImageClassification(config), {})


def wav2vec2() -> Ending:
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 3)}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2}
    off = dict.fromkeys(("hidden_dropout", "attention_dropout", "feat_proj_dropout", "layerdrop"), 0.0)
    config = transformers.Wav2Vec2Config(**sizes, **off, apply_spec_augment=False)
    return Ending(transformers.Wav2Vec2ForCTC(config), {})


def mamba() -> Ending:
    config = transformers.MambaConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, state_size=4, **UNTIED
    )
    return Ending(transformers.MambaForCausalLM(config), {"use_cache": False})


Inputs = tuple[Callable[[], "torch.Tensor"], ...]
MODELS: dict[str, tuple[Callable[[], Ending], Inputs]] = {
    "bert": (bert, (ids,)),
    "gpt2": (gpt2, (ids,)),
    "vit": (vit, (pixels,)),
    "resnet": (resnet, (pixels,)),
    "llama": (llama, (ids,)),
    "t5": (t5, (ids, ids)),
    "mixtral": (mixtral, (ids,)),
    "wav2vec2": (wav2vec2, (lambda: torch.randn(BATCH, 160),)),
    "mamba": (mamba, (ids,)),
}


# The exporter folds the others into constants: scales of batch normalisation into the convolutions,
# rows of position tables at fixed positions, the weight norm of Wav2Vec2, exp(A) of Mamba.
SHARE_FOUND = {
    "resnet": 0.35,
    "vit": 0.95,
    "bert": 0.9,
    "gpt2": 0.9,
    "t5": 0.9,
    "wav2vec2": 0.8,
    "mamba": 0.75,
}


class Exported:
    """A model, its inputs, and its forward graph, whose output is a loss."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        make, inputs = MODELS[name]
        self.name = name
        self.module = make().eval()
        with torch.no_grad():
            for value in self.module.parameters():
                value += 0.05 * torch.randn_like(value)  # the exporter makes one of equal parameters
        self.inputs = tuple(make_input() for make_input in inputs)
        names = [f"input_{index}" for index in range(len(self.inputs))]
        program = torch.onnx.export(
            self.module,
            self.inputs,
            input_names=names,
            output_names=["loss"],
            dynamo=True,
            optimize=False,  # else batch normalisation would be folded into the convolution before it
            verbose=False,
        )
        onnxscript.optimizer.optimize(program.model)
        self.forward: onnx.ModelProto = program.model_proto
        self.feeds = dict(zip(names, (value.numpy() for value in self.inputs), strict=True))

    def train_only(self, names: Iterable[str]) -> None:
        """Leave constants that are no parameters as they are, such as the weights of the loss."""
        facts = json.dumps({"parameters": list(names)})
        self.forward.metadata_props.add(key=FORWARD_KEY, value=facts)

    def parameters(self) -> "dict[str, tuple[torch.nn.Parameter, bool]]":
        """Return the graph's parameters by name, and whether the exporter stored them transposed.

        It gives those that it transposes names of its own: they are known by their values.
        """
        found = {}
        stored = {t.name: onnx.numpy_helper.to_array(t) for t in self.forward.graph.initializer}
        for value in self.module.parameters():
            wanted = value.detach().numpy()
            for name, array in stored.items():
                if array.shape == wanted.shape and np.array_equal(array, wanted):
                    found[name] = value, False
                elif array.T.shape == wanted.shape and np.array_equal(array.T, wanted):
                    found[name] = value, True
        assert len(found) >= SHARE_FOUND.get(self.name, 1.0) * len(list(self.module.parameters()))
        return found


@pytest.mark.parametrize(
    "name",
    [name if name in ("bert", "resnet") else pytest.param(name, marks=pytest.mark.long) for name in MODELS],
)
def test_gradients_equal_pytorchs(name: str) -> None:
    exported = Exported(name)
    # What the exporter computed from parameters is trained, too: its gradients are as right as others.
    train = build_training_graph(
        exported.forward, loss="loss", optimizer=SGD(lr=1.0), parameters=ParameterChoice(train=("*",))
    )
    exported.module(*exported.inputs).backward()

    (after,) = steps_of(train, exported.feeds, 1)

    parameters = exported.parameters()
    largest = max(float(value.grad.abs().max()) for value, _ in parameters.values() if value.grad is not None)
    for name, (value, is_transposed) in parameters.items():
        if value.grad is None:
            continue
        expected = value.grad.numpy()
        found = after[name].T if is_transposed else after[name]
        moved = value.detach().numpy() - found
        # A parameter near 1 loses what is below its last bit: 6e-8.
        allowed = GRADIENT_RTOL * max(float(np.abs(expected).max()), largest / 100) + 2.5e-7
        np.testing.assert_allclose(moved, expected, rtol=0, atol=allowed, err_msg=name)


@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(n, marks=pytest.mark.long) for n in ("gpt2", "llama"))]
)
def test_five_adamw_steps_equal_pytorchs(name: str) -> None:
    exported = Exported(name)
    parameters = exported.parameters()
    exported.train_only(parameters)
    train = build_training_graph(exported.forward, loss="loss", optimizer=AdamW(lr=1e-3, epsilon=EPSILON))
    optimizer = torch.optim.AdamW([value for value, _ in parameters.values()], lr=1e-3, eps=EPSILON)
    start = {name: value.detach().numpy().copy() for name, (value, _) in parameters.items()}
    for _ in range(5):
        optimizer.zero_grad()
        exported.module(*exported.inputs).backward()
        optimizer.step()

    after = steps_of(train, exported.feeds, 5)[-1]

    for name, (value, is_transposed) in parameters.items():
        expected, found = value.detach().numpy(), after[name].T if is_transposed else after[name]
        allowed = ADAMW_RTOL * float(np.abs(expected - start[name]).max()) + 2.5e-7
        np.testing.assert_allclose(found, expected, rtol=0, atol=allowed, err_msg=name)


def steps_of(train: onnx.ModelProto, feeds: dict[str, np.ndarray], count: int) -> list[dict[str, np.ndarray]]:
    """Take steps with stock onnxruntime; return the variables after each."""
    from partc.compiler.importing.import_training import import_training_graph
    from partc.passes.graph.training_graph import StoredTensor
    from partc.runtime.plan.variables import Constant

    training = import_training_graph(train)
    values = {}
    for name, variable in training.variables.items():
        initial = variable.initial
        assert isinstance(initial, StoredTensor | Constant)
        is_stored = isinstance(initial, StoredTensor)
        values[name] = initial.load() if is_stored else np.full(variable.shape, initial.value, variable.dtype)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1  # ScatterND adds rows of equal ids one after another only then
    session = onnxruntime.InferenceSession(training.source, options, providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    taken = []
    for _ in range(count):
        results = dict(zip(outputs, session.run(None, {**values, **feeds}), strict=True))
        values = {name: results[variable.next] for name, variable in training.variables.items()}
        taken.append(values)
    return taken
