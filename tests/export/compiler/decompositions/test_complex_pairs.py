"""Complex arithmetic as pairs of real tensors: torch's own values, also where a constant of the model is complex."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's custom

from export.compiler.decompositions.complex_pairs import ComplexPair
from export.compiler.decompositions.supported_ops import UnsupportedOperator
from export.compiler.forward_overrides import ForwardOverrides
from export.compiler.forward_pass import ForwardPasses
from export.compiler.program import make_source
from export.compiler.program_functions import example_inputs, function_ports
from export.compiler.program_parity import output_differences, torch_outputs
from export.compiler.tracing import trace_function

EXACT = 1e-10  # float64
RNG = torch.Generator().manual_seed(0)
X = torch.randn(4, 6, generator=RNG, dtype=torch.float64)
TURNS = torch.polar(torch.ones(4, 6), torch.arange(24.0).reshape(4, 6)).to(torch.complex128)
RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "constant left": lambda z: TURNS * z,
    "constant right": lambda z: z * TURNS,
    "part of a constant": lambda z: z * TURNS[1:3].reshape(2, 1, 6)[0],
    "sum and difference": lambda z: (TURNS + z) - (TURNS.conj() - z) + 2,
    "quotients": lambda z: TURNS / (z + 3) + z / TURNS + z / 2.0,
    "matrices": lambda z: torch.matmul(z, TURNS.mT) + z @ X.mT.to(torch.complex128),
    "einsum": lambda z: torch.einsum("ij,kj->ik", z, TURNS),
    "joined": lambda z: torch.cat([z, TURNS, torch.stack([z, z])[0]], 1),
    "angle": lambda z: torch.polar(z.abs(), z.angle() + torch.angle(z + TURNS)),
    "sums so far": lambda z: z.cumsum(1) + torch.cumsum(z, 0),
    "facts": lambda z: z @ z.mT + torch.zeros(4, 4, dtype=z.dtype, device=z.device) if z.is_complex() else z,
    "asked as a function": lambda z: 2 * z if torch.is_complex(z) and torch.is_complex(TURNS) else z,
    "to its own dtype": lambda z: z.to(z.dtype) + z.to(dtype=z.dtype) * z.type(z.dtype),
    "exponential": lambda z: torch.exp(z) * 1j,
    "adjoint": lambda z: z.mH * abs(z).mT,
    "turned": lambda z: z @ TURNS.T + TURNS @ z.H.conj() + z.T[0, 0],
    "powers": lambda z: z**3 + z**-2 + torch.pow(z, 0) + z.pow(0.5) + TURNS**2 - torch.log(z) * len(z),
    "a power for each": lambda z: (
        (z * (z.real > 0)).unsqueeze(-1) ** torch.arange(1, 4) + z.unsqueeze(-1) ** TURNS[0, :3]
    ),
    "compared": lambda z: torch.where(z * (z.real > 0) == 0, TURNS, z) * (z != TURNS) + z.masked_fill(z.real < 1, 1j),
    "cut": lambda z: torch.cat(z.chunk(2, 1)[::-1], 1) * sum(z.unbind()) + sum(torch.split(z, 1, -1)),
    "padded": lambda z: F.pad(z, (1, 2)) + F.pad(z, (3, 0), value=2.5),
    "picked": lambda z: z.index_select(1, torch.tensor([2, 0])).resolve_conj() + z.triu().diff(dim=1)[:, 1:3],
    "parts of several shapes": lambda z: (
        torch.complex(z.real[:, :1], z.imag[0]).sum(1, keepdim=True) + torch.complex(z.real, z.imag[:1])
    ),
    "a real tensor or a smaller complex one": lambda z: torch.view_as_complex(
        torch.view_as_real(torch.where(z.real[:1] > 0, z.imag, z[:1]))
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_arithmetic_is_torchs(name: str) -> None:
    rule, rotated = RULES[name], torch.complex(X, X.flip(1))
    with ForwardOverrides():
        found = rule(torch.view_as_complex(torch.stack([X, X.flip(1)], -1)))
    assert isinstance(found, ComplexPair)
    torch.testing.assert_close(torch.complex(found.real, found.imag), rule(rotated))


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, 3, 7.0])
def test_a_whole_power_of_zero_and_its_gradient_are_torchs(power: float) -> None:
    given = torch.tensor([[0.0, 0.0], [0.0, -2.0], [1.5, 0.5]], dtype=torch.float64, requires_grad=True)

    def with_gradient() -> list[Tensor]:
        z = torch.view_as_complex(given)
        out = torch.view_as_real(z + z**power)
        return [out, *torch.autograd.grad(out.sum(), given)]

    with ForwardOverrides():
        found = with_gradient()
    for a, b in zip(found, with_gradient(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_complex_power_of_a_real_number_is_refused_by_its_name() -> None:
    with ForwardOverrides(), pytest.raises(UnsupportedOperator, match="complex power of a real number"):
        2.0 ** torch.view_as_complex(torch.ones(3, 2))


class ByAngles(nn.Module):
    """What a layer gives is an angle, turned by a constant of the module, and mixed by weights as a complex matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight, self.head = nn.Linear(6, 6), nn.Parameter(torch.randn(4, 6, 2)), nn.Linear(8, 3)
        self.turns = torch.polar(torch.ones(6), torch.arange(6.0)).to(torch.complex128)
        self.table = torch.polar(torch.ones(6, 6), torch.arange(36.0).reshape(6, 6)).to(torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.exp(1j * self.body(x)) * torch.cat(self.turns.chunk(2)[::-1])
        z = z @ (self.turns.unsqueeze(1) * self.turns.conj()).triu().T + z @ self.table.T
        mixed = torch.einsum("bi,oi->bo", z, torch.view_as_complex(self.weight))
        return self.head(torch.view_as_real(mixed).flatten(1))  # type: ignore[no-any-return]


class FourierLayer(nn.Module):
    """A Fourier neural operator's layer as its authors write it: some modes are mixed, the others are zero."""

    def __init__(self, width: torch.dtype) -> None:
        super().__init__()
        self.width, self.weight, self.head = width, nn.Parameter(torch.randn(2, 3, 3, 2)), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x)
        out = torch.zeros(x.shape[0], 3, x.size(-1) // 2 + 1, device=x.device, dtype=self.width)
        out[:, :, :3] = torch.einsum("bix,iox->box", modes[:, :, :3], torch.view_as_complex(self.weight))
        out = out + torch.zeros_like(out)
        return self.head(torch.fft.irfft(out, n=x.size(-1)).flatten(1)[:, :12])  # type: ignore[no-any-return]


class StateSpace(nn.Module):
    """S4D's convolution: a kernel from complex poles, by their powers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(2, 4, 2)), nn.Linear(2, 3)
        self.decay, self.turn = nn.Parameter(torch.rand(2, 4) - 1), nn.Parameter(torch.arange(4.0).repeat(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        poles = (-torch.exp(self.decay) + 1j * self.turn) * 0.1
        powers = torch.exp(poles.unsqueeze(-1) * torch.arange(x.shape[-1], device=poles.device))
        scale = torch.view_as_complex(self.weight) * (torch.exp(poles) - 1.0) / poles
        kernel = 2 * torch.einsum("hn, hnl -> hl", scale, powers).real
        modes = torch.fft.rfft(x, n=2 * x.shape[-1]) * torch.fft.rfft(kernel, n=2 * x.shape[-1])
        return self.head(torch.fft.irfft(modes, n=2 * x.shape[-1])[..., : x.shape[-1]].mean(-1))  # type: ignore[no-any-return]


class Shifted(nn.Module):
    """A real tensor of a batch beside the complex numbers of one sample, on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.complex(self.body.bias, self.body.bias * 2)
        real = self.body(x)
        return torch.view_as_real((one + real) * (real - one) + (one - real)).flatten(1)


class ByRotations(nn.Module):
    """Rotary positions as in Llama's reference code: the rotations are a complex buffer, or a frozen parameter."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        turns = torch.polar(torch.ones(9, 3), torch.arange(27.0).reshape(9, 3))
        if buffer:
            self.register_buffer("turns", turns, persistent=False)
        else:
            self.turns = nn.Parameter(turns, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        turns = self.turns[: x.shape[1]].view(1, x.shape[1], 3)
        rotated = torch.view_as_complex(self.body(x).reshape(*x.shape[:-1], -1, 2)) * turns
        return self.head(torch.view_as_real(rotated).flatten(2)).mean(1)  # type: ignore[no-any-return]


class PolePowers(nn.Module):
    """A linear recurrent unit: powers of its poles, and the states that they give."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.turn = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
        self.into, self.head = nn.Parameter(torch.randn(4, 2, 2)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        poles = torch.polar(torch.sigmoid(self.size), self.turn)
        weight = torch.view_as_complex(self.into) * (1 - poles.abs() ** 2).sqrt().unsqueeze(-1)
        powers = poles.unsqueeze(-1) ** torch.arange(8).flip(0)
        states = torch.einsum("bcl,nl->bnc", x.to(powers.dtype), powers) * weight
        return self.head(states.sum(-1).real + (poles**2).imag)  # type: ignore[no-any-return]


class Phases(nn.Module):
    """The angles of a spectrum, whose first and last values have no imaginary part."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8, bias=False), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.rfft(self.body(x)).angle())  # type: ignore[no-any-return]


def test_the_angles_of_a_spectrum_and_of_silence_and_their_gradients_are_torchs() -> None:
    source = make_source(Phases(), input=(8,), loss="squared-error", dtype="float64")
    graph = trace_function(ForwardPasses(source), "step", batch=4, dynamic=True, closed=True)
    given = example_inputs(source, "step", 40)
    given[[p.name for p in function_ports(source, "step").inputs].index("x")][:20] = 0
    found = [t.detach().numpy() for t in graph(*given)]
    assert max(output_differences(found, torch_outputs(source, "step", given))) < EXACT


@pytest.mark.parametrize(
    ("module", "size"),
    [
        (ByAngles(), (6,)),
        (FourierLayer(torch.cdouble), (2, 8)),
        (FourierLayer(torch.cfloat), (2, 8)),
        (StateSpace(), (2, 8)),
        (PolePowers(), (2, 8)),
        (Shifted(), (6,)),
        (ByRotations(buffer=True), (4, 6)),
        (ByRotations(buffer=False), (4, 6)),
    ],
    ids=[
        "computed",
        "modes",
        "modes in torch's usual width",
        "poles",
        "powers of poles",
        "beside real ones",
        "buffer",
        "frozen parameter",
    ],
)
def test_a_step_through_complex_numbers_is_torchs(module: nn.Module, size: tuple[int, ...]) -> None:
    source = make_source(module, input=size, loss="squared-error", dtype="float64")
    graph = trace_function(ForwardPasses(source), "step", batch=4, dynamic=True, closed=True)
    given = example_inputs(source, "step", 5)
    found = [t.detach().numpy() for t in graph(*given)]
    assert max(output_differences(found, torch_outputs(source, "step", given))) < EXACT
