"""Language models of transformers, in small random configurations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from tests.peers.zoo.model import BATCH, Draw, Model, integers, prefix_mask

TOKENS, WORDS, CLASSES = 7, 40, 5
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 20}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

tokens = integers(WORDS - 4, TOKENS)


def words(generator: torch.Generator) -> torch.Tensor:
    """Draw ids above those with a meaning of their own (padding, start, end)."""
    return tokens(generator) + 4


class Taken(nn.Module):
    """A model of transformers that reads its inputs by name, and one field of its result."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], field: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.names, self.field, self.options = model, names, field, options

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, inputs, strict=True)), **self.options)[self.field]


def taken(
    kind: str,
    config: Callable[[], Any],
    names: tuple[str, ...],
    field: str,
    **options: object,
) -> nn.Module:
    """Build a model of transformers by the name of its class."""
    return Taken(getattr(transformers, kind)(config()), names, field, options)


def classifier(name: str, kind: str, config: str, mask: bool = False, **sizes: object) -> Model:
    """Return a model that classifies whole texts; it ends in logits."""
    inputs: dict[str, Draw] = {"input_ids": words}
    if mask:
        inputs["attention_mask"] = prefix_mask(TOKENS)
    made = partial(getattr(transformers, config), num_labels=CLASSES, **sizes)
    build = partial(taken, kind, made, tuple(inputs), "logits")
    return Model(name, "transformers, text", build, inputs, "softmax_cross_entropy")


def language_model(name: str, kind: str, config: str, *, labelled: bool, **sizes: object) -> Model:
    """Return a model that predicts words; it ends in its own loss where it is labelled, else in logits."""
    inputs: dict[str, Draw] = {"input_ids": words}
    if labelled:
        inputs["labels"] = words
    made = partial(getattr(transformers, config), **sizes)
    field = "loss" if labelled else "logits"
    options = {} if "Masked" in kind or kind.startswith("Mamba") else {"use_cache": False}
    build = partial(taken, kind, made, tuple(inputs), field, **options)
    return Model(name, "transformers, text", build, inputs, "loss" if labelled else "softmax_cross_entropy")


def bert_pieces() -> list[Model]:
    """BERT and its kin: encoders."""
    text = {**SIZES, **NO_DROPOUT}
    distil = {"vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    distil |= {
        "max_position_embeddings": 20,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
    }
    albert = {**text, "embedding_size": 8, "classifier_dropout_prob": 0.0}
    electra = {**text, "embedding_size": 8}
    deberta = {
        **text,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "max_relative_positions": 8,
    }
    deberta_v2 = {**deberta, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
    mobile = {**text, "embedding_size": 8, "intra_bottleneck_size": 8, "num_feedforward_networks": 1}
    funnel = {"vocab_size": WORDS, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 16, "n_head": 2}
    funnel |= {"d_head": 8, "d_inner": 24, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return [
        classifier("bert", "BertForSequenceClassification", "BertConfig", mask=True, **text),
        language_model("bert_masked", "BertForMaskedLM", "BertConfig", labelled=True, **text),
        classifier("albert", "AlbertForSequenceClassification", "AlbertConfig", **albert),
        classifier("electra", "ElectraForSequenceClassification", "ElectraConfig", **electra),
        classifier(
            "distilbert", "DistilBertForSequenceClassification", "DistilBertConfig", mask=True, **distil
        ),
        classifier("roberta", "RobertaForSequenceClassification", "RobertaConfig", pad_token_id=1, **text),
        classifier("deberta", "DebertaForSequenceClassification", "DebertaConfig", **deberta),
        classifier("deberta_v2", "DebertaV2ForSequenceClassification", "DebertaV2Config", **deberta_v2),
        classifier("mpnet", "MPNetForSequenceClassification", "MPNetConfig", pad_token_id=1, **text),
        classifier("mobilebert", "MobileBertForSequenceClassification", "MobileBertConfig", **mobile),
        classifier(
            "squeezebert",
            "SqueezeBertForSequenceClassification",
            "SqueezeBertConfig",
            q_groups=2,
            k_groups=2,
            v_groups=2,
            post_attention_groups=1,
            intermediate_groups=2,
            output_groups=2,
            embedding_size=16,
            **text,
        ),
        classifier(
            "fnet",
            "FNetForSequenceClassification",
            "FNetConfig",
            **{k: v for k, v in text.items() if "attention" not in k},
        ),
        classifier("funnel", "FunnelForSequenceClassification", "FunnelConfig", **funnel),
        classifier(
            "modernbert",
            "ModernBertForSequenceClassification",
            "ModernBertConfig",
            mask=True,
            **SIZES,
            **SPECIAL,
            local_attention=4,
            global_attn_every_n_layers=2,
        ),
    ]


def decoders() -> list[Model]:
    """Causal language models."""
    gpt2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20}
    gpt2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    heads = {**SIZES, **SPECIAL, "num_key_value_heads": 1}
    gemma = {
        **heads,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 4,
        "attention_dropout": 0.0,
    }
    neox = {**SIZES, **SPECIAL, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    opt = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 24,
    }
    opt |= {
        "max_position_embeddings": 20,
        "word_embed_proj_dim": 16,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }
    bloom = {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.0}
    falcon = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    phi = {
        **SIZES,
        **SPECIAL,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attention_dropout": 0.0,
        "partial_rotary_factor": 0.5,
    }
    mixtral = {**heads, "num_local_experts": 4, "experts_implementation": "batched_mm"}
    mamba = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    qwen3 = {**heads, "head_dim": 8}
    neo = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 20,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
    }
    return [
        language_model("gpt2", "GPT2LMHeadModel", "GPT2Config", labelled=True, **gpt2),
        language_model(
            "gpt2_logits", "GPT2LMHeadModel", "GPT2Config", labelled=False, **gpt2, tie_word_embeddings=False
        ),
        language_model("llama", "LlamaForCausalLM", "LlamaConfig", labelled=False, **heads),
        language_model("llama_loss", "LlamaForCausalLM", "LlamaConfig", labelled=True, **heads),
        language_model("gemma2", "Gemma2ForCausalLM", "Gemma2Config", labelled=True, **gemma),
        language_model(
            "mistral", "MistralForCausalLM", "MistralConfig", labelled=False, sliding_window=4, **heads
        ),
        language_model("mixtral", "MixtralForCausalLM", "MixtralConfig", labelled=True, **mixtral),
        language_model("qwen2", "Qwen2ForCausalLM", "Qwen2Config", labelled=False, **heads),
        language_model("qwen3", "Qwen3ForCausalLM", "Qwen3Config", labelled=True, **qwen3),
        language_model("opt", "OPTForCausalLM", "OPTConfig", labelled=True, **opt),
        language_model("bloom", "BloomForCausalLM", "BloomConfig", labelled=True, **bloom),
        language_model("falcon", "FalconForCausalLM", "FalconConfig", labelled=True, **falcon),
        language_model("phi", "PhiForCausalLM", "PhiConfig", labelled=False, **phi),
        language_model("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", labelled=True, **neox),
        language_model("gpt_neo", "GPTNeoForCausalLM", "GPTNeoConfig", labelled=True, **neo),
        language_model("mamba", "MambaForCausalLM", "MambaConfig", labelled=False, **mamba),
    ]


def translators() -> list[Model]:
    """Encoders with decoders: T5 and BART."""
    t5 = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    t5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "attn_implementation": "eager"}
    bart = {
        "vocab_size": WORDS,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "max_position_embeddings": 20,
        "dropout": 0.0,
        **SPECIAL,
    }
    found = []
    for name, kind, config, sizes in (
        ("t5", "T5ForConditionalGeneration", "T5Config", t5),
        ("bart", "BartForConditionalGeneration", "BartConfig", bart),
    ):
        inputs: dict[str, Draw] = {"input_ids": words, "decoder_input_ids": words, "labels": words}
        made = partial(getattr(transformers, config), **sizes)
        build = partial(taken, kind, made, tuple(inputs), "loss", use_cache=False)
        found.append(Model(name, "transformers, text", build, inputs))
    return found


MODELS = [*bert_pieces(), *decoders(), *translators()]
assert BATCH not in (TOKENS, WORDS, CLASSES)
