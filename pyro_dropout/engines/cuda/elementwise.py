"""What operations on elements are in C, by their names in torch."""

DEAR = 8  # about how many short operations a function takes
CHEAP = 3  # operations that may be computed again wherever they are needed

# By the operation's name, without its overload: the expression of its inputs, cast to the type of the result.
ARITHMETIC = {
    "mul": "({0} * {1})",
    "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})",
    "neg": "(-{0})",
    "abs": "({0} < 0 ? -{0} : {0})",
    "sign": "({0} != {0} ? {0} : ({0} > 0) - ({0} < 0))",
    "relu": "({0} < 0 ? 0 : {0})",
    "threshold_backward": "({1} <= {2} ? 0 : {0})",
    "tanh_backward": "({0} * (1 - {1} * {1}))",
    "sigmoid_backward": "({0} * {1} * (1 - {1}))",
}
DEAR_ARITHMETIC = {
    "div": "({0} / {1})",
    "reciprocal": "(1 / {0})",
    "sqrt": "sqrt({0})",
    "rsqrt": "(1 / sqrt({0}))",
    "sigmoid": "(1 / (1 + exp(-{0})))",
    "xlogy": "({1} != {1} ? {1} : {0} == 0 ? 0 : {0} * log({1}))",
    "logaddexp": "log_sum({0}, {1})",
    "pow": "pow({0}, {1})",
    "hypot": "hypot({0}, {1})",
    **{f: f"{f}({{0}})" for f in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "floor", "ceil", "trunc")},
    **{f: f"{f}({{0}})" for f in ("sin", "cos", "tan", "asin", "acos", "atan", "erf", "erfc", "lgamma")},
    **{f: f"{f}({{0}})" for f in ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh")},
}
PREDICATES = {
    "isnan": "({0} != {0})",
    "isinf": "({0} == INF || {0} == -INF)",
    "isfinite": "({0} - {0} == 0)",
}
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
LOGIC = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
WORDS = {"logical_and": "&&", "logical_or": "||", "logical_xor": "!="}
SAME = {"clone", "detach", "alias", "lift_fresh_copy", "contiguous", "lift_fresh"}
VIEWS = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "_reshape_alias", "flatten"}
FILLED = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1, "zeros": 0, "ones": 1}
REDUCTIONS = {"sum": "sum", "amax": "max", "amin": "min", "any": "any", "all": "all", "prod": "prod"}
