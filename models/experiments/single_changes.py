"""What one change of a posterior gains, all else being equal: by problem, and seed by seed."""

import csv
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import torch

Key = tuple[str, ...]  # what a posterior is, such as (guide, prior, start, T, read)
Scores = Mapping[Key, Mapping[str, float]]
Found = Mapping[int, Mapping[str, Scores]]  # by seed and problem
VISIBLE = 0.02  # nats a point: a smaller gain would be lost in the noise of training


def compared(
    found: Found, changes: Sequence[tuple[str, int, str, str]], kinds: Sequence[str]
) -> list[dict[str, object]]:
    """Return one row for each change and problem, with what it gains for each seed.

    Args:
        found: the scores of every posterior; "log p" is compared.
        changes: (in words, which part of a key changes, from, to).
        kinds: first parts of the keys that count.

    Example:
        >>> from experiments.single_changes import compared
        >>> found = {0: {"line": {("a", "cold"): {"log p": 1.0}, ("a", "warm"): {"log p": 0.5}}}}
        >>> compared(found, [("warmth", 1, "cold", "warm")], ["a"])[0]["median gain"]
        '-0.5'
    """
    rows = []
    for (words, k, before, after), problem in product(changes, next(iter(found.values()))):
        columns = []
        for scores in (data[problem] for data in found.values()):
            pairs = [(key, (*key[:k], after, *key[k + 1 :])) for key in scores if key[0] in kinds and key[k] == before]
            gains = [scores[new]["log p"] - scores[old]["log p"] for old, new in pairs if new in scores]
            if gains:
                gained, lost = (sum(sign * gain > VISIBLE for gain in gains) for sign in (1, -1))
                columns.append((str(gained), str(lost), f"{torch.tensor(gains).median().item():.3g}", len(gains)))
        if columns:
            more, less, middle, counts = zip(*columns, strict=True)
            row: dict[str, object] = {"change": words, "problem": problem, "comparisons": counts[0]}
            titles = (f"gain more than {VISIBLE:g}", f"lose more than {VISIBLE:g}", "median gain")
            rows.append(row | dict(zip(titles, map(", ".join, (more, less, middle)), strict=True)))
    return rows


def write_rows(path: Path, found: Found, titles: Sequence[str]) -> None:
    """Write every posterior as a row of a CSV file: problem, seed, what it is, and its scores."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["problem", "seed", *titles])
        for seed, data in found.items():
            for problem, scores in data.items():
                for key, score in scores.items():
                    writer.writerow([problem, seed, *key, *(f"{value:.5g}" for value in score.values())])
