"""The bases of `make adapters`, the samples that train them, and the fleets that adapt them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedcenters as fc

DEVICES = 12
POSITIONS, RANK = 48, 4
Samples = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


class BodyOfLogits(nn.Module):
    """A model of transformers as devices train it: samples arrive as floats, and logits leave."""

    def __init__(self, body: nn.Module, *, text: bool) -> None:
        super().__init__()
        self.body, self.text = body, text

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x.long() if self.text else x).logits
        return logits


@dataclass(frozen=True, kw_only=True)
class AdaptedFleet:
    """A base, its own samples, and the fleet that adapts it."""

    title: str
    text: bool
    clusters: int
    base_steps: int
    rounds: int
    make: Callable[[], nn.Module]
    read: Callable[[Path], tuple[Samples, fc.Fleet]]


def llama() -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(vocab_size=65, max_position_embeddings=POSITIONS, **sizes, **heads)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def vit() -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128}
    image: dict[str, Any] = {"image_size": 28, "patch_size": 7, "num_channels": 1, "num_labels": 10}
    config = transformers.ViTConfig(**image, **sizes, num_attention_heads=4)
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


def shakespeare(folder: Path) -> tuple[Samples, fc.Fleet]:
    """The twelve largest parts are devices, 80 % of each to train; the others' speeches are the base's."""
    text = (folder / "shakespeare" / "tinyshakespeare.txt").read_text(encoding="ascii")
    numbers = {c: i for i, c in enumerate(sorted(set(text)))}
    said: dict[str, str] = {}
    for block in text.strip().split("\n\n"):
        who, found, speech = block.partition(":\n")
        if found:
            said[who] = said.get(who, "") + speech + "\n\n"
    ranked = sorted(said, key=lambda who: -len(said[who]))

    def windows(speeches: str) -> Samples:
        tokens = np.array([numbers[c] for c in speeches])
        rows = [tokens[a:b] for a, b in pairwise(range(0, len(tokens), POSITIONS + 1))]
        return np.array(rows)[:, :-1].astype(np.float32), np.array(rows)[:, 1:]

    parts = {who.lower().replace(" ", "-"): windows(said[who]) for who in ranked[:DEVICES]}
    return windows("".join(said[who] for who in ranked[DEVICES:])), fc.fleet(parts, name="shakespeare")


def turned_images(folder: Path) -> tuple[Samples, fc.Fleet]:
    """Twelve devices with 200 images each, in four groups that turn theirs by quarters."""
    os.environ["FEDCENTERS_DATA"] = str(folder)
    whole = fc.fleets.fashion_mnist(devices=1, partition="iid", seed=0)
    train = next(iter(whole.cut().devices.values())).train
    x, y = np.asarray(train.x), np.asarray(train.y)
    turns = fc.partitions.Rotations(4)
    return (x[:20_000], y[:20_000]), fc.fleet(
        (x[20_000:22_400], y[20_000:22_400]), partition=turns, devices=DEVICES, test=0.5, name="fashion-mnist"
    )


CASES = (
    AdaptedFleet(
        title="Shakespeare by part, a Llama", text=True, clusters=3, base_steps=3_000, rounds=5, make=llama,
        read=shakespeare,
    ),
    AdaptedFleet(
        title="Fashion-MNIST in four turns, a ViT", text=False, clusters=4, base_steps=1_500, rounds=10, make=vit,
        read=turned_images,
    ),
)  # fmt: skip


def train_base(case: AdaptedFleet, samples: Samples) -> nn.Module:
    """Adam from random weights with a cosine of rates."""
    torch.manual_seed(0)
    model, rng = BodyOfLogits(case.make(), text=case.text), np.random.default_rng(0)
    rule = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(rule, case.base_steps)
    x, y = (torch.from_numpy(np.asarray(part)) for part in samples)
    for _ in range(case.base_steps):
        rows = torch.from_numpy(rng.choice(len(x), 64, replace=False))
        logits = model(x[rows])
        loss = cross_entropy(logits.flatten(0, -2), y[rows].long().flatten())
        rule.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        rule.step()
        schedule.step()
    return model.body


def model_of(case: AdaptedFleet, base: Mapping[str, Tensor], *, adapted: bool) -> nn.Module:
    """The base, or the base frozen under LoRA, whose first factors the run's seed draws."""
    import peft

    body = case.make()
    body.load_state_dict(base)
    if adapted:
        settings = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "v_proj"])
        body = peft.get_peft_model(body, settings)
    return BodyOfLogits(body, text=case.text)
