"""Attention with dropout: torch's own step, also for a query that no key is left for, as in a sample of padding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from export.compiler.forward_pass import ForwardPasses
from export.compiler.program import make_source
from export.compiler.program_functions import example_inputs, function_ports
from export.compiler.program_parity import output_differences, torch_outputs
from export.compiler.tracing import trace_function

EXACT = 1e-12  # float64


class WithoutPadding(nn.Module):
    """Attention over those of three tokens whose first number is not negative, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.body(x).chunk(3, -1)
        kept = (x[..., 0] >= 0).unsqueeze(1).expand(-1, 3, 3)
        rate = 0.3 if self.training else 0.0
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=kept, dropout_p=rate)
        return self.head(out.flatten(1))  # type: ignore[no-any-return]


def test_a_query_without_keys_gets_zeros() -> None:
    source = make_source(WithoutPadding(), input=(3, 4), loss="squared-error", dtype="float64")
    given = example_inputs(source, "step", 5)
    given[[port.name for port in function_ports(source, "step").inputs].index("x")][0, :, 0] = -1
    expected = torch_outputs(source, "step", given)
    graph = trace_function(ForwardPasses(source), "step", batch=4, dynamic=True, closed=True)
    assert max(output_differences([t.detach().numpy() for t in graph(*given)], expected)) < EXACT


class CausalMask(nn.Module):
    """Attention with a mask of booleans that is a plain attribute, which `masked_fill_` makes numbers of."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(12, 3)
        self.mask = torch.ones(3, 3, dtype=torch.bool).triu(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, attn_mask=self.mask)[0].flatten(1))  # type: ignore[no-any-return]


def test_a_mask_of_booleans_may_be_a_plain_attribute() -> None:
    """It was refused: "some layer of CausalMask uses aten.copy_"."""
    source = make_source(CausalMask(), input=(3, 4), loss="squared-error", dtype="float64")
    given = example_inputs(source, "step", 5)
    graph = trace_function(ForwardPasses(source), "step", batch=4, dynamic=True, closed=True)
    found = [t.detach().numpy() for t in graph(*given)]
    assert max(output_differences(found, torch_outputs(source, "step", given))) < EXACT


class Translator(nn.Module):
    """Torch's own encoder and decoder; each asks of its mask, by the values, whether it is a causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True), nn.Linear(12, 3)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x, x.flip(1), src_mask=self.mask, tgt_mask=self.mask.clone())  # type: ignore[operator]
        return self.head(out.flatten(1))  # type: ignore[no-any-return]


def test_a_causal_mask_needs_no_word_that_it_is_one() -> None:
    source = make_source(Translator(), input=(3, 4), loss="squared-error", dtype="float64")
    given = example_inputs(source, "step", 5)
    graph = trace_function(ForwardPasses(source), "step", batch=4, dynamic=True, closed=True)
    found = [t.detach().numpy() for t in graph(*given)]
    assert max(output_differences(found, torch_outputs(source, "step", given))) < EXACT
