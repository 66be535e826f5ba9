"""Products and factors of small matrices in C: a call of torch takes longer than they do."""

from pyro_dropout.engines.c.functions import for_both_types

MOST_TERMS = 2**19  # of a product, and
MOST_ROWS = 32  # of a matrix that is factored: the libraries of torch are faster at larger ones
FACTORS = {"linalg_cholesky_ex": "cholesky", "cholesky_inverse": "cholesky_inverse"}

# Tiles of four rows and a vector of columns stay in registers. The columns of the right factor are laid out for them,
# some terms at a time, because a stack is small.
_PRODUCT = """
typedef {type} wide_{f} __attribute__((vector_size(64)));
APART void product_{f}(long m, long n, long k, const {type} *a, long ai, long ak, const {type} *b, long bk, long bj,
                        {type} *c) {{
    enum {{ W = 64 / sizeof({type}), TERMS = 512 }};
    wide_{f} side[TERMS];
    for (long j = 0; j < n; j += W) for (long from = 0; from < k; from += TERMS) {{
        const long width = n - j < W ? n - j : W, terms = k - from < TERMS ? k - from : TERMS;
        for (long r = 0; r < terms; r++) {{
            wide_{f} row = {{0}};
            if (width == W && bj == 1) __builtin_memcpy(&row, b + (from + r) * bk + j, sizeof(row));
            else for (long q = 0; q < width; q++) row[q] = b[(from + r) * bk + (j + q) * bj];
            side[r] = row;
        }}
        for (long i = 0; i < m; i += 4) {{
            const long last = m - 1 - i;
            const {type} *p = a + i * ai + from * ak, *q = p + (last > 0 ? ai : 0), *s = p + (last > 1 ? 2 * ai : 0),
                         *t = p + (last > 2 ? 3 * ai : 0);
            wide_{f} sums[4] = {{{{0}}, {{0}}, {{0}}, {{0}}}};
            for (long r = 0; from && r < 4 && r <= last; r++) {{
                const {type} *so_far = c + (i + r) * n + j;
                for (long q = 0; q < width; q++) sums[r][q] = so_far[q];
            }}
            for (long r = 0; r < terms; r++) {{
                const wide_{f} row = side[r];
                sums[0] += p[r * ak] * row;
                sums[1] += q[r * ak] * row;
                sums[2] += s[r * ak] * row;
                sums[3] += t[r * ak] * row;
            }}
            for (long r = 0; r < 4 && r <= last; r++) {{
                {type} *to = c + (i + r) * n + j;
                if (width == W) __builtin_memcpy(to, &sums[r], sizeof(sums[r]));
                else for (long q = 0; q < width; q++) to[q] = sums[r][q];
            }}
        }}
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
    return for_both_types(_PRODUCT + _CHOLESKY)
