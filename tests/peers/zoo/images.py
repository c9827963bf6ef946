"""Image models, speech, and pairs of both, of transformers, in small random configurations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

from tests.peers.zoo.model import Draw, Model, normal
from tests.peers.zoo.texts import CLASSES, WORDS, taken, words

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PATCHES = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "intermediate_size": 24}
PATCHES |= {"num_hidden_layers": 2, "num_attention_heads": 2}


def image_classifier(name: str, kind: str, config: str, size: int = 32, **sizes: object) -> Model:
    """Return a model that classifies square images of three channels; it ends in logits."""
    made = partial(getattr(transformers, config), num_labels=CLASSES, **sizes)
    build = partial(taken, kind, made, ("pixel_values",), "logits")
    return Model(
        name, "transformers, images", build, {"pixel_values": normal(3, size, size)}, "softmax_cross_entropy"
    )


def transformers_of_images() -> list[Model]:
    patches = {**PATCHES, **NO_DROPOUT}
    swin = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2]}
    swin |= {"window_size": 4, "drop_path_rate": 0.0, "attn_implementation": "eager"}
    segformer = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
    segformer |= {
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
    }
    segformer |= {"drop_path_rate": 0.0, "classifier_dropout_prob": 0.0, "decoder_hidden_size": 8}
    pvt = {"image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1], "sequence_reduction_ratios": [2, 1]}
    pvt |= {"hidden_sizes": [8, 16], "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 2]}
    pvt |= {"mlp_ratios": [2, 2], "drop_path_rate": 0.0}
    return [
        image_classifier("vit", "ViTForImageClassification", "ViTConfig", **patches),
        image_classifier("deit", "DeiTForImageClassification", "DeiTConfig", **patches),
        image_classifier(
            "beit",
            "BeitForImageClassification",
            "BeitConfig",
            **patches,
            drop_path_rate=0.0,
            attn_implementation="eager",
            use_relative_position_bias=True,
            use_mean_pooling=True,
        ),
        image_classifier("swin", "SwinForImageClassification", "SwinConfig", **swin),
        image_classifier("swinv2", "Swinv2ForImageClassification", "Swinv2Config", **swin),
        image_classifier(
            "dinov2",
            "Dinov2ForImageClassification",
            "Dinov2Config",
            **{k: v for k, v in patches.items() if k != "intermediate_size"},
            mlp_ratio=2,
        ),
        image_classifier(
            "segformer", "SegformerForImageClassification", "SegformerConfig", **NO_DROPOUT, **segformer
        ),
        image_classifier("pvt", "PvtForImageClassification", "PvtConfig", **NO_DROPOUT, **pvt),
    ]


def convolutional() -> list[Model]:
    resnet = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    mobilevit = {"image_size": 64, "hidden_sizes": [8, 10, 14], "neck_hidden_sizes": [4, 6, 8, 8, 10, 14, 16]}
    mobilevit |= {
        "num_attention_heads": 2,
        "mlp_ratio": 2.0,
        "hidden_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0,
    }
    poolformer = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2, "patch_sizes": [7, 3]}
    poolformer |= {"strides": [4, 2], "padding": [2, 1], "mlp_ratio": 2.0, "drop_path_rate": 0.0}
    return [
        image_classifier(
            "convnext",
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_stages=2,
            drop_path_rate=0.0,
        ),
        image_classifier(
            "convnextv2",
            "ConvNextV2ForImageClassification",
            "ConvNextV2Config",
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_stages=2,
            drop_path_rate=0.0,
        ),
        image_classifier("resnet_transformers", "ResNetForImageClassification", "ResNetConfig", **resnet),
        image_classifier("mobilevit", "MobileViTForImageClassification", "MobileViTConfig", 64, **mobilevit),
        image_classifier("poolformer", "PoolFormerForImageClassification", "PoolFormerConfig", **poolformer),
    ]


class MeanSquare(nn.Module):
    """A speech model under a loss of its own: its logits near given ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.model(values)["logits"].mean(1), targets)


def wav2vec2(kind: str, config: str) -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 24, "conv_dim": (8, 8), "conv_stride": (4, 2)}
    sizes |= {"conv_kernel": (8, 3), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    sizes |= {"num_feat_extract_layers": 2}
    off = dict.fromkeys(("hidden_dropout", "attention_dropout", "feat_proj_dropout", "layerdrop"), 0.0)
    made = getattr(transformers, config)(**sizes, **off, apply_spec_augment=False)
    return MeanSquare(getattr(transformers, kind)(made))


def whisper() -> nn.Module:
    sizes = {"vocab_size": WORDS, "num_mel_bins": 8, "encoder_layers": 1, "decoder_layers": 1, "d_model": 16}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24}
    sizes |= {"decoder_ffn_dim": 24, "max_source_positions": 10, "max_target_positions": 16, "dropout": 0.0}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    return taken(
        "WhisperForConditionalGeneration",
        lambda: transformers.WhisperConfig(**sizes, **special),
        ("input_features", "decoder_input_ids", "labels"),
        "loss",
        use_cache=False,
    )


def clip(kind: str = "CLIPModel", config: str = "CLIPConfig") -> nn.Module:
    text = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "max_position_embeddings": 20, "eos_token_id": 2}
    vision = {**PATCHES, "num_hidden_layers": 1}
    made = getattr(transformers, config)(text_config=text, vision_config=vision)
    if config == "CLIPConfig":
        made.projection_dim = 16
    return taken(kind, lambda: made, ("input_ids", "pixel_values"), "loss", return_loss=True)


def speech_and_pairs() -> list[Model]:
    heard: dict[str, Draw] = {"values": normal(160), "targets": normal(WORDS)}
    whispered: dict[str, Draw] = {
        "input_features": normal(8, 20),
        "decoder_input_ids": words,
        "labels": words,
    }
    paired: dict[str, Draw] = {"input_ids": words, "pixel_values": normal(3, 32, 32)}
    family = "transformers, speech and pairs"

    def of(name: str, build: Callable[[], nn.Module], inputs: dict[str, Draw]) -> Model:
        return Model(name, family, build, inputs)

    return [
        of("wav2vec2", partial(wav2vec2, "Wav2Vec2ForCTC", "Wav2Vec2Config"), heard),
        of("hubert", partial(wav2vec2, "HubertForCTC", "HubertConfig"), heard),
        of("whisper", whisper, whispered),
        of("clip", clip, paired),
        of("siglip", partial(clip, "SiglipModel", "SiglipConfig"), paired),
    ]


MODELS = [*transformers_of_images(), *convolutional(), *speech_and_pairs()]
