"""The functions of formulas in C, in a form that a C compiler can vectorise: no table, no branch, no call."""

import re
from collections.abc import Sequence

import torch

from pyro_dropout.engines.generated import values

C_TYPES = {**values.C_TYPES, torch.bool: "unsigned char"}
_LIBRARY = {  # functions of the C library, by type
    "f": ("sqrt", "lgamma", "erf"),
    "d": ("sqrt", "lgamma", "erf", "expm1", "log1p", "exp", "log", "tanh"),
}
FUNCTIONS = {*_LIBRARY["d"], "absolute", "larger", "smaller", "logaddexp"}
_SLOW, _QUICK = {"lgamma", "erf"}, {"sqrt", "absolute", "larger", "smaller"}

# Large functions: a copy for the sizes of each call would take a C compiler seconds.
_APART = """
#define APART static __attribute__((noinline, noclone))
#if defined(__FMA__) || defined(__aarch64__)
#define fused(x, y, z) __builtin_fmaf(x, y, z)
#else
#define fused(x, y, z) ((x) * (y) + (z))
#endif
"""
# Polynomials of Cephes (S. L. Moshier): the error is below two units in the last place.
_EXP = """
static inline __attribute__((always_inline)) float exp_f(float x) {
    x = x < -110.0f ? -110.0f : x;
    x = x > 100.0f ? 100.0f : x;
    const float n = __builtin_rintf(x * 1.44269504088896341f);
    const float r = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, x));
    float p = 1.9875691500e-4f;
    p = fused(p, r, 1.3981999507e-3f);
    p = fused(p, r, 8.3334519073e-3f);
    p = fused(p, r, 4.1665795894e-2f);
    p = fused(p, r, 1.6666665459e-1f);
    p = fused(p, r, 5.0000001201e-1f);
    p = fused(p, r * r, r + 1.0f);
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
    p = fused(p, m, -1.1514610310e-1f);
    p = fused(p, m, 1.1676998740e-1f);
    p = fused(p, m, -1.2420140846e-1f);
    p = fused(p, m, 1.4249322787e-1f);
    p = fused(p, m, -1.6668057665e-1f);
    p = fused(p, m, 2.0000714765e-1f);
    p = fused(p, m, -2.4999993993e-1f);
    p = fused(p, m, 3.3333331174e-1f);
    float y = fused(m * z, p, k * -2.12194440e-4f);
    y = fused(k, 0.693359375f, m + fused(z, -0.5f, y));
    y = x < __builtin_inff() ? y : x;
    y = x == 0.0f ? -__builtin_inff() : y;
    return x < 0.0f ? __builtin_nanf("") : y;
}
"""
_TANH = """
static inline __attribute__((always_inline)) float tanh_f(float x) {
    const float z = __builtin_fabsf(x), s = x * x;
    float p = -5.70498872745e-3f;
    p = fused(p, s, 2.06390887954e-2f);
    p = fused(p, s, -5.37397155531e-2f);
    p = fused(p, s, 1.33314422036e-1f);
    p = fused(p, s, -3.33332819422e-1f);
    const float near = fused(p * s, x, x), far = 1.0f - 2.0f / (exp_f(z + z) + 1.0f);
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
_OF_BOTH_TYPES = """
static inline __attribute__((always_inline)) {type} larger_{f}({type} x, {type} y) {{
    return (x < y) | (y != y) ? y : x;
}}
static inline __attribute__((always_inline)) {type} smaller_{f}({type} x, {type} y) {{
    return (y < x) | (y != y) ? y : x;
}}
static inline __attribute__((always_inline)) {type} logaddexp_{f}({type} x, {type} y) {{
    const {type} far = absolute_{f}(x - y);
    return x == y && x - y != 0 ? x : (x < y ? y : x) + log1p_{f}(exp_{f}(-far));
}}
"""


def is_slow(formula: str, c_type: str) -> bool:
    """Whether a formula has a function without a vector form."""
    called = set(re.findall(r"(\w+)_\(", formula))
    return bool(called & _SLOW or (c_type == "double" and called - _QUICK))


def written(formula: str, operands: Sequence[str], c_type: str) -> str:
    """Return a formula with its operands and the functions of its type."""
    kind = "f" if c_type == "float" else "d"
    return formula.replace("_(", f"_{kind}(").format(*operands)


def functions() -> str:
    """Return the functions that formulas use, in C."""
    made = [_APART, "#define INF __builtin_inf()", _EXP, _LOG, _TANH, _NEAR_ONE]
    for kind, suffix in (("f", "f"), ("d", "")):
        made += [f"#define {name}_{kind}(x) __builtin_{name}{suffix}(x)" for name in _LIBRARY[kind]]
        made.append(f"#define absolute_{kind}(x) __builtin_fabs{suffix}(x)")
    return "\n".join([*made, for_both_types(_OF_BOTH_TYPES)])


def for_both_types(text: str) -> str:
    """Return functions for float and for double."""
    return "\n".join(text.format(type=c_type, f=kind) for kind, c_type in (("f", "float"), ("d", "double")))
