"""What operations of torch compute for one element, written in C.

Each formula does what torch's own kernel does, in the same order and type, so that results agree to the last digits;
NaN stays NaN. Functions that torch evaluates with vector instructions have a form here that a C compiler can vectorise:
no table, no branch, no call.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from pyro_dropout.engines.torch_internals import OpOverload

aten = torch.ops.aten

C_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bool: "unsigned char",
    torch.int32: "int",
    torch.int64: "long long",
}
COMPARISONS = {
    getattr(getattr(aten, name), kind): "{0} %s {1}" % sign  # noqa: UP031 - the braces are for later
    for name, sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!="))
    for kind in ("Tensor", "Scalar")
}
_AND, _OR, _NOT, _DIFFER = "({0} != 0) & ({1} != 0)", "({0} != 0) | ({1} != 0)", "{0} == 0", "({0} != 0) ^ ({1} != 0)"
_TRUTH = "{0} ? 1 : 0"
TRUTHS = {_AND, _OR, _NOT, _DIFFER, _TRUTH}  # whose operands are asked whether they are zero, in their own types
COPIES = {aten._to_copy.default, aten.clone.default, aten.lift_fresh_copy.default}
# Where the result is a truth value.
_OF_TRUTHS: dict[OpOverload, str] = {
    **dict.fromkeys((aten.logical_and.default, aten.bitwise_and.Tensor, aten.mul.Tensor), _AND),
    **dict.fromkeys((aten.logical_or.default, aten.bitwise_or.Tensor, aten.add.Tensor), _OR),
    **dict.fromkeys((aten.logical_xor.default, aten.bitwise_xor.Tensor), _DIFFER),
    **dict.fromkeys((aten.logical_not.default, aten.bitwise_not.default), _NOT),
    **dict.fromkeys(COPIES, _TRUTH),
    aten.where.self: "{0} ? {1} : {2}",
    **COMPARISONS,
}
_LARGER = "{0} != {0} ? {0} : {1} != {1} ? {1} : {0} < {1} ? {1} : {0}"
_SMALLER = "{0} != {0} ? {0} : {1} != {1} ? {1} : {1} < {0} ? {1} : {0}"
# Where it is a whole number.
_OF_NUMBERS: dict[OpOverload, str] = {
    **{getattr(aten.add, kind): "{0} + {1}" for kind in ("Tensor", "Scalar")},
    **{getattr(aten.sub, kind): "{0} - {1}" for kind in ("Tensor", "Scalar")},
    **{getattr(aten.mul, kind): "{0} * {1}" for kind in ("Tensor", "Scalar")},
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.bitwise_and.Scalar), "{0} & {1}"),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.bitwise_or.Scalar), "{0} | {1}"),
    aten.rsub.Scalar: "{1} - {0}",
    aten.neg.default: "-{0}",
    aten.maximum.default: "{0} < {1} ? {1} : {0}",
    aten.minimum.default: "{1} < {0} ? {1} : {0}",
    aten.where.self: "{0} ? {1} : {2}",
    **dict.fromkeys(COPIES, "{0}"),
}
FORMULAS: dict[OpOverload, str] = {
    **{getattr(aten.add, kind): "{0} + {1}" for kind in ("Tensor", "Scalar")},
    **{getattr(aten.sub, kind): "{0} - {1}" for kind in ("Tensor", "Scalar")},
    **{getattr(aten.mul, kind): "{0} * {1}" for kind in ("Tensor", "Scalar")},
    **{getattr(aten.div, kind): "{0} / {1}" for kind in ("Tensor", "Scalar")},
    aten.rsub.Scalar: "{1} - {0}",
    aten.neg.default: "-{0}",
    aten.abs.default: "abs_({0})",
    aten.square.default: "{0} * {0}",
    aten.reciprocal.default: "1 / {0}",
    aten.sqrt.default: "sqrt_({0})",
    aten.rsqrt.default: "1 / sqrt_({0})",
    aten.exp.default: "exp_({0})",
    aten.log.default: "log_({0})",
    aten.expm1.default: "expm1_({0})",
    aten.log1p.default: "log1p_({0})",
    aten.tanh.default: "tanh_({0})",
    aten.sigmoid.default: "1 / (1 + exp_(-{0}))",
    aten.relu.default: "{0} < 0 ? 0 : {0}",
    aten.clamp_min.default: "{0} < {1} ? {1} : {0}",
    aten.clamp_max.default: "{0} > {1} ? {1} : {0}",
    aten.clamp.default: "({0} < {1} ? {1} : {0}) > {2} ? {2} : ({0} < {1} ? {1} : {0})",
    aten.threshold_backward.default: "{1} <= {2} ? 0 : {0}",
    aten.sigmoid_backward.default: "{0} * (1 - {1}) * {1}",
    aten.tanh_backward.default: "{0} * (1 - {1} * {1})",
    aten.mse_loss.default: "({0} - {1}) * ({0} - {1})",
    aten.mse_loss_backward.default: "2 * ({1} - {2}) * {0}",
    aten.where.self: "{0} ? {1} : {2}",
    aten.masked_fill.Scalar: "{1} ? {2} : {0}",
    aten.lgamma.default: "lgamma_({0})",
    aten.xlogy.Tensor: "{1} != {1} ? {1} : {0} == 0 ? 0 : {0} * log_({1})",
    aten.binary_cross_entropy_with_logits.default: "(1 - {1}) * {0} - log_sigmoid_({0})",
    aten.maximum.default: _LARGER,
    aten.minimum.default: _SMALLER,
    aten.logaddexp.default: "logaddexp_({0}, {1})",
    aten.sgn.default: "{0} != {0} ? {0} : ({0} > 0) - ({0} < 0)",
    aten.sign.default: "{0} != {0} ? {0} : ({0} > 0) - ({0} < 0)",
    aten.erf.default: "erf_({0})",
    aten.silu.default: "{0} / (1 + exp_(-{0}))",
    aten.silu_backward.default: "{0} / (1 + exp_(-{1})) * (1 + {1} * (1 - 1 / (1 + exp_(-{1}))))",
    aten.leaky_relu.default: "{0} > 0 ? {0} : {0} * {1}",
    aten.leaky_relu_backward.default: "{1} > 0 ? {0} : {0} * {2}",
    aten.softplus.default: "{0} * {1} > {2} ? {0} : log1p_(exp_({0} * {1})) / {1}",
    aten.softplus_backward.default: "{1} * {2} > {3} ? {0} : {0} / (1 + exp_(-{1} * {2}))",
    aten.hardtanh.default: "({0} < {1} ? {1} : {0}) > {2} ? {2} : ({0} < {1} ? {1} : {0})",
    aten.hardtanh_backward.default: "{1} <= {2} || {1} >= {3} ? 0 : {0}",
    **dict.fromkeys(COPIES, "{0}"),
}
# Arguments that a recorded call may leave out.
_DEFAULTS: dict[OpOverload, tuple[float, ...]] = {
    aten.leaky_relu.default: (0.01,),
    aten.softplus.default: (1.0, 20.0),
    aten.hardtanh.default: (-1.0, 1.0),
}
CONDITIONS = {aten.where.self: 0, aten.masked_fill.Scalar: 1}  # the argument that is asked whether it is zero
# How many of the first arguments are tensors or numbers; those that follow must have these values.
RESTS: dict[OpOverload, tuple[int, tuple[object, ...]]] = {
    aten.mse_loss.default: (2, (0,)),
    aten.mse_loss_backward.default: (3, (0,)),
    aten.binary_cross_entropy_with_logits.default: (2, (None, None, 0)),
}
SLOW = ("lgamma_", "erf_")
_POWERS: dict[float, str] = {
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    0.5: "sqrt_({0})",
    -0.5: "1 / sqrt_({0})",
    -1.0: "1 / {0}",
    -2.0: "1 / ({0} * {0})",
}

# Polynomials of Cephes (S. L. Moshier): the error is below two units in the last place.
_EXP = """
static inline __attribute__((always_inline)) float exp_f(float x) {
    x = x < -110.0f ? -110.0f : x;
    x = x > 100.0f ? 100.0f : x;
    const float n = __builtin_rintf(x * 1.44269504088896341f);
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const int whole = (int)n, half = whole >> 1;
    union { int i; float f; } a = {(half + 127) << 23}, b = {(whole - half + 127) << 23};
    return p * a.f * b.f;
}
"""
_LOG = """
static inline __attribute__((always_inline)) float log_f(float x) {
    union { float f; int i; } u = {x < 0x1p-126f ? x * 0x1p25f : x};
    union { int i; float f; } v = {(u.i & 0x007fffff) | 0x3f000000};
    const float tiny = x < 0x1p-126f ? 25.0f : 0.0f, low = v.f < 0.707106781186547524f ? 1.0f : 0.0f;
    const float k = (float)((u.i >> 23) - 126) - tiny - low;
    const float m = (v.f < 0.707106781186547524f ? v.f + v.f : v.f) - 1.0f, z = m * m;
    float p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    float y = m * z * p + k * -2.12194440e-4f;
    y = m + (y - 0.5f * z) + k * 0.693359375f;
    y = x < __builtin_inff() ? y : x;
    y = x == 0.0f ? -__builtin_inff() : y;
    return x < 0.0f ? __builtin_nanf("") : y;
}
"""
_TANH = """
static inline __attribute__((always_inline)) float tanh_f(float x) {
    const float z = __builtin_fabsf(x), s = x * x;
    float p = -5.70498872745e-3f;
    p = p * s + 2.06390887954e-2f;
    p = p * s - 5.37397155531e-2f;
    p = p * s + 1.33314422036e-1f;
    p = p * s - 3.33332819422e-1f;
    const float near = p * s * x + x, far = 1.0f - 2.0f / (exp_f(z + z) + 1.0f);
    return z < 0.625f ? near : x < 0.0f ? -far : far;
}
"""
# The rounding of 1 + x, or of e^x, is undone by the same rounding in the other factor (W. Kahan).
_NEAR_ONE = """
static inline __attribute__((always_inline)) float log1p_f(float x) {
    const float u = 1.0f + x, d = u - 1.0f;
    const float y = log_f(u) * (x / (d == 0.0f ? 1.0f : d));
    return d == 0.0f ? x : u < __builtin_inff() ? y : u;
}
static inline __attribute__((always_inline)) float expm1_f(float x) {
    const float u = exp_f(x), d = u - 1.0f, l = log_f(u);
    const float y = d * (x / (l == 0.0f ? 1.0f : l));
    return d == 0.0f ? x : d == -1.0f ? -1.0f : u < __builtin_inff() ? y : u;
}
"""
_SUMS_OF_EXPONENTIALS = """
static inline __attribute__((always_inline)) {type} log_sigmoid_{f}({type} x) {{
    return (x < 0 ? x : 0) - log1p_{f}(exp_{f}(-abs_{f}(x)));
}}
static inline __attribute__((always_inline)) {type} logaddexp_{f}({type} x, {type} y) {{
    const {type} far = abs_{f}(x - y);
    return x == y && x - y != 0 ? x : (x < y ? y : x) + log1p_{f}(exp_{f}(-far));
}}
"""


def formula_of(operation: OpOverload, args: list[Any], dtype: torch.dtype) -> tuple[str | None, list[Any]]:
    """Return what an operation computes for each element, None if it has no formula, and its arguments.

    Example:
        >>> from pyro_dropout.engines.generated.formulas import formula_of
        >>> [formula_of(aten.pow.Tensor_Scalar, ["x", k], torch.float32) for k in (2, 2.5)]
        [('{0} * {0}', ['x']), (None, ['x', 2.5])]
        >>> formula_of(aten.clamp.default, ["x", None, 3.0], torch.float32)
        ('{0} > {1} ? {1} : {0}', ['x', 3.0])
    """
    if dtype == torch.bool:
        return _OF_TRUTHS.get(operation), args
    if not dtype.is_floating_point:
        return _OF_NUMBERS.get(operation), args
    if operation is aten.pow.Tensor_Scalar:
        formula = _POWERS.get(float(args[1])) if isinstance(args[1], int | float) else None
        return formula, args if formula is None else args[:1]
    if operation is aten.clamp.default and None in (*args, *([None] * (3 - len(args)))):
        low = args[1] is not None
        operation, args = aten.clamp_min.default if low else aten.clamp_max.default, [args[0], args[1 if low else 2]]
    more = _DEFAULTS.get(operation, ())
    args = [*args, *more[len(args) - 1 :]] if more else args
    return FORMULAS.get(operation), args


def literal(value: float, c_type: str) -> str:
    """Return a number as torch turns it into a type.

    Example:
        >>> from pyro_dropout.engines.generated.formulas import literal
        >>> literal(0.5, "float"), literal(float("-inf"), "double")
        ('(float)0x1.0000000000000p-1', '(double)-__builtin_inf()')
    """
    number = float(value)
    if math.isnan(number):
        text = '__builtin_nan("")'
    elif math.isinf(number):
        text = "__builtin_inf()" if number > 0 else "-__builtin_inf()"
    else:
        text = number.hex()
    return f"({c_type}){text}"


def written(formula: str, operands: Sequence[str], c_type: str) -> str:
    """Return a formula with its operands and the functions of its type.

    Example:
        >>> from pyro_dropout.engines.generated.formulas import written
        >>> written("1 / sqrt_({0})", ["t3"], "float")
        '1 / sqrt_f(t3)'
    """
    kind = "f" if c_type == "float" else "d"
    return formula.replace("_(", f"_{kind}(").format(*operands)


def functions() -> str:
    """Return the functions that formulas use, in C."""
    names = {
        "f": ("sqrt", "lgamma", "erf"),
        "d": ("sqrt", "lgamma", "erf", "expm1", "log1p", "exp", "log", "tanh"),
    }
    made = [_EXP, _LOG, _TANH, _NEAR_ONE]
    for kind, c_type, suffix in (("f", "float", "f"), ("d", "double", "")):
        made += [f"#define {name}_{kind}(x) __builtin_{name}{suffix}(x)" for name in names[kind]]
        made.append(f"#define abs_{kind}(x) __builtin_fabs{suffix}(x)")
        made.append(_SUMS_OF_EXPONENTIALS.format(type=c_type, f=kind))
    return "\n".join(made)
