"""Models of sound: torchaudio's networks, and its spectrogram before a classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.zoo.rows import ZooRow, table
from tests.zoo.visions import Logits

SAMPLES, HOP, FRAMES, BANDS, CLASSES = 256, 16, 12, 8, 3


class Transcript(nn.Module):
    """The transcript of a model that also tells lengths."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[0]  # type: ignore[no-any-return]


def network(kind: str, **settings: Any) -> Callable[[], nn.Module]:  # noqa: ANN401 - the library's own
    """A class of torchaudio.models."""

    def make() -> nn.Module:
        from torchaudio import models

        made: nn.Module = getattr(models, kind)(**settings)
        return made

    return make


def mel() -> nn.Module:
    """torchaudio's mel spectrogram in decibels, and a linear classifier."""
    from torchaudio import transforms

    heard = transforms.MelSpectrogram(sample_rate=800, n_fft=32, hop_length=HOP, n_mels=BANDS)
    head = nn.Linear(BANDS * (SAMPLES // HOP + 1), CLASSES)
    return nn.Sequential(nn.Linear(SAMPLES, SAMPLES), heard, transforms.AmplitudeToDB(), nn.Flatten(), head)


def wav2vec2() -> nn.Module:
    """One layer of each part."""
    from torchaudio import models

    return Transcript(
        models.wav2vec2_model(
            extractor_mode="group_norm",
            extractor_conv_layer_config=[(8, 10, 5), (8, 3, 2)],
            extractor_conv_bias=False,
            encoder_embed_dim=16,
            encoder_projection_dropout=0.1,
            encoder_pos_conv_kernel=4,
            encoder_pos_conv_groups=2,
            encoder_num_layers=1,
            encoder_num_heads=2,
            encoder_attention_dropout=0.1,
            encoder_ff_interm_features=24,
            encoder_ff_interm_dropout=0.0,
            encoder_dropout=0.1,
            encoder_layer_norm_first=False,
            encoder_layer_drop=0.0,
            aux_num_out=CLASSES,
        )
    )


def heard(kind: str, **settings: Any) -> Callable[[], nn.Module]:  # noqa: ANN401 - the library's own
    """A class of transformers that classifies sounds, by its name without `Config`."""

    def make() -> nn.Module:
        import transformers

        head = "AudioClassification" if kind == "Whisper" else "SequenceClassification"
        config = getattr(transformers, f"{kind}Config")(num_labels=CLASSES, classifier_proj_size=16, **settings)
        return Logits(getattr(transformers, f"{kind}For{head}")(config))

    return make


WHISPER = heard(
    "Whisper",
    d_model=32,
    encoder_layers=1,
    encoder_attention_heads=2,
    encoder_ffn_dim=48,
    decoder_layers=1,
    decoder_attention_heads=2,
    decoder_ffn_dim=48,
    num_mel_bins=BANDS,
    max_source_positions=16,
)
WAVLM = heard(
    "WavLM",
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=48,
    conv_dim=(8, 8),
    conv_kernel=(10, 3),
    conv_stride=(5, 2),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    layerdrop=0.0,
    apply_spec_augment=False,  # its masks are drawn by numpy
)
TASNET = {
    "enc_kernel_size": 8,
    "enc_num_feats": 8,
    "msk_kernel_size": 3,
    "msk_num_feats": 8,
    "msk_num_hidden_feats": 16,
    "msk_num_layers": 2,
    "msk_num_stacks": 1,
}


def rows() -> list[ZooRow]:
    """Rows of waves, and of frames of bands."""
    return [
        *table("transformers", (SAMPLES,), {"WavLM": WAVLM}),
        *table("transformers", (BANDS, 32), {"Whisper": WHISPER}),
        *table("torchaudio", (SAMPLES,), {"MelSpectrogram": mel, "wav2vec 2.0": wav2vec2}),
        *table("torchaudio", (1, SAMPLES), {"Conv-TasNet": network("ConvTasNet", num_sources=2, **TASNET)}),
        *table(
            "torchaudio",
            (1, FRAMES, BANDS),
            {"Deep Speech": network("DeepSpeech", n_feature=BANDS, n_hidden=16, n_class=CLASSES)},
        ),
    ]
