"""What operations of torch compute for one element, written in C: one table for programs in C and in CUDA C.

Each formula does what torch's own kernel does, in the same order and type, so that results agree to the last digits;
NaN stays NaN. A name that ends with ``_`` is a function, which each of the two languages has in its own form.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

DRAWS = {"rand": "uniform_", "randn": "normal_", "rand_like": "uniform_", "randn_like": "normal_"}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_FILLS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_VALUES = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0, "fill": 1}  # the argument that is the number
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
COPIES = ("_to_copy", "clone", "lift_fresh_copy")
_AND, _OR, _DIFFER = "({0} != 0) & ({1} != 0)", "({0} != 0) | ({1} != 0)", "({0} != 0) ^ ({1} != 0)"
# Where the result is a truth value: operands are asked whether they are zero, in their own types.
_OF_TRUTHS = {
    **dict.fromkeys(("logical_and", "bitwise_and", "mul"), _AND),
    **dict.fromkeys(("logical_or", "bitwise_or", "add"), _OR),
    **dict.fromkeys(("logical_xor", "bitwise_xor"), _DIFFER),
    **dict.fromkeys(("logical_not", "bitwise_not"), "{0} == 0"),
    **dict.fromkeys(COPIES, "{0} ? 1 : 0"),
    "where": "{0} ? {1} : {2}",
    "isnan": "{0} != {0}",
    "isinf": "({0} == INF) | ({0} == -INF)",
    "isfinite": "{0} - {0} == 0",
}
_SIGN = "{0} != {0} ? {0} : ({0} > 0) - ({0} < 0)"
# Of all numbers.
_OF_NUMBERS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "rsub": "{1} - {0}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "where": "{0} ? {1} : {2}",
    "masked_fill": "{1} ? {2} : {0}",
    "square": "{0} * {0}",
    **dict.fromkeys(("sgn", "sign"), _SIGN),
    **dict.fromkeys(COPIES, "{0}"),
}
_SCALED = {"add": "{0} + {2} * {1}", "sub": "{0} - {2} * {1}", "rsub": "{1} - {2} * {0}"}  # with a factor ``alpha``
_OF_WHOLE_NUMBERS = {
    **_OF_NUMBERS,
    "abs": "{0} < 0 ? -{0} : {0}",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "bitwise_not": "~{0}",
    "remainder": "(({0} % {1}) + {1}) % {1}",
    **dict.fromkeys(("maximum", "clamp_min"), "{0} < {1} ? {1} : {0}"),
    **dict.fromkeys(("minimum", "clamp_max"), "{1} < {0} ? {1} : {0}"),
    "clamp": "({0} < {1} ? {1} : {0}) > {2} ? {2} : ({0} < {1} ? {1} : {0})",
}
FORMULAS = {
    **_OF_NUMBERS,
    "div": "{0} / {1}",
    "abs": "absolute_({0})",
    "reciprocal": "1 / {0}",
    "rsqrt": "1 / sqrt_({0})",
    "sigmoid": "1 / (1 + exp_(-{0}))",
    "relu": "{0} < 0 ? 0 : {0}",
    **dict.fromkeys(("maximum", "clamp_min"), "larger_({0}, {1})"),
    **dict.fromkeys(("minimum", "clamp_max"), "smaller_({0}, {1})"),
    **dict.fromkeys(("clamp", "hardtanh"), "smaller_(larger_({0}, {1}), {2})"),
    "hardtanh_backward": "{1} <= {2} || {1} >= {3} ? 0 : {0}",
    "threshold_backward": "{1} <= {2} ? 0 : {0}",
    "sigmoid_backward": "{0} * (1 - {1}) * {1}",
    "tanh_backward": "{0} * (1 - {1} * {1})",
    "mse_loss": "({0} - {1}) * ({0} - {1})",
    "mse_loss_backward": "2 * ({1} - {2}) * {0}",
    "xlogy": "{1} != {1} ? {1} : {0} == 0 ? 0 : {0} * log_({1})",
    "binary_cross_entropy_with_logits": "(1 - {1}) * {0} - ({0} < 0 ? {0} : 0) + log1p_(exp_(-absolute_({0})))",
    "log_sigmoid": "({0} < 0 ? {0} : 0) - log1p_(exp_(-absolute_({0})))",
    "log_sigmoid_buffer": "exp_(-absolute_({0}))",
    "log_sigmoid_backward": "{0} * ({1} < 0 ? 1 - {2} / (1 + {2}) : {2} / (1 + {2}))",
    "logaddexp": "logaddexp_({0}, {1})",
    "silu": "{0} / (1 + exp_(-{0}))",
    "silu_backward": "{0} / (1 + exp_(-{1})) * (1 + {1} * (1 - 1 / (1 + exp_(-{1}))))",
    "leaky_relu": "{0} > 0 ? {0} : {0} * {1}",
    "leaky_relu_backward": "{1} > 0 ? {0} : {0} * {2}",
    "softplus": "{0} * {1} > {2} ? {0} : log1p_(exp_({0} * {1})) / {1}",
    "softplus_backward": "{1} * {2} > {3} ? {0} : {0} / (1 + exp_(-{1} * {2}))",
    "pow": "pow_({0}, {1})",
    "hypot": "hypot_({0}, {1})",
    **{f: f"{f}_({{0}})" for f in ("sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc")},
    **{f: f"{f}_({{0}})" for f in ("sin", "cos", "tan", "asin", "acos", "atan", "lgamma", "floor", "ceil", "trunc")},
    **{f: f"{f}_({{0}})" for f in ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh")},
}
_POWERS = {
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    0.5: "sqrt_({0})",
    -0.5: "1 / sqrt_({0})",
    -1.0: "1 / {0}",
    -2.0: "1 / ({0} * {0})",
}
# Arguments that a recorded call may leave out.
_DEFAULTS = {"leaky_relu": (0.01,), "softplus": (1.0, 20.0), "hardtanh": (-1.0, 1.0), "clamp": (None, None)}
_CONDITIONS = {"where": 0, "masked_fill": 1}  # the argument that is asked whether it is zero
# How many of the first arguments are tensors or numbers; those that follow must have these values.
_RESTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "mse_loss": (2, (0,)),
    "mse_loss_backward": (3, (0,)),
    "leaky_relu_backward": (3, (False,)),
    "binary_cross_entropy_with_logits": (2, (None, None, 0)),
}


def filled_with(name: str, args: Sequence[Any]) -> float | int | None:
    """Return the number that all elements of a result are; None if they are not one number."""
    value = args[_VALUES[name]] if name in _VALUES else _FILLS.get(name)
    return value if isinstance(value, int | float) else None


class Formula(NamedTuple):
    """What an operation computes for each element.

    Attributes:
        text: the formula, with ``{0}`` for the first operand.
        operands: nodes and numbers.
        types: what each operand is turned into before; None if it stays as it is.
    """

    text: str
    operands: list[Any]
    types: list[torch.dtype | None]

    @property
    def functions(self) -> set[str]:
        """The names of the functions that it calls."""
        return set(re.findall(r"(\w+)_\(", self.text))


def formula_of(
    name: str, args: Sequence[Any], named: Mapping[str, Any], dtype: torch.dtype, like: Callable[[fx.Node], Tensor]
) -> Formula | None:
    """Return what an operation computes for each element; None if it has no formula."""
    given = list(args)
    alpha = named.get("alpha", 1)
    if name not in COPIES and set(named) - {"alpha"}:
        return None
    if name in _SCALED and len(given) == 3:
        alpha = given.pop()
    count, rest = _RESTS.get(name, (len(given), ()))
    if tuple(given[count:]) != rest:
        return None
    given = given[:count]
    given += _DEFAULTS.get(name, ())[len(given) - 1 :]
    if name == "clamp" and None in given:
        name = "clamp_max" if given[1] is None else "clamp_min"
        given = [each for each in given if each is not None]
    text = _text(name, given, dtype)
    if alpha != 1:
        text, given = (_SCALED.get(name) if dtype != torch.bool else None), [*given, alpha]
    if text is None or not all(isinstance(each, fx.Node | int | float) for each in given):
        return None
    count = 1 + max(int(each) for each in re.findall(r"{(\d)}", text))
    if name == "pow":
        given = given[:count]
    if len(given) != count:
        return None
    types: list[torch.dtype | None] = [dtype] * count
    if name in COMPARISONS:
        both: list[Any] = [like(each) if isinstance(each, fx.Node) else each for each in given]
        types = [torch.result_type(*both)] * count
    elif dtype == torch.bool:
        types = [None] * count
    elif name in _CONDITIONS:
        types[_CONDITIONS[name]] = None
    return Formula(text, given, types)


def _text(name: str, given: Sequence[Any], dtype: torch.dtype) -> str | None:
    if dtype == torch.bool:
        return f"{{0}} {COMPARISONS[name]} {{1}}" if name in COMPARISONS else _OF_TRUTHS.get(name)
    if name == "pow" and isinstance(given[1], int | float) and float(given[1]) in _POWERS:
        text = _POWERS[float(given[1])]
        return text if dtype.is_floating_point or set("s/").isdisjoint(text) else None
    return (FORMULAS if dtype.is_floating_point else _OF_WHOLE_NUMBERS).get(name)


def literal(value: float | int | bool) -> str:
    """Return a number in C."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"({value}LL)" if value < 0 else f"{value}LL"
    if value != value:
        return "(INF - INF)"
    if abs(value) == float("inf"):
        return "INF" if value > 0 else "(-INF)"
    return f"({value!r})" if value < 0 else repr(float(value))
