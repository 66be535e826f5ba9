"""Random numbers in C: those that torch's own generator gives on a CPU, in the same order, from its state."""

import functools

import numpy
import torch

from pyro_dropout.engines.c.functions import for_both_types

# The Mersenne Twister (Matsumoto and Nishimura, 1998), in the memory of torch's state.
_GENERATOR = """
typedef struct {
    unsigned long long seed;
    int left, seeded;
    unsigned long long next, words[624];
    double unused, normal, rest;
    int has_normal;
} generator;
static inline unsigned turned(unsigned high, unsigned low) {
    return (((high & 0x80000000u) | (low & 0x7fffffffu)) >> 1) ^ (-(low & 1u) & 0x9908b0dfu);
}
static inline unsigned tempered(unsigned y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}
static inline void next_words(unsigned *s) {
    for (int k = 0; k < 227; k++) s[k] = s[k + 397] ^ turned(s[k], s[k + 1]);
    for (int k = 227; k < 623; k++) s[k] = s[k - 227] ^ turned(s[k], s[k + 1]);
    s[623] = s[396] ^ turned(s[623], s[0]);
}
APART void uniform_f(generator *g, float *to, long n) {
    unsigned s[624];
    for (int k = 0; k < 624; k++) s[k] = (unsigned)g->words[k];
    for (long here; n > 0; g->left -= here, g->next += here, to += here, n -= here) {
        if (g->left == 1) next_words(s), g->left = 625, g->next = 0;
        here = n < g->left - 1 ? n : g->left - 1;
        const unsigned *words = s + g->next;
        for (long k = 0; k < here; k++) to[k] = (float)(int)(tempered(words[k]) & 0xffffffu) * 0x1p-24f;
    }
    for (int k = 0; k < 624; k++) g->words[k] = s[k];
}
APART unsigned word(generator *g) {
    if (g->left == 1) {
        float none;
        uniform_f(g, &none, 1);
        g->left = 625, g->next = 0;
    }
    g->left--;
    return tempered((unsigned)g->words[g->next++]);
}
APART void uniform_d(generator *g, double *to, long n) {
    for (long k = 0; k < n; k++) {
        const unsigned long long high = word(g), both = high << 32 | word(g);
        to[k] = (double)(long long)(both & 0x1fffffffffffffull) * 0x1p-53;
    }
}
APART double one_normal(generator *g) {
    if (g->has_normal) {
        const double kept = g->normal;
        g->has_normal = 0, g->normal = 0;
        return kept;
    }
    double u[2];
    uniform_d(g, u, 2);
    const double r = __builtin_sqrt(-2 * __builtin_log1p(-u[1])), angle = 2 * 3.14159265358979323846 * u[0];
    g->has_normal = 1, g->normal = r * __builtin_sin(angle);
    return r * __builtin_cos(angle);
}
static inline __attribute__((always_inline)) void sin_and_cos_f(float x, float *s, float *c) {
    const float n = __builtin_rintf(x * 0.636619772367581343f);
    const float r = fused(n, -7.54978995489188216e-8f, fused(n, -4.837512969970703125e-4f, fused(n, -1.5703125f, x)));
    const float z = r * r, p = fused(fused(-1.9515295891e-4f, z, 8.3321608736e-3f), z, -1.6666654611e-1f);
    const float q = fused(fused(2.443315711809948e-5f, z, -1.388731625493765e-3f), z, 4.166664568298827e-2f);
    const float near = fused(p * z, r, r), far = fused(q * z, z, fused(z, -0.5f, 1.0f));
    const int k = (int)n;
    *s = (k & 1 ? far : near) * (k & 2 ? -1.0f : 1.0f);
    *c = (k & 1 ? near : far) * ((k + 1) & 2 ? -1.0f : 1.0f);
}
static inline void sin_and_cos_d(double x, double *s, double *c) {
    *s = __builtin_sin(x), *c = __builtin_cos(x);
}
"""
# Of Box and Muller, as torch has it: sixteen at a time, the last sixteen anew, and fewer one by one.
_NORMAL = """
APART void sixteens_{f}({type} *x, long n) {{
    enum {{ MOST = 64, HALF = 8 * sizeof({type}) }};
    {type} u[8 * MOST], v[8 * MOST];
    for (; n > 0; n -= MOST, x += 16 * MOST) {{
        const long here = 8 * (n < MOST ? n : MOST);
        for (long k = 0; k < here; k += 8) {{
            __builtin_memcpy(u + k, x + 2 * k, HALF);
            __builtin_memcpy(v + k, x + 2 * k + 8, HALF);
        }}
        #pragma omp simd
        for (long k = 0; k < here; k++) {{
            const {type} r = sqrt_{f}(-2 * log_{f}(1 - u[k]));
            {type} s, c;
            sin_and_cos_{f}(({type})6.28318530717958647692 * v[k], &s, &c);
            u[k] = r * c, v[k] = r * s;
        }}
        for (long k = 0; k < here; k += 8) {{
            __builtin_memcpy(x + 2 * k, u + k, HALF);
            __builtin_memcpy(x + 2 * k + 8, v + k, HALF);
        }}
    }}
}}
APART void normal_{f}(generator *g, {type} *to, long n) {{
    if (n < 16) for (long k = 0; k < n; k++) to[k] = one_normal(g);
    else {{
        uniform_{f}(g, to, n);
        sixteens_{f}(to, n / 16);
        if (n % 16) {{
            uniform_{f}(g, to + n - 16, 16);
            sixteens_{f}(to + n - 16, 1);
        }}
    }}
}}
"""


def draws() -> str:
    """Return the functions that draw, in C."""
    return _GENERATOR + for_both_types(_NORMAL)


@functools.cache
def is_known() -> bool:
    """Whether the state of torch's generator lies in memory as it is read here."""
    state = torch.Generator().manual_seed(5).get_state().numpy()
    known = numpy.random.RandomState(5).get_state(legacy=False)["state"]["key"]
    return (
        len(state) == 5056
        and list(state[8:24].view("int32")) == [1, 1, 0, 0]
        and bool((state[24:5016].view("int64") == known).all())
    )
