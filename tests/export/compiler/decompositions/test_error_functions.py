"""The complementary error function, plain and scaled, is torch's over the whole line, and ends where it does."""

from __future__ import annotations

import torch

from export.compiler.decompositions.special_functions import erfc, erfcx

LINE = torch.cat([torch.linspace(-25, 25, 20_001), torch.logspace(-8, 8, 400), torch.tensor([-4.0, -0.46875, 4.0])])


def test_it_is_torchs() -> None:
    x = LINE.double()
    torch.testing.assert_close(erfcx(x), torch.special.erfcx(x), rtol=2e-15, atol=0)


def test_in_float32_it_keeps_its_digits_as_far_as_numbers_go() -> None:
    x = LINE[LINE > -9]
    torch.testing.assert_close(erfcx(x).double(), torch.special.erfcx(x.double()), rtol=1e-5, atol=0)


def test_where_the_plain_one_is_small_it_keeps_its_digits_so_that_its_logarithm_is_finite() -> None:
    """1 - erf(6) is 0, in float32 from 4 on."""
    for x, rtol in ((LINE.double(), 1e-13), (LINE[LINE < 9], 1e-5)):
        torch.testing.assert_close(erfc(x).double(), torch.special.erfc(x.double()), rtol=rtol, atol=1e-300)


def test_far_out_it_is_infinite_or_nothing() -> None:
    ends = torch.tensor([-torch.inf, -30.0, torch.inf, torch.nan], dtype=torch.float64)
    torch.testing.assert_close(erfcx(ends), torch.special.erfcx(ends), equal_nan=True)
    torch.testing.assert_close(erfc(ends), torch.special.erfc(ends), equal_nan=True)
    assert erfcx(torch.tensor([0, 1, -1])).dtype == torch.float32
