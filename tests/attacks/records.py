"""Mutations of ``run.json``: wrong types, ranges, texts, sizes and structure, and lists in another order."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyro_dropout.tabular.run_record import identity_of

Mutation = Callable[[Any, random.Random], str]  # changes a record, or returns the text to write instead

_TYPES: list[Any] = [None, True, False, [], {}, "", "text", 3, 3.5, [[]], [None], {"a": []}, [1, "a"], "auto"]
_NUMBERS: list[Any] = [
    -1, 0, 1, 2, 1.0, 0.5, -0.0, 2**31, 2**32, 2**63, 2**64, 2**70, 10**9, 10**12, 10**30, 1e308, -1e308, 5e-324,
    float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
_TEXTS = [
    "a\0b", "\ud800", "\udcff.csv", "", " ", "\x1b[2J", "a\nb", "../../run.json", "/dev/zero", "/dev/stdin",
    "/proc/self/mem", "/", ".", "~", "\u202e", "x" * 300, "x" * 10_000, "x" * 2_000_000, "NaN", "=1+1", "0" * 64,
]  # fmt: skip


def leaves(record: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of everything in a record, sections and lists included."""
    inner = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    found = [(*path, key) for key, _ in inner]
    inner = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    return found + [each for key, value in inner for each in leaves(value, (*path, key))]


def put(record: Any, path: tuple[Any, ...], value: Any) -> None:
    """Replace what is at a path."""
    for key in path[:-1]:
        record = record[key]
    record[path[-1]] = value


def at(record: Any, path: tuple[Any, ...]) -> Any:
    """Return what is at a path."""
    for key in path:
        record = record[key]
    return record


def _chosen(record: Any, dice: random.Random, kind: type | tuple[type, ...]) -> tuple[Any, ...]:
    return dice.choice([path for path in leaves(record) if isinstance(at(record, path), kind)])


def _types(record: Any, dice: random.Random) -> str:
    put(record, dice.choice(leaves(record)), dice.choice(_TYPES))
    return ""


def _ranges(record: Any, dice: random.Random) -> str:
    path = _chosen(record, dice, (int, float))
    if dice.random() < 0.15:
        put(record, path, "DIGITS")
        sign, digits = dice.choice(["", "-"]), dice.choice([20, 400, 5000, 100_000])
        return json.dumps(record).replace('"DIGITS"', sign + "9" * digits)
    put(record, path, dice.choice(_NUMBERS))
    return ""


def _texts(record: Any, dice: random.Random) -> str:
    put(record, _chosen(record, dice, str), dice.choice(_TEXTS))
    return ""


def _sizes(record: Any, dice: random.Random) -> str:
    if dice.random() < 0.4:
        section, key = dice.choice([("model", "width"), ("model", "members"), ("training", "batch_size")])
        record[section][key] = dice.choice([1, 3, 5, 100, 10**6, 10**9, 10**12])
        return ""
    path = _chosen(record, dice, list)
    found = at(record, path)
    put(record, path, dice.choice([found[:-1], found * 2, found * 1000, found[:1], [], ["x"] * 100_000, [found] * 50]))
    return ""


def _structure(record: Any, dice: random.Random) -> str:
    text, path = json.dumps(record, indent=1), dice.choice(leaves(record))
    cut = dice.randrange(len(text))
    below = at(record, path[:-1])
    choice = dice.randrange(9)
    if choice == 0:
        del below[path[-1]]
        return ""
    if choice == 1:
        target = _chosen(record, dice, dict)
        at(record, target)[dice.choice(["colour", "file", "width", "classes", "run"])] = dice.choice(_TYPES)
        return ""
    if choice == 2:
        one, two = dice.sample(leaves(record), 2)
        if one[: len(two)] != two and two[: len(one)] != one:
            first, second = at(record, one), at(record, two)
            put(record, one, second), put(record, two, first)
        return ""
    if choice == 3:
        return text[:cut]
    if choice == 4:
        return text[:cut] + dice.choice("{}[],:\"'0\\\0é") + text[cut + 1 :]
    if choice == 5:
        return text + dice.choice(["x", "{}", "\0", text])
    if choice == 6:
        return dice.choice(["[", '{"a":']) * dice.choice([10, 1000, 100_000])
    if choice == 7:
        return dice.choice(["\ufeff" + text, "[" + text + "]", "null", "3", '"run"', "[]", "{}", " " * 100_000])
    return text.replace("{", '{"format": 1, "width": 7, "steps": 1, ', 1)  # the same key twice


def _orders(record: Any, dice: random.Random) -> str:
    """Put the classes, the categories, the inputs, the ranges or the bounds of one into another order."""
    encoding = record["encoding"]
    lists = [encoding["inputs"], encoding["classes"], encoding["ranges"], *encoding["ranges"]]
    lists += [column["categories"] for column in encoding["inputs"] if column["categories"]]
    lists += [column["fill"] for column in encoding["inputs"]]
    chosen = dice.choice([each for each in lists if len(each) > 1])
    before = list(chosen)
    while chosen == before and len(set(map(str, before))) > 1:
        dice.shuffle(chosen)
    return ""


KINDS: dict[str, Mutation] = {
    "types": _types,
    "ranges": _ranges,
    "texts": _texts,
    "sizes": _sizes,
    "structure": _structure,
    "order of classes, categories, inputs": _orders,
}


def mutate(folder: Path, kind: str, dice: random.Random) -> str:
    """Change the record in a folder and describe how; half of them get a valid identity, some an older format."""
    path = folder / "run.json"
    before = json.loads(path.read_text("utf-8"))
    record = json.loads(path.read_text("utf-8"))
    text, how = KINDS[kind](record, dice), ""
    if not text and dice.random() < 0.5:
        try:
            record["identity"] = identity_of(record)
            how = ", with a valid identity"
        except (KeyError, AttributeError, TypeError, ValueError):
            pass
    if not text and dice.random() < 0.1:
        record["format"], how = 1, ", as an older version wrote it"
        record.pop("identity", None)
    path.write_bytes((text or json.dumps(record)).encode("utf-8", "surrogatepass"))
    changed = [each for each in leaves(before) if not _same(before, record, each)]
    return f"{text[:40]!r}" if text else f"{changed[-1:]}{how}"


def _same(before: Any, after: Any, path: tuple[Any, ...]) -> bool:
    try:
        return bool(at(before, path) == at(after, path))
    except (LookupError, TypeError):
        return False
