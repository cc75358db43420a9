"""Vision models of timm, torchvision, vit-pytorch, smp and pytorchcv, and transformers' models of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.zoo.rows import ZooRow, table

SIDE, LARGE, CLASSES = 64, 224, 3
IMAGE = (3, SIDE, SIDE)


class Logits(nn.Module):
    """The logits of a model that answers with a record."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).logits  # type: ignore[no-any-return]


def timm_model(name: str, **settings: Any) -> Callable[[], nn.Module]:  # noqa: ANN401 - the library's own
    """timm's own by name."""

    def make() -> nn.Module:
        import timm

        made: nn.Module = timm.create_model(name, num_classes=CLASSES, **settings)
        return made

    return make


def torchvision_model(name: str, **settings: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    """torchvision's own by name."""

    def make() -> nn.Module:
        import torchvision

        made: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **settings)
        return made

    return make


def small_torchvision(module: str, kind: str, **settings: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    """A class of torchvision in a small size."""

    def make() -> nn.Module:
        from importlib import import_module

        made: nn.Module = getattr(import_module(f"torchvision.models.{module}"), kind)(num_classes=CLASSES, **settings)
        return made

    return make


def vit(module: str, kind: str, **settings: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    """A class of vit-pytorch."""

    def make() -> nn.Module:
        from importlib import import_module

        made: nn.Module = getattr(import_module(f"vit_pytorch.{module}"), kind)(num_classes=CLASSES, **settings)
        return made

    return make


def pytorchcv_model(name: str) -> Callable[[], nn.Module]:
    """pytorchcv's own by name."""

    def make() -> nn.Module:
        from pytorchcv.model_provider import get_model

        made: nn.Module = get_model(name, num_classes=CLASSES, in_size=(LARGE, LARGE))
        return made

    return make


def segmenter(kind: str, encoder: str, **settings: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    """A class of segmentation_models_pytorch: three classes for each pixel."""

    def make() -> nn.Module:
        import segmentation_models_pytorch as smp

        made: nn.Module = getattr(smp, kind)(encoder, encoder_weights=None, classes=CLASSES, **settings)
        return made

    return make


def image_classifier(name: str, **settings: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    """transformers' `NameForImageClassification`."""

    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(num_labels=CLASSES, image_size=SIDE, **settings)
        return Logits(getattr(transformers, f"{name}ForImageClassification")(config))

    return make


TINY = {"dim": 32, "depth": 2, "heads": 2, "mlp_dim": 48}
PLAIN = {"image_size": SIDE, "patch_size": 16, **TINY}
WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "patch_size": 16}
FIXED_SIZE = {"img_size": SIDE, "dynamic_img_size": False}  # else positions are resampled in every pass
VIT_SETTINGS = {**dict.fromkeys(("vit", "vit2", "vit3", "vit4"), FIXED_SIZE), "vit_relpos": {"img_size": SIDE}}
TIMM_TESTS = (
    *("byobnet", "convnext", "convnext2", "convnext3", "efficientnet", "efficientnet_evos", "efficientnet_gn"),
    *("efficientnet_ln", "mambaout", "nfnet", "resnet", "vit", "vit2", "vit3", "vit4", "vit_relpos"),
)
TIMM = {
    **{f"test_{name}": timm_model(f"test_{name}", **VIT_SETTINGS.get(name, {})) for name in TIMM_TESTS},
    "deit_tiny": timm_model("deit_tiny_patch16_224", img_size=SIDE, depth=2),
    "swin_tiny": timm_model(
        "swin_tiny_patch4_window7_224", img_size=SIDE, window_size=4, depths=(2, 2), num_heads=(2, 4), embed_dim=16
    ),
    "swinv2_tiny": timm_model(
        "swinv2_tiny_window8_256", img_size=SIDE, window_size=4, depths=(2, 2), num_heads=(2, 4), embed_dim=16
    ),
    "xcit_nano": timm_model("xcit_nano_12_p16_224", img_size=SIDE, depth=2),
    "levit_128s": timm_model("levit_128s", img_size=SIDE),
    "eva02_tiny": timm_model("eva02_tiny_patch14_224", img_size=56, depth=2),
    "ghostnet_050": timm_model("ghostnet_050"),
    "mobilenetv4": timm_model("mobilenetv4_conv_small_050"),
    "lcnet_050": timm_model("lcnet_050"),
    "mixer": timm_model("mixer_s32_224", img_size=SIDE),
    "resmlp": timm_model("resmlp_12_224", img_size=SIDE),
    "poolformer_s12": timm_model("poolformer_s12"),
    "convnext_atto": timm_model("convnext_atto", depths=(1, 1, 1, 1)),
    "fasternet_t0": timm_model("fasternet_t0", depths=(1, 1, 1, 1)),
    "mobileone_s0": timm_model("mobileone_s0"),
    "repvgg_a0": timm_model("repvgg_a0"),
    "starnet_s050": timm_model("starnet_s050"),
}
TORCHVISION = {
    name: torchvision_model(name)
    for name in ("mobilenet_v2", "mobilenet_v3_small", "mnasnet0_5", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1")
} | {"efficientnet_b0": torchvision_model("efficientnet_b0"), "regnet_y_400mf": torchvision_model("regnet_y_400mf")}
TORCHVISION |= {
    "Swin": small_torchvision(
        "swin_transformer",
        "SwinTransformer",
        patch_size=[4, 4],
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
    ),
    "MaxViT": small_torchvision(
        "maxvit",
        "MaxVit",
        input_size=(SIDE, SIDE),
        stem_channels=8,
        partition_size=4,
        block_channels=[8, 16],
        block_layers=[1, 1],
        head_dim=4,
        stochastic_depth_prob=0.1,
    ),
}
VIT_PYTORCH = {
    "ViT": vit("vit", "ViT", **PLAIN),
    "SimpleViT": vit("simple_vit", "SimpleViT", **PLAIN),
    "SimpleViT, registers": vit("simple_vit_with_register_tokens", "SimpleViT", **PLAIN),
    "SimpleViT, QK norm": vit("simple_vit_with_qk_norm", "SimpleViT", **PLAIN),
    "DeepViT": vit("deepvit", "DeepViT", **PLAIN),
    "CaiT": vit("cait", "CaiT", cls_depth=1, **PLAIN),
    "CCT": vit("cct", "CCT", img_size=SIDE, embedding_dim=32, num_layers=2, num_heads=2, mlp_ratio=2),
    "CvT": vit("cvt", "CvT", s1_emb_dim=16, s2_emb_dim=24, s3_emb_dim=32, s2_heads=2, s3_heads=2, s3_depth=1),
    "PiT": vit("pit", "PiT", image_size=SIDE, patch_size=8, dim=32, depth=(1, 1), heads=2, mlp_dim=48),
    "T2T": vit("t2t", "T2TViT", image_size=SIDE, dim=32, depth=1, heads=2, mlp_dim=48),
    "ViT for small data": vit("vit_for_small_dataset", "ViT", **PLAIN),
    "Parallel ViT": vit("parallel_vit", "ViT", num_parallel_branches=2, **PLAIN),
    "NesT": vit(
        "nest", "NesT", image_size=SIDE, patch_size=4, dim=16, heads=2, num_hierarchies=2, block_repeats=(1, 1)
    ),
}
PYTORCHCV = {name: pytorchcv_model(name) for name in ("resnet10", "seresnet10", "squeezenet_v1_1", "mobilenet_wd4")}
SHALLOW = {"encoder_depth": 3, "decoder_channels": (16, 8, 8)}
SMP = {
    "U-Net, ResNet-18": segmenter("Unet", "resnet18", **SHALLOW),
    "U-Net++, MobileNet v2": segmenter("UnetPlusPlus", "mobilenet_v2", **SHALLOW),
}
IMAGES = {
    "ViT": image_classifier("ViT", **WIDE),
    "DeiT": image_classifier("DeiT", **WIDE),
    "DINOv2": image_classifier("Dinov2", **WIDE),
    "BEiT": image_classifier("Beit", **WIDE),
    "ResNet": image_classifier("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    "SegFormer": image_classifier(
        "Segformer",
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
    ),
    "MobileViT": image_classifier("MobileViT", hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 24, 32, 32, 48]),
}


def rows() -> list[ZooRow]:
    """Rows of images."""
    kept = [
        *table("timm", IMAGE, {n: m for n, m in TIMM.items() if n != "eva02_tiny"}),
        *table("timm", (3, 56, 56), {"eva02_tiny": TIMM["eva02_tiny"]}),
    ]
    return [
        *kept,
        *table("torchvision", IMAGE, TORCHVISION),
        *table("vit-pytorch", IMAGE, VIT_PYTORCH),
        *table("smp", IMAGE, SMP),
        *table("pytorchcv", (3, LARGE, LARGE), PYTORCHCV),
        *table("transformers", IMAGE, IMAGES),
    ]
