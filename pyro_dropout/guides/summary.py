"""What people see at work: an object in one line or as a card in a notebook, and how a guide was trained."""

import base64
import copy
import html
import io
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from torch import nn

from pyro_dropout.protocols import Axes


def card(title: str, facts: Mapping[str, object], draw: Callable[[Axes], object] | None = None) -> str:
    """Return a title, facts by name and a picture as HTML; ``draw`` draws the picture on matplotlib's axes."""
    lines = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in facts.items())
    return f"<div><b>{_text(title)}</b><table>{lines}</table>{'' if draw is None else picture(draw)}</div>"


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as HTML, the first column as headings."""
    top = "".join(f"<th>{_text(each)}</th>" for each in headings)
    lines = ("".join(f"<td>{_text(each)}</td>" for each in row[1:]) for row in rows)
    body = "".join(f"<tr><th>{_text(row[0])}</th>{line}</tr>" for row, line in zip(rows, lines, strict=True))
    return f"<table><tr>{top}</tr>{body}</table>"


def picture(draw: Callable[[Axes], object]) -> str:
    """Return a small picture as an HTML image that needs no file; the state of pyplot is not touched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 2.4), layout="constrained")
    draw(figure.subplots())
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'


def _text(value: object) -> str:
    return html.escape(str(value))


def note_training(guide: object, how: str, ignores: str = "") -> None:
    """Let a guide remember how it was trained, for its ``repr``; it forgets when its parameters change again.

    ``ignores`` is a sentence that it ignores its inputs, if it does.
    """
    if isinstance(guide, nn.Module):
        guide.__dict__["_trained_how"] = (how, ignores, _state(guide))


def note_of(guide: object, which: int = 0) -> str:
    """Return how a guide was trained; empty if it has changed since."""
    *noted, state = getattr(guide, "_trained_how", ("", "", None))
    return noted[which] if isinstance(guide, nn.Module) and state == _state(guide) else ""


def ignored_inputs(guide: object) -> str:
    """Return the sentence that a guide ignores its inputs; empty if it does not."""
    return note_of(guide, 1)


def _state(guide: nn.Module) -> list[tuple[int, int]]:
    return [(value.data_ptr(), value._version) for value in guide.parameters()]


class Summarised(nn.Module):
    """A guide that shows what is known of it as a line, and in notebooks as a card; ``_facts`` are its own, by name.

    A copy shares the model, unless that is copied with it. A pickled guide knows its sites, but has no model: that is
    often a function that cannot be pickled.
    """

    _model: tuple[Any]

    @abstractmethod
    def _facts(self) -> dict[str, object]: ...

    def _summary(self) -> dict[str, object]:
        count, how = sum(value.numel() for value in self.parameters()), note_of(self)
        return {**self._facts(), "parameters": f"{count:,}", **({"trained": how} if how else {})}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}: {value}' for name, value in self._summary().items())})"

    def _repr_html_(self) -> str:
        return card(type(self).__name__, self._summary())

    def __getstate__(self) -> dict[str, object]:
        for parameter in self.parameters():
            parameter.__dict__.pop("unconstrained", None)  # a weak reference that Pyro leaves
        return {**self.__dict__, "_model": (None,), "master": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy({**self.__getstate__(), "_model": None}, memo))
        made._model = (memo.get(id(self._model[0]), self._model[0]),)
        return made
