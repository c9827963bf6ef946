"""Exports of transformers under named strategies: as one device, with the memory and messages of theory."""

import warnings
from functools import cache
from math import prod
from pathlib import Path

import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import AdamW
from partc.compiler.importing.import_training import import_training_graph
from partc.runtime.plan.boxes import local_shape
from partc.runtime.plan.program import Start
from tests.builders.plans.compiled_steps import Compiled, compile_step, random_batches, verified

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.peers

SAMPLES, TOKENS, WORDS, WIDTH, LAYERS = 8, 6, 50, 32, 2


class Labelled(torch.nn.Module):
    """A model that returns its own loss; inputs are given by name."""

    def __init__(self, model: "torch.nn.Module", names: tuple[str, ...], **options: object) -> None:
        super().__init__()
        self.model, self.names, self.options = model, names, options

    def forward(self, *inputs: "torch.Tensor") -> "torch.Tensor":
        return self.model(**dict(zip(self.names, inputs, strict=True)), **self.options).loss


def bert() -> Labelled:
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **off, intermediate_size=64, max_position_embeddings=16)
    return Labelled(transformers.BertForMaskedLM(config), ("input_ids", "labels"))


def gpt2() -> Labelled:
    sizes = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return Labelled(transformers.GPT2LMHeadModel(config), ("input_ids", "labels"), use_cache=False)


def t5() -> Labelled:
    sizes = {
        "vocab_size": WORDS,
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": LAYERS,
        "num_heads": 4,
    }
    off = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "attn_implementation": "eager"}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **off))
    return Labelled(model, ("input_ids", "decoder_input_ids", "labels"), use_cache=False)


def llama() -> Labelled:
    """Rotary positions, gated layers, a table of words apart from the logits' weights."""
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, intermediate_size=64, max_position_embeddings=16)
    return Labelled(transformers.LlamaForCausalLM(config), ("input_ids", "labels"), use_cache=False)


MODELS = {"bert": bert, "gpt2": gpt2, "llama": llama, "t5": t5}
# Two sums a block forward and two back, three and three of T5's decoder; the embedding's, the loss's, and
# what is sent beside: BERT's head gathers, GPT-2's weights behind a bias of Gemm.
MOST_SENT = {"bert": 20, "gpt2": 14, "llama": 12, "t5": 20}
# The others are marked long.
SAMPLED = ("gpt2", "llama")
BY_NAME = [pytest.param(n, marks=() if n in SAMPLED else pytest.mark.long) for n in MODELS]


@cache
def exported(name: str) -> bytes:
    """Return the training step of an export that keeps every parameter apart."""
    torch.manual_seed(0)
    module = MODELS[name]().eval()
    inputs = tuple(torch.randint(0, WORDS, (SAMPLES, TOKENS)) for _ in module.names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, inputs, input_names=list(module.names), output_names=["loss"], dynamo=True,
            optimize=False, verbose=False,
        )  # fmt: skip
    step = build_training_graph(program.model_proto, loss="loss", optimizer=AdamW(lr=0.01))
    return step.SerializeToString()


def compiled_and_held(name: str, folder: Path, cluster: str, strategy: str, batch: str) -> Compiled:
    training = import_training_graph(onnx.ModelProto.FromString(exported(name)))
    compiled = compile_step(training, folder / "out", cluster, strategy, batch)
    report = verified(compiled, random_batches(compiled.plan, 1))
    assert report.passed, f"{report.summary()}\n{report.variables}"
    return compiled


def shares(compiled: Compiled) -> list[float]:
    """Return what each rank keeps of all trained elements."""
    trained = compiled.compilation.training.gradients
    shapes = {v.name: v.shape for v in compiled.plan.variables if v.name in trained}
    total = sum(map(prod, shapes.values()))
    return [
        sum(prod(local_shape(shapes[h.variable], h.box)) for h in rank.pieces if h.variable in shapes) / total
        for rank in compiled.plan.ranks
    ]


@pytest.mark.parametrize("name", BY_NAME)
def test_ranks_share_weights_and_sum_twice_a_block_each_way(name: str, tmp_path: Path) -> None:
    compiled = compiled_and_held(name, tmp_path, "1x4", "tensor=4", "global")

    assert max(shares(compiled)) < 0.3
    starts = [step for step in compiled.plan.instructions if isinstance(step, Start)]
    assert len(starts) <= MOST_SENT[name], [(start.kind, start.payload_bytes) for start in starts]


@pytest.mark.parametrize("name", BY_NAME)
def test_replicas_share_all_variables(name: str, tmp_path: Path) -> None:
    compiled = compiled_and_held(name, tmp_path, "2x2", "fsdp", "per-replica")

    assert max(shares(compiled)) < 0.27


@pytest.mark.parametrize(
    ("cluster", "strategy", "batch"),
    [
        ("2x4", "data=2,tensor=2,pipeline=2", "global"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("1x2", "pipeline=2,microbatches=2", "global"),
                ("2x2", "data=2,tensor=2", "per-replica"),
                ("2x2", "layerwise", "global"),
                ("2x2", "one-weird-trick", "global"),
            )
        ),
    ],
)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_name_trains_as_one_device(
    name: str, cluster: str, strategy: str, batch: str, tmp_path: Path
) -> None:
    compiled_and_held(name, tmp_path, cluster, strategy, batch)
