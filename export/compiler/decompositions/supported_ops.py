"""The core operators that a training program may hold: those that ONNX, LiteRT and .pt2 files all express.

Names are torch's, without overload ("aten.mul"). A model that needs another operator is refused by the compiler. To add
an operator, add its name here and a model that uses it to the conformance tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Counts = Callable[[str, Sequence[Any]], bool]  # of an operator and its arguments: whether a call is meant


def every_call(_operator: str, _args: Sequence[Any]) -> bool:
    """Whatever it computes."""
    return True


class UnsupportedOperator(Exception):
    """An operator in a form that no decomposition covers; `operator` and `reason` go into the error message.

    `counts`: which of its calls have this form.
    """

    def __init__(self, operator: str, reason: str, counts: Counts = every_call) -> None:
        super().__init__(f"{operator}: {reason}")
        self.operator, self.reason, self.counts = operator, reason, counts


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in text.split())


# They draw while the graph runs; a traced graph would repeat one draw in every step, or differ between runtimes.
RANDOM = _names("""
    _sample_dirichlet _standard_gamma alpha_dropout bernoulli bernoulli_ binomial cauchy_ dropout exponential
    exponential_ feature_dropout geometric_ log_normal_ multinomial native_dropout normal normal_ normal_functional
    poisson rand rand_like randint randint_like randn randn_like random_ randperm rrelu_with_noise rrelu_with_noise_
    uniform uniform_
""")

ELEMENTWISE = _names("""
    _to_copy abs add bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min cos div elu eq erf exp floor ge
    gelu gt hardtanh le leaky_relu log log1p logical_and logical_not logical_or lt maximum minimum mul ne neg pow
    reciprocal relu round rsqrt rsub sigmoid sign sin sqrt sub tanh where
""")
REDUCTIONS = _names("_log_softmax _softmax amax amin mean sum")
PRODUCTS = _names("addmm bmm convolution embedding mm")
POOLS = _names("avg_pool2d max_pool2d_with_indices")
SHAPES = _names("""
    _unsafe_view alias cat clone constant_pad_nd expand flip index_select permute select slice squeeze stack
    sym_numel sym_size unsqueeze view
""")
CONSTANTS = _names(
    "arange full full_like lift_fresh_copy new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like"
)

# What torch itself does in one pass: a .pt2 file's step keeps it, other files have formulas in its place.
TORCH_ALONE = _names("""
    _native_batch_norm_legit_functional addcmul avg_pool2d_backward convolution_backward
    max_pool2d_with_indices_backward
    native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward
""")

SUPPORTED = ELEMENTWISE | REDUCTIONS | PRODUCTS | POOLS | SHAPES | CONSTANTS
