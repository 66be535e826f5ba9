"""The groups of rows that a column of categories makes."""

from torch import Tensor

from pyro_dropout.mathematics.errors import PyroDropoutError
from pyro_dropout.tables.encoding import Encoding


def group_labels(encoding: Encoding, x: Tensor, name: str) -> list[str]:
    """Return the category of each encoded row in a column of categories; "" where it is missing."""
    start = 0
    for column in encoding.inputs:
        width = len(column.features)
        if column.name == name:
            if column.categories is None:
                raise PyroDropoutError(f"groups: the column {name!r} holds numbers; a column of categories is needed.")
            labels = [*column.categories, *(["(other)"] if column.other else [])]
            part = x[:, start : start + len(labels)]
            best = part.max(-1)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            return [labels[place] if value == 1 else "" for place, value in pairs]
        start += width
    known = ", ".join(column.name for column in encoding.inputs if column.categories is not None)
    raise PyroDropoutError(f"groups: {name!r} is not a column of categories among the inputs ({known or 'none'}).")
