"""The torch networks of the papers and of the demo. Comments give the shape of one sample after each line."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's custom


def digits_mlp() -> nn.Module:
    """8x8 handwritten digits, pixels already divided by 16; 4,810 parameters."""
    return nn.Sequential(
        nn.Flatten(),  # 64
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def mnist_mlp() -> nn.Module:
    """The MNIST network of IFCA (Ghosh et al. 2020), 28x28; 159,010 parameters."""
    return nn.Sequential(
        nn.Flatten(),  # 784
        nn.Linear(784, 200),
        nn.ReLU(),
        nn.Linear(200, 10),
    )


def wisdm_mlp() -> nn.Module:
    """43 features of a phone's movements to six activities, of WISDM (Kwapisz et al. 2010); 3,206 parameters."""
    return nn.Sequential(
        nn.Linear(43, 64),
        nn.ReLU(),
        nn.Linear(64, 6),
    )


def linear_regression() -> nn.Module:
    """FedSoft's synthetic regression (Ruan and Joe-Wong 2022): 10 features to one number, 10 weights, no bias."""
    return nn.Linear(10, 1, bias=False)


def wecfl_cnn() -> nn.Module:
    """The Fashion-MNIST network of WeCFL (Ma et al. 2022), 28x28; 29,034 parameters. Its second BN16 is a misprint."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),  # 16, 28, 28
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),  # 16, 14, 14
        nn.Conv2d(16, 32, 5, padding=2),  # 32, 14, 14
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),  # 32, 7, 7
        nn.Flatten(),  # 1568
        nn.Linear(1568, 10),
    )


def cifar_lenet() -> nn.Module:
    """The CIFAR-10 network of WeCFL (Ma et al. 2022), 32x32 in colour; 62,006 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),  # 6, 28, 28
        nn.ReLU(),
        nn.MaxPool2d(2),  # 6, 14, 14
        nn.Conv2d(6, 16, 5),  # 16, 10, 10
        nn.ReLU(),
        nn.MaxPool2d(2),  # 16, 5, 5
        nn.Flatten(),  # 400
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def femnist_cnn() -> nn.Module:
    """The FEMNIST network of LEAF (Caldas et al. 2018), which FeSEM uses, 28x28; 6,603,710 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),  # 32, 28, 28
        nn.ReLU(),
        nn.MaxPool2d(2),  # 32, 14, 14
        nn.Conv2d(32, 64, 5, padding=2),  # 64, 14, 14
        nn.ReLU(),
        nn.MaxPool2d(2),  # 64, 7, 7
        nn.Flatten(),  # 3136
        nn.Linear(3136, 2048),
        nn.ReLU(),
        nn.Linear(2048, 62),
    )


class _EvenSides(nn.Module):
    """Pads odd sizes by one row or column of -inf, as TensorFlow's "same" max pools do."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, x.shape[-1] % 2, 0, x.shape[-2] % 2), value=float("-inf"))


def celeba_cnn() -> nn.Module:
    """The CelebA network of LEAF, which FeSEM uses, 84x84 in colour; 31,202 parameters.

    LEAF normalises by the batch even when it predicts, so that a prediction depends on the other samples of its batch;
    here batch norm keeps running statistics, as in the other models.
    """
    blocks: list[nn.Module] = []
    for channels in (3, 32, 32, 32):  # 84 -> 42 -> 21 -> 11 -> 6
        blocks += [nn.Conv2d(channels, 32, 3, padding=1), nn.BatchNorm2d(32), _EvenSides(), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * 6 * 6, 2))


def letters_cnn() -> nn.Module:
    """FedSoft's network for EMNIST letters, 28x28; 1,671,578 parameters; no ReLU between the layers, as published.

    The published head puts ReLU and softmax before a loss that applies softmax again, and can lose whole
    classes; this one ends in logits.
    """
    network = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),  # 32, 28, 28
        nn.MaxPool2d(2),  # 32, 14, 14
        nn.Conv2d(32, 64, 5, padding=2),  # 64, 14, 14
        nn.MaxPool2d(2),  # 64, 7, 7
        nn.Flatten(),  # 3136
        nn.Linear(3136, 512),
        nn.Linear(512, 26),
    )
    for layer in network:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_uniform_(layer.weight)
        elif isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
    return network


class GnCnn(nn.Module):
    """28x28 without running statistics: strided convolutions, group norm, GELU, a residual, average pooling, SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.norm1 = nn.GroupNorm(2, 8)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.norm2 = nn.GroupNorm(2, 8)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.head = nn.Linear(16 * 3 * 3, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(self.stem(x)))  # 8, 14, 14
        x = x + F.gelu(self.norm2(self.body(x)))  # 8, 14, 14
        x = F.silu(self.down(x))  # 16, 7, 7
        x = F.avg_pool2d(x, 2)  # 16, 3, 3
        return self.head(x.flatten(1))  # type: ignore[no-any-return]
