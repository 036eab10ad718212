"""Vision models of `transformers` with tiny configurations."""

from __future__ import annotations

import transformers as hf
from torch import nn

from tests.zoo.encoders import TINY
from tests.zoo.entry import image, model

_VIT = {name: value for name, value in TINY.items() if name not in ("vocab_size", "max_position_embeddings")} | {
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
}
_IMAGE = image("batch", 3, 32, 32)


@model("vit", "vision", _IMAGE)
def vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**_VIT, num_labels=5))


@model("deit", "vision", _IMAGE)
def deit() -> nn.Module:
    return hf.DeiTModel(hf.DeiTConfig(**_VIT))


@model("beit", "vision", _IMAGE)
def beit() -> nn.Module:
    return hf.BeitModel(hf.BeitConfig(**_VIT, use_relative_position_bias=True))


@model("dinov2", "vision", _IMAGE)
def dinov2() -> nn.Module:
    config = {name: value for name, value in _VIT.items() if name != "intermediate_size"}
    return hf.Dinov2Model(hf.Dinov2Config(**config, mlp_ratio=2))


@model("clip_vision", "vision", _IMAGE)
def clip_vision() -> nn.Module:
    return hf.CLIPVisionModel(hf.CLIPVisionConfig(**_VIT, projection_dim=8))


@model("swin", "vision", _IMAGE)
def swin() -> nn.Module:
    return hf.SwinModel(
        hf.SwinConfig(image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=4)
    )


@model("swinv2", "vision", _IMAGE)
def swinv2() -> nn.Module:
    return hf.Swinv2Model(
        hf.Swinv2Config(image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=4)
    )


@model("convnext", "vision", _IMAGE)
def convnext() -> nn.Module:
    return hf.ConvNextForImageClassification(
        hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=5)
    )


@model("resnet_hf", "vision", _IMAGE)
def resnet_hf() -> nn.Module:
    return hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5)
    )


@model("regnet", "vision", _IMAGE)
def regnet() -> nn.Module:
    return hf.RegNetModel(hf.RegNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4))


@model("segformer", "vision", _IMAGE)
def segformer() -> nn.Module:
    return hf.SegformerForSemanticSegmentation(
        hf.SegformerConfig(
            num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3],
            strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3,
        )
    )  # fmt: skip


@model("mobilenet_v2", "vision", _IMAGE)
def mobilenet_v2() -> nn.Module:
    return hf.MobileNetV2Model(hf.MobileNetV2Config(image_size=32, depth_multiplier=0.25, min_depth=4))


@model("mobilevit", "vision", image("batch", 3, 64, 64))
def mobilevit() -> nn.Module:
    return hf.MobileViTModel(
        hf.MobileViTConfig(
            image_size=64, hidden_sizes=[8, 12, 16], neck_hidden_sizes=[4, 8, 8, 12, 16, 16, 16],
            num_attention_heads=2, expand_ratio=2.0,
        )
    )  # fmt: skip


@model("poolformer", "vision", _IMAGE)
def poolformer() -> nn.Module:
    return hf.PoolFormerModel(
        hf.PoolFormerConfig(
            hidden_sizes=[8, 16], depths=[1, 1], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2],
            padding=[2, 1],
        )
    )  # fmt: skip


@model("yolos", "vision", _IMAGE)
def yolos() -> nn.Module:
    config = {name: value for name, value in _VIT.items() if name != "image_size"}
    return hf.YolosForObjectDetection(
        hf.YolosConfig(**config, image_size=[32, 32], num_detection_tokens=4, num_labels=3)
    )


@model("dpt", "vision", _IMAGE)
def dpt() -> nn.Module:
    config = _VIT | {"num_hidden_layers": 4}
    return hf.DPTForDepthEstimation(
        hf.DPTConfig(**config, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[4, 8, 8, 8], fusion_hidden_size=8)
    )
