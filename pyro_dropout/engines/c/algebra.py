"""Products and factors of small matrices in C: a call of torch takes longer than they do."""

from pyro_dropout.engines.c.functions import for_both_types

MOST_TERMS = 2**20  # of a product, and
MOST_ROWS = 32  # of a matrix that is factored: the libraries of torch are faster at larger ones
FACTORS = {"linalg_cholesky_ex": "cholesky", "cholesky_inverse": "cholesky_inverse"}

# Tiles of some rows and a vector of columns stay in registers. The columns of the right factor are laid out for them,
# some terms at a time, because a stack is small. A product and its sum are rounded once, as in the libraries of torch.
_ONCE = """
#ifdef __clang__
#define ROUNDED_ONCE
#define ONCE _Pragma("clang fp contract(fast)")
#else
#define ROUNDED_ONCE __attribute__((optimize("fp-contract=fast")))
#define ONCE
#endif
#ifdef __AVX512F__
#define ROWS 8
#else
#define ROWS 4
#endif
"""
_PRODUCT = """
typedef {type} wide_{f} __attribute__((vector_size(64)));
enum {{ W_{f} = 64 / sizeof({type}), TERMS_{f} = 512 }};
static inline __attribute__((always_inline)) ROUNDED_ONCE void tile_{f}(const int rows, const int some, long width,
        long terms, const {type} *a, long ai, long ak, const wide_{f} *side, {type} *c, long n, int more, long room) {{
    ONCE
    const {type} *p[ROWS];
    wide_{f} sums[ROWS];
    for (int q = 0; q < rows; q++) {{
        p[q] = a + (q < some ? q : 0) * ai, sums[q] = (wide_{f}){{0}};
        if (more && q < some) __builtin_memcpy(&sums[q], c + q * n, width * sizeof({type}));
    }}
    for (long r = 0; r < terms; r++) for (int q = 0; q < rows; q++) sums[q] += p[q][r * ak] * side[r];
    for (int q = 0; q < rows && q < some; q++) {{
        // What is written beyond a narrow row is written again with the next ones.
        if (width == W_{f} || (!more && q * n + W_{f} <= room)) __builtin_memcpy(c + q * n, &sums[q], 64);
        else for (long j = 0; j < width; j++) c[q * n + j] = sums[q][j];
    }}
}}
APART ROUNDED_ONCE void product_{f}(long m, long n, long k, const {type} *a, long ai, long ak, const {type} *b, long bk,
                                    long bj, {type} *c) {{
    wide_{f} side[TERMS_{f}];
    const long width = n < W_{f} ? n : W_{f};
    for (long next = 0; next < n; next += W_{f}) for (long from = 0; from < k; from += TERMS_{f}) {{
        // The last columns are computed with some before them again.
        const long j = next + width <= n ? next : n - width, terms = k - from < TERMS_{f} ? k - from : TERMS_{f};
        const {type} *right = b + from * bk + j * bj, *p = a + from * ak;
        {type} *to = c + j, *end = c + m * n;
        if (width == W_{f} && bj == 1) for (long r = 0; r < terms; r++) __builtin_memcpy(&side[r], right + r * bk, 64);
        else {{
            __builtin_memset(side, 0, terms * 64);
            for (long q = 0; q < width; q++) for (long r = 0; r < terms; r++) side[r][q] = right[r * bk + q * bj];
        }}
        long i = m;
        for (; i >= ROWS; i -= ROWS, p += ROWS * ai, to += ROWS * n)
            tile_{f}(ROWS, ROWS, width, terms, p, ai, ak, side, to, n, from > 0, end - to);
        for (; i > 0; i -= 4, p += 4 * ai, to += 4 * n)
            tile_{f}(4, i, width, terms, p, ai, ak, side, to, n, from > 0, end - to);
    }}
}}
"""
# As LAPACK does: the first pivot that is not positive ends it, and is told by its number.
_CHOLESKY = """
APART void cholesky_{f}(long n, const {type} *a, long ai, long aj, {type} *l, int *info) {{
    *info = 0;
    for (long i = 0; i < n; i++) for (long j = 0; j < n; j++) l[i * n + j] = j > i ? 0 : a[i * ai + j * aj];
    for (long j = 0; j < n; j++) {{
        if (!(l[j * n + j] > 0)) {{
            *info = j + 1;
            return;
        }}
        l[j * n + j] = sqrt_{f}(l[j * n + j]);
        for (long i = j + 1; i < n; i++) l[i * n + j] /= l[j * n + j];
        for (long i = j + 1; i < n; i++) for (long k = j + 1; k <= i; k++) l[i * n + k] -= l[i * n + j] * l[k * n + j];
    }}
}}
APART void cholesky_inverse_{f}(long n, const {type} *l, long li, long lj, {type} *x) {{
    for (long c = 0; c < n; c++) {{
        {type} y[n];
        for (long i = 0; i < n; i++) {{
            {type} s = i == c;
            for (long k = c; k < i; k++) s -= l[i * li + k * lj] * y[k];
            y[i] = i < c ? 0 : s / l[i * li + i * lj];
        }}
        for (long i = n - 1; i >= c; i--) {{
            {type} s = y[i];
            for (long k = i + 1; k < n; k++) s -= l[k * li + i * lj] * y[k];
            x[i * n + c] = x[c * n + i] = y[i] = s / l[i * li + i * lj];
        }}
    }}
}}
"""


def algebra() -> str:
    """Return the functions of matrices, in C."""
    return _ONCE + for_both_types(_PRODUCT + _CHOLESKY)
