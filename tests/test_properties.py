"""How many properties hold in both floating-point types, read off the source of the tests."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
ENOUGH = 60
STRATEGY = ("tests.oracles.both_types", "dtypes")
MACHINE = "RuleBasedStateMachine"


def last_word(node: ast.AST) -> str:
    """``given`` for ``given``, ``hypothesis.given`` and ``hypothesis.given(...)``."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))


def strategies(tree: ast.Module) -> set[str]:
    """The names under which a file has ``dtypes``: as imported, and what it builds on them in its order."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names if (node.module, alias.name) == STRATEGY}
        elif isinstance(node, ast.Assign) and mentions(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def draws(function: ast.FunctionDef, decorators: set[str], names: set[str]) -> bool:
    """Whether a decorator hands a type to the function, and the function does something with it."""
    parameters = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    parameters += [argument.arg for argument in function.args.kwonlyargs]
    for call in function.decorator_list:
        if not isinstance(call, ast.Call) or last_word(call) not in decorators:
            continue
        # hypothesis fills the last parameters with the strategies that have no name
        pairs = list(zip(parameters[len(parameters) - len(call.args) :], call.args, strict=False))
        pairs += [(keyword.arg or "", keyword.value) for keyword in call.keywords]
        drawn = {name for name, strategy in pairs if mentions(strategy, names)}
        if drawn and any(mentions(statement, drawn) for statement in function.body):
            return True
    return False


def properties(source: str) -> tuple[list[str], list[str]]:
    """The properties of a file that draw a type, and those that do not."""
    tree = ast.parse(source)
    names = strategies(tree)
    both, others = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and "given" in map(last_word, node.decorator_list):
            (both if draws(node, {"given"}, names) else others).append(node.name)
        elif isinstance(node, ast.ClassDef) and MACHINE in map(last_word, node.bases):
            rules = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            one = any(draws(part, {"initialize", "rule"}, names) for part in rules)
            (both if one else others).append(node.name)
    return both, others


def test_enough_properties_draw_their_floating_point_type() -> None:
    """At least sixty properties are checked in float32 and in float64, the type drawn with the rest.

    What counts: a function under ``@given`` with a strategy that is ``dtypes`` of ``tests.oracles.both_types``, or is
    built on it, provided that the function reads the parameter which that strategy fills; and a rule-based state
    machine, once, if one of its rules does. What does not: a property that fixes its type, a ``dtype`` of the fixture
    or of ``parametrize``, and a list of types written out in the file, which could leave one out.
    """
    both, others = [], []
    for path in sorted(TESTS.rglob("test_*.py")):
        where = path.relative_to(TESTS).as_posix()
        for found, names in zip((both, others), properties(path.read_text("utf-8")), strict=True):
            found += [f"{where}: {name}" for name in names]
    print(f"{len(both)} properties draw both types, {len(others)} do not:", *others, sep="\n")
    assert len(both) >= ENOUGH, f"only {len(both)} properties draw both types; these do not: {others}"


HEAD = "from hypothesis import given\nfrom tests.oracles.both_types import dtypes\n"


def test_what_counts_and_what_does_not() -> None:
    counted = [
        "@given(st.integers(), dtypes)\ndef test_it(n, dtype): zeros(dtype)",
        "@given(dtypes, st.integers())\ndef test_it(dtype, n): zeros(dtype)",
        "@given(dtype=dtypes | others)\ndef test_it(dtype): zeros(dtype)",
        "pairs = st.tuples(dtypes, counts)\n@settings(max_examples=9)\n@given(pairs)\ndef test_it(pair): zeros(*pair)",
        "@pytest.mark.parametrize('n', [1])\n@given(dtypes)\ndef test_it(n, dtype): zeros(n, dtype)",
        "class It(RuleBasedStateMachine):\n    @initialize(dtype=dtypes)\n    def begin(self, dtype): zeros(dtype)",
    ]
    for source in counted:
        both, others = properties(HEAD + source)
        assert (len(both), others) == (1, []), source
    left_out = [
        "@given(st.integers())\ndef test_it(n, dtype): zeros(dtype)",
        "@given(st.integers(), dtypes)\ndef test_it(n, dtype): zeros(n)",
        "@given(dtypes, st.integers())\ndef test_it(n, dtype): zeros(dtype)",
        "types = st.sampled_from([torch.float32])\n@given(types)\ndef test_it(dtype): zeros(dtype)",
        "class It(RuleBasedStateMachine):\n    @rule(n=counts)\n    def begin(self, n): zeros(n)",
    ]
    for source in left_out:
        both, others = properties(HEAD + source)
        assert (both, len(others)) == ([], 1), source
    both, others = properties(HEAD.replace("tests.oracles.both_types", "elsewhere") + counted[0])
    assert (both, others) == ([], ["test_it"])
    assert properties(HEAD + "def test_it(dtype): zeros(dtype)") == ([], [])
