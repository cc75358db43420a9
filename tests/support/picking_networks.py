"""Networks that pick and place values by number or by grid, measure norms or angles, round, write in place, or hear."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F  # noqa: N812 - torch's custom

from coordinator.models.registry import ModelEntry


class Normed(nn.Module):
    """A layer with weight norm, vectors of length 1, and their cosine with three directions; half of the rows are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.utils.parametrizations.weight_norm(nn.Linear(5, 6, bias=False))
        self.ways = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        near = F.cosine_similarity(h.unsqueeze(1), self.ways.unsqueeze(0), -1)
        return near + F.normalize(h, dim=-1)[:, :3] + torch.cdist(h, self.ways)


class Rotary(nn.Module):
    """Token types by gather, rotary positions on every other feature, a rolled window, the last token classified."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.kinds = nn.Embedding(11, 8), nn.Embedding(2, 8)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("kind", torch.tensor([[0, 1, 0, 1, 1, 0, 0, 1]]))
        self.register_buffer("bias", torch.randn(6, 6))
        self.register_buffer("apart", (torch.arange(6) - torch.arange(6).unsqueeze(1)).abs())

    def forward(self, x: Tensor) -> Tensor:
        x = x.long()
        spot = torch.cumsum((x != 0).int(), 1)
        kinds = self.kind.expand(x.shape[0], -1).gather(1, spot)  # type: ignore[operator]
        h = torch.roll(self.tokens(x) + self.kinds(kinds), 1, 1)
        angle = torch.arange(6).unsqueeze(1) / 10 ** torch.arange(0, 2, 0.5)
        even, odd = h[..., ::2], h[..., 1::2]
        turned = [even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()]
        h = torch.stack(turned, -1).flatten(2)
        near = (h @ h.transpose(1, 2) + self.bias[0][self.apart]).softmax(-1)  # type: ignore[index]
        last = (x != 0).sum(1) - 1
        return self.head(torch.tanh(self.mix(near @ h))[torch.arange(x.shape[0]), last])  # type: ignore[no-any-return]


class Ordered(nn.Module):
    """The largest values, where they are, sorted ones, windows, and the parts behind the point.

    The last layer's weights are divided by the largest, as where weights are rounded to steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        best, at = h.topk(3)
        windows = h.unfold(1, 2, 2)
        parts = [best, windows.max(-1).values, torch.remainder(h, 0.7)[:, :1]]
        h = torch.cat(parts, 1) + h.floor() * F.one_hot(at[:, 0], 8)
        step = self.head.weight.abs().max() + self.head.bias.min()
        return F.linear(h + torch.fmod(h.sort().values, 0.3), self.head.weight / step, self.head.bias)


class Volumes(nn.Module):
    """Pools and padding of three dimensions; a pooled ReLU that is written into; local responses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv3d(1, 2, 3, padding=1, padding_mode="replicate"), nn.Linear(16, 3)
        self.local = nn.LocalResponseNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool3d(self.body(x), 2)
        h = F.avg_pool3d(F.pad(h, (1, 0, 0, 1, 1, 1), mode="circular"), (3, 2, 2), 1)
        h = F.max_pool2d(torch.relu(self.local(h.flatten(2, 3))), (1, 1))
        h += 1
        return self.head(h.flatten(1))  # type: ignore[no-any-return]


class Written(nn.Module):
    """Activations that write into views: behind a layer norm of an image's channels, and into a part of a sum.

    Windows of a mask are numbers, as in torchvision's Swin.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.body(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        h = F.silu(h, inplace=True)
        part = torch.cat([h, 2 * h], 1)[:, 1:5]
        part += 0.1
        mask = x.new_zeros(part.shape[2:])
        mask[:2, 1:], mask[2:, :1] = 1, 2
        return self.head((F.hardswish(part, inplace=True) * mask).mean((2, 3)))  # type: ignore[no-any-return]


class Asking(nn.Module):
    """Attention with a mask that is left out where it hides nothing, unless the model is traced.

    Text libraries look for torch's fake tensors. Tokens of 0 are hidden; positions are a buffer of whole numbers; waves
    are a plain tensor, no buffer; the tokens of a cache come first, of which there are none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(11, 8), nn.Embedding(11, 8), nn.Linear(8, 3)
        self.register_buffer("at", torch.arange(6).unsqueeze(0), persistent=False)
        self.waves = torch.sin(torch.arange(48.0)).reshape(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        seen = x.long() != 0
        h = self.tokens(x.long()) + self.positions(self.at)
        h = h + self.waves.to(h.device, dtype=h.dtype)
        hides = isinstance(x, FakeTensor) or not bool(seen.all())
        own = torch.eye(6, dtype=torch.bool)
        mask = (seen.unsqueeze(1) | own) & torch.ones(6, 6, dtype=torch.bool).tril()
        keys = torch.cat([torch.tensor([]), h], 1)
        causal = {"attn_mask": mask} if hides else {"is_causal": True}
        return self.head(F.scaled_dot_product_attention(h, keys, h, **causal).mean(1))  # type: ignore[no-any-return]


class Scattered(nn.Module):
    """A graph's messages: sums, means and largest values of edges at their ends, which the sample names itself.

    Then rows that are written in place, a learned value where a mask says so, a diagonal, ranks, shares and thresholds.
    """

    bounds: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.token = nn.Linear(8, 10), nn.Linear(12, 3), nn.Parameter(torch.randn(2))
        self.register_buffer("bounds", torch.linspace(-1, 1, 5), persistent=False)  # rising in every draw

    def forward(self, x: Tensor) -> Tensor:
        edges, rows = self.body(x), torch.arange(x.shape[0]).unsqueeze(1)
        at = (x.abs() * 2).long().clamp(max=3)[:, :5]
        ends, zeros = at.repeat(1, 2), torch.zeros_like(edges[:, :4])
        summed = zeros.index_put((rows, ends), edges, accumulate=True)
        mean = zeros.scatter_reduce(1, ends, edges, "mean", include_self=False)
        largest = zeros.scatter_reduce(1, ends, edges, "amax", include_self=False)
        h = torch.stack([summed, mean + 0.1 * largest], -1)  # [batch, 4 nodes, 2]
        h[summed > 1] = self.token
        h[:, 0] = h[:, 1] * 2
        h[:, :, 1] += edges[:, :4]
        near = torch.diagonal(h @ h.transpose(1, 2), dim1=1, dim2=2)
        over = torch.bucketize(edges[:, :4].contiguous(), self.bounds).to(x.dtype)
        middle = edges.median(1, keepdim=True).values + edges.kthvalue(3, 1, keepdim=True).values
        middle = middle + edges.quantile(0.3, 1, keepdim=True)
        return self.head(torch.cat([h.flatten(1), torch.log10(near.abs() + 1) + 0.1 * over - middle], 1))  # type: ignore[no-any-return]


class Warped(nn.Module):
    """A spatial transformer: an image sampled where the network says, beyond its edges too."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.body, self.head = nn.Linear(64, 6), nn.Conv2d(1, 2, 3, padding=1), nn.Linear(75, 3)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.place(x.flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, [x.shape[0], 2, 5, 5], align_corners=False)
        h = self.body(x)
        ways = [
            F.grid_sample(h, grid, align_corners=False),
            F.grid_sample(h[:, :1], grid, padding_mode="border", align_corners=True),
        ]
        return self.head(torch.cat(ways, 1).flatten(1))  # type: ignore[no-any-return]


class HeardWave(nn.Module):
    """A mel spectrogram in decibels, as torchaudio writes it, beside a masked spectrogram made sound again."""

    window: Tensor
    bands: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gain, self.head = nn.Linear(24, 24), nn.Parameter(torch.rand(5, 7)), nn.Linear(28, 3)
        self.register_buffer("window", torch.hann_window(8), persistent=False)
        self.register_buffer("bands", torch.rand(5, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        wave = self.body(x)
        frames = torch.stft(input=wave, n_fft=8, hop_length=4, window=self.window, return_complex=True)
        power = frames.abs().pow(2.0)
        mel = torch.matmul(power.transpose(-1, -2), self.bands).transpose(-1, -2)
        decibels = 10.0 * torch.log10(torch.clamp(mel, min=1e-10))
        cleaned = torch.istft(frames * self.gain, 8, hop_length=4, window=self.window, length=24)
        return self.head(torch.cat([cleaned, decibels.mean(-1)], 1))  # type: ignore[no-any-return]


class Angled(nn.Module):
    """Angles to class centers with a margin, as a face recogniser has them, and the angles of points and slopes.

    Distances of a hyperbolic space, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.ways = nn.Linear(5, 6), nn.Linear(15, 3), nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        cosines = F.normalize(h, dim=1) @ F.normalize(self.ways, dim=1).t()
        apart = torch.cos(torch.acos(cosines * 0.99) + 0.3)
        turned = torch.atan2(h[:, :3], h[:, 3:])
        bounded = torch.tanh(h[:, 3:])
        far = [torch.asinh(h[:, :3]) * torch.acosh(1.1 + h[:, 3:].square()), torch.atanh(0.9 * bounded)]
        parts = [turned, torch.atan(h[:, :3]), torch.asin(bounded), *far]
        return 4 * apart + self.head(torch.cat(parts, 1))  # type: ignore[no-any-return]


class Cumulated(nn.Module):
    """Products and extremes along an axis, some factors 0; lengths, signs and the larger of two."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(30, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        factors = torch.cat([h[:, :3], torch.relu(h[:, 3:])], 1)
        one, other = h.roll(1, 1), x[:, :1].expand(-1, 6)
        signs = torch.copysign(h, other) + torch.fmax(h, one) * ((h > 0) ^ torch.logical_xor(other > 0, one > 0))
        parts = [factors.cumprod(1), factors.prod(1, keepdim=True) + torch.hypot(h, one), h.logcumsumexp(1)]
        finite = torch.where(torch.isinf(one / factors.sign()), torch.exp2(h), h * torch.signbit(one))
        ranks = torch.searchsorted(one.sort(1).values, h.contiguous(), right=True)
        parts += [
            h.cummax(1).values + h.cummin(1)[0] * torch.erfc(one) + finite,
            signs + torch.fmin(one, other) * ranks,
        ]
        return self.head(torch.cat(parts, 1))  # type: ignore[no-any-return]


class Evidence(nn.Module):
    """Shares with a Dirichlet's normaliser and entropy, as evidential classifiers have them: gammas of any number."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        evidence = F.softplus(h) + 0.1
        total = evidence.sum(1, keepdim=True)
        normaliser = torch.lgamma(total) - torch.lgamma(evidence).sum(1, keepdim=True)
        sure = torch.digamma(evidence) - torch.digamma(total)
        below = torch.lgamma(-0.5 - 0.4 * torch.sigmoid(h)) + torch.mvlgamma(evidence * 20 + 1, 2)
        return self.head(torch.cat([normaliser, sure, 0.1 * below], 1))  # type: ignore[no-any-return]


class Viewed(nn.Module):
    """Repeats, sorts, picks and places along other axes than the last, each with `view` behind it.

    Torch's results are one row after another in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.table, self.head = nn.Linear(5, 8), nn.Parameter(torch.randn(8, 2)), nn.Linear(44, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, h = x.shape[0], self.body(x).view(-1, 2, 4)
        first = torch.zeros(h.shape, dtype=torch.long)
        parts = [
            self.table.t().repeat(n, 1, 1),
            h.sort(1).values,
            h.topk(1, 1).values,
            h.gather(1, first),
            torch.zeros_like(h).scatter(1, first, h),
        ]
        return self.head(torch.cat([part.view(n, -1) for part in parts], 1))  # type: ignore[no-any-return]


ENTRIES = {
    "viewed": ModelEntry(make=Viewed, input=(5,), classes=3),
    "evidence": ModelEntry(make=Evidence, input=(5,), classes=3),
    "cumulated": ModelEntry(make=Cumulated, input=(5,), classes=3),
    "angled": ModelEntry(make=Angled, input=(5,), classes=3),
    "asking": ModelEntry(make=Asking, input=(6,), classes=3),
    "normed": ModelEntry(make=Normed, input=(5,), classes=3),
    "rotary": ModelEntry(make=Rotary, input=(6,), classes=3),
    "ordered": ModelEntry(make=Ordered, input=(5,), classes=3),
    "written": ModelEntry(make=Written, input=(1, 4, 4), classes=3),
    "warped": ModelEntry(make=Warped, input=(1, 8, 8), classes=3),
    "volumes": ModelEntry(make=Volumes, input=(1, 4, 4, 4), classes=3),
    "scattered": ModelEntry(make=Scattered, input=(8,), classes=3),
    "heard": ModelEntry(make=HeardWave, input=(24,), classes=3),
}
