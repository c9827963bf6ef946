"""torchvision's and timm's models: narrow where their builders allow it, else on small images."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from tests.peers.zoo import vision_libraries
from tests.peers.zoo.model import Model, normal

CLASSES = 5


def torchvision_model(name: str, size: int, **options: Any) -> Model:
    def build() -> nn.Module:
        from torchvision import models

        return models.get_model(name, weights=None, num_classes=CLASSES, **options)

    return Model(
        f"torchvision_{name}", "torchvision", build, {"x": normal(3, size, size)}, "softmax_cross_entropy"
    )


def narrow(name: str, size: int, build: Callable[[], nn.Module]) -> Model:
    return Model(
        f"torchvision_{name}", "torchvision", build, {"x": normal(3, size, size)}, "softmax_cross_entropy"
    )


def resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    class Narrow(ResNet):
        """A ResNet of 8 to 64 channels."""

        def _make_layer(self, block: Any, planes: int, *rest: Any, **options: Any) -> nn.Sequential:
            if self.inplanes == 64 and planes == 64:
                self.inplanes = 8
                self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
            return super()._make_layer(block, planes // 8, *rest, **options)

    net = Narrow(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)
    net.fc = nn.Linear(64, CLASSES)
    return net


def densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, bn_size=2, num_classes=CLASSES)


def mobilenet_v2() -> nn.Module:
    from torchvision.models import MobileNetV2

    settings = [[1, 8, 1, 1], [4, 8, 2, 2], [4, 16, 1, 2]]
    net = MobileNetV2(
        num_classes=CLASSES, width_mult=1.0, inverted_residual_setting=settings, round_nearest=8
    )
    net.features[-1] = nn.Sequential(nn.Conv2d(16, 24, 1), nn.BatchNorm2d(24), nn.ReLU6())
    net.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(24, CLASSES))
    return net


def mobilenet_v3() -> nn.Module:
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    settings = [
        InvertedResidualConfig(8, 3, 8, 8, True, "RE", 2, 1, 1.0),
        InvertedResidualConfig(8, 5, 24, 16, True, "HS", 2, 1, 1.0),
    ]
    return MobileNetV3(settings, last_channel=32, num_classes=CLASSES)


def efficientnet() -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    settings = [MBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 5, 2, 8, 16, 2)]
    return EfficientNet(
        settings, dropout=0.2, stochastic_depth_prob=0.0, num_classes=CLASSES, last_channel=32
    )


def shufflenet() -> nn.Module:
    from torchvision.models import ShuffleNetV2

    return ShuffleNetV2([2, 2, 2], [8, 16, 24, 32, 40], num_classes=CLASSES)


def regnet() -> nn.Module:
    from torchvision.models.regnet import BlockParams, RegNet

    settings = BlockParams.from_init_params(depth=4, w_0=8, w_a=8.0, w_m=2.0, group_width=4, se_ratio=0.25)
    return RegNet(settings, num_classes=CLASSES, stem_width=8)


def vgg() -> nn.Module:
    from torchvision.models.vgg import VGG, make_layers

    net = VGG(make_layers([8, "M", 16, "M", 16, 16, "M"], batch_norm=True), num_classes=CLASSES, dropout=0.0)
    net.avgpool = nn.AdaptiveAvgPool2d(2)
    net.classifier = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Dropout(), nn.Linear(24, CLASSES))
    return net


def vision_transformer() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 16, 24, num_classes=CLASSES)


def swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer(
        [4, 4], 8, [1, 2], [2, 2], [4, 4], mlp_ratio=2.0, num_classes=CLASSES, stochastic_depth_prob=0.0
    )


def convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=CLASSES)


def maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 4, stochastic_depth_prob=0.0, num_classes=CLASSES)


def mnasnet() -> nn.Module:
    from torchvision.models import MNASNet

    return MNASNet(0.1, num_classes=CLASSES, dropout=0.0)


def googlenet() -> nn.Module:
    """Its stem, two of its Inception blocks, its head."""
    from torchvision.models.googlenet import BasicConv2d, Inception

    return nn.Sequential(
        BasicConv2d(3, 8, kernel_size=7, stride=2, padding=3),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        Inception(8, 4, 4, 8, 2, 4, 4),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        Inception(20, 8, 4, 8, 2, 4, 4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(24, CLASSES),
    )


def segmentation() -> nn.Module:
    """DeepLab's head on two convolutions: a class for every pixel."""
    from torchvision.models.segmentation.deeplabv3 import ASPP

    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        ASPP(8, [2, 3], 8),
        nn.Conv2d(8, CLASSES, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def timm_model(name: str, size: int, **options: Any) -> Model:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **options)

    return Model(f"timm_{name}", "timm", build, {"x": normal(3, size, size)}, "softmax_cross_entropy")


def timm_class(name: str, size: int, module: str, kind: str, **options: Any) -> Model:
    def build() -> nn.Module:
        import importlib

        return getattr(importlib.import_module(f"timm.models.{module}"), kind)(num_classes=CLASSES, **options)

    return Model(f"timm_{name}", "timm", build, {"x": normal(3, size, size)}, "softmax_cross_entropy")


def of_timm(name: str, build: Callable[[], nn.Module]) -> Model:
    return Model(f"timm_{name}", "timm", build, {"x": normal(3, 32, 32)}, "softmax_cross_entropy")


def gated_mlp() -> nn.Module:
    from timm.layers import GatedMlp
    from timm.models.mlp_mixer import MlpMixer, SpatialGatingBlock

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_blocks": 2, "mlp_ratio": 2}
    return MlpMixer(num_classes=CLASSES, block_layer=SpatialGatingBlock, mlp_layer=GatedMlp, **sizes)


def resnet_v2() -> nn.Module:
    from timm.layers import GroupNormAct
    from timm.models.resnetv2 import ResNetV2

    norm = partial(GroupNormAct, num_groups=4)
    return ResNetV2([1, 1], channels=(16, 32), stem_chs=8, num_classes=CLASSES, norm_layer=norm)


def repvgg() -> nn.Module:
    from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg

    blocks = tuple(ByoBlockCfg(type="rep", d=1, c=channels, s=2, gs=0) for channels in (8, 16))
    return ByobNet(ByoModelCfg(blocks=blocks, stem_type="rep", stem_chs=8), num_classes=CLASSES)


def all_models() -> list[Model]:
    if not vision_libraries.IS_THERE:
        return []
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 16}
    return [
        narrow("resnet", 32, resnet),
        narrow("densenet", 32, densenet),
        narrow("mobilenet_v2", 32, mobilenet_v2),
        narrow("mobilenet_v3", 32, mobilenet_v3),
        narrow("efficientnet", 32, efficientnet),
        narrow("shufflenet_v2", 32, shufflenet),
        narrow("regnet", 32, regnet),
        narrow("vgg", 32, vgg),
        narrow("googlenet", 32, googlenet),
        narrow("mnasnet", 32, mnasnet),
        narrow("vit", 32, vision_transformer),
        narrow("swin", 32, swin),
        narrow("convnext", 32, convnext),
        narrow("maxvit", 32, maxvit),
        narrow("aspp", 16, segmentation),
        torchvision_model("squeezenet1_1", 32),
        timm_class("mlp_mixer", 32, "mlp_mixer", "MlpMixer", **small, num_blocks=2),
        timm_class(
            "deit3",
            32,
            "vision_transformer",
            "VisionTransformer",
            **small,
            depth=2,
            num_heads=2,
            init_values=1e-1,
            no_embed_class=True,
        ),
        timm_class("cait", 32, "cait", "Cait", **small, depth=1, num_heads=2, depth_token_only=1),
        timm_class("xcit", 32, "xcit", "Xcit", **small, depth=1, num_heads=2, cls_attn_layers=1),
        of_timm("gated_mlp", gated_mlp),
        timm_class("convmixer", 32, "convmixer", "ConvMixer", dim=16, depth=2, kernel_size=5, patch_size=4),
        of_timm("resnetv2", resnet_v2),
        of_timm("repvgg", repvgg),
        timm_model("test_efficientnet", 32),
        timm_model("test_vit", 160),
    ]


MODELS = all_models()
