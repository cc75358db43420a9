"""Small networks for small devices. Comments give the shape of one sample after each line."""

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
        """[batch, 1, 28, 28] -> [batch, 10]."""
        x = F.gelu(self.norm1(self.stem(x)))  # 8, 14, 14
        x = x + F.gelu(self.norm2(self.body(x)))  # 8, 14, 14
        x = F.silu(self.down(x))  # 16, 7, 7
        x = F.avg_pool2d(x, 2)  # 16, 3, 3
        return self.head(x.flatten(1))  # type: ignore[no-any-return]
