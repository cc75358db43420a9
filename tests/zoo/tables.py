"""Models of tables, series and medical images: rtdl, mambapy and MONAI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.zoo.rows import ZooRow, table

COLUMNS, STEPS, SIDE, CLASSES = 6, 16, 64, 3


class NumericColumns(nn.Module):
    """A table's model that takes numbers and categories apart; here all columns are numbers."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, None)  # type: ignore[no-any-return]


class Pooled(nn.Module):
    """The mean over a sequence or an image's places, classified."""

    def __init__(self, body: nn.Module, width: int, *, first: bool) -> None:
        super().__init__()
        self.body, self.head, self.first = body, nn.Linear(width, CLASSES), first

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        return self.head(out.flatten(2).mean(2) if self.first else out.mean(1))  # type: ignore[no-any-return]


def rtdl(kind: str, **settings: Any) -> Callable[[], nn.Module]:  # noqa: ANN401 - the library's own
    """A class of rtdl_revisiting_models."""

    def make() -> nn.Module:
        import rtdl_revisiting_models

        made: nn.Module = getattr(rtdl_revisiting_models, kind)(**settings)
        return NumericColumns(made) if kind == "FTTransformer" else made

    return make


def monai(kind: str, width: int = 0, **settings: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    """A network of MONAI for images; `width`: channels of its output, which is then pooled and classified."""

    def make() -> nn.Module:
        from monai.networks import nets

        made: nn.Module = getattr(nets, kind)(spatial_dims=2, **settings)
        return Pooled(made, width, first=True) if width else made

    return make


class Predictions(nn.Module):
    """The classes of a series model of transformers."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).prediction_logits  # type: ignore[no-any-return]


def patch_tst() -> nn.Module:
    """Windows of a series as tokens."""
    import transformers

    sizes: dict[str, Any] = {"d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24}
    windows: dict[str, Any] = {"context_length": STEPS, "patch_length": 4, "patch_stride": 4}
    config = transformers.PatchTSTConfig(
        num_input_channels=8, num_targets=CLASSES, use_cls_token=True, **sizes, **windows
    )
    return Predictions(transformers.PatchTSTForClassification(config))


def mamba() -> nn.Module:
    """mambapy's sequential scan in its parallel form."""
    from mambapy.mamba import Mamba, MambaConfig

    return Pooled(Mamba(MambaConfig(d_model=8, n_layers=1, d_state=4)), 8, first=False)


RTDL = {
    "MLP": rtdl("MLP", d_in=COLUMNS, d_out=CLASSES, n_blocks=2, d_block=16, dropout=0.1),
    "ResNet": rtdl(
        "ResNet",
        d_in=COLUMNS,
        d_out=CLASSES,
        n_blocks=2,
        d_block=16,
        d_hidden=24,
        d_hidden_multiplier=None,
        dropout1=0.1,
        dropout2=0.1,
    ),
    "FT-Transformer": rtdl(
        "FTTransformer",
        n_cont_features=COLUMNS,
        cat_cardinalities=[],
        d_out=CLASSES,
        n_blocks=1,
        d_block=16,
        attention_n_heads=2,
        attention_dropout=0.1,
        ffn_d_hidden=24,
        ffn_d_hidden_multiplier=None,
        ffn_dropout=0.1,
        residual_dropout=0.0,
    ),
}
MONAI = {
    "UNet": monai("UNet", 4, in_channels=1, out_channels=4, channels=(4, 8), strides=(2,)),
    "BasicUNet": monai("BasicUNet", 4, in_channels=1, out_channels=4, features=(4, 4, 8, 8, 8, 4)),
    "AttentionUnet": monai("AttentionUnet", 4, in_channels=1, out_channels=4, channels=(4, 8), strides=(2,)),
    "SegResNet": monai("SegResNet", 4, in_channels=1, out_channels=4, init_filters=8),
    "DenseNet": monai(
        "DenseNet", in_channels=1, out_channels=CLASSES, init_features=8, growth_rate=4, block_config=(2, 2)
    ),
    "SwinUNETR": monai(
        "SwinUNETR", 4, in_channels=1, out_channels=4, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2)
    ),
    "HighResNet": monai("HighResNet", 4, in_channels=1, out_channels=4),
    "DynUNet": monai(
        "DynUNet",
        4,
        in_channels=1,
        out_channels=4,
        kernel_size=(3, 3, 3),
        strides=(1, 2, 2),
        upsample_kernel_size=(2, 2),
        filters=(4, 8, 8),
    ),
}


def rows() -> list[ZooRow]:
    """Rows of tables, sequences and images of one channel."""
    return [
        *table("rtdl", (COLUMNS,), RTDL),
        *table("transformers", (STEPS, 8), {"PatchTST": patch_tst}),
        *table("mambapy", (STEPS, 8), {"Mamba": mamba}),
        *table("MONAI", (1, SIDE, SIDE), MONAI),
    ]
