"""What a guide says of itself: what it is, how many parameters it has, and how it was trained."""

from torch import nn

from pyro_dropout.mathematics.notebook_card import card


def note_training(guide: object, how: str, ignores: str = "") -> None:
    """Let a guide remember how it was trained, for its ``repr``; it forgets when its parameters change again.

    Args:
        guide: the guide.
        how: how it was trained.
        ignores: a sentence that it ignores its inputs, if it does.
    """
    if isinstance(guide, nn.Module):
        guide.__dict__["_trained_how"] = (how, ignores, _state(guide))


def _noted(guide: object) -> tuple[str, str]:
    """Return how a guide was trained, and that it ignores its inputs; empty if it has changed since."""
    how, ignores, state = getattr(guide, "_trained_how", ("", "", None))
    return (how, ignores) if isinstance(guide, nn.Module) and state == _state(guide) else ("", "")


def note_of(guide: object) -> str:
    """Return how a guide was trained; empty if it has changed since."""
    return _noted(guide)[0]


def ignored_inputs(guide: object) -> str:
    """Return the sentence that a guide ignores its inputs; empty if it does not."""
    return _noted(guide)[1]


def _state(guide: nn.Module) -> list[tuple[int, int]]:
    return [(value.data_ptr(), value._version) for value in guide.parameters()]


def facts_of(guide: nn.Module, **facts: object) -> dict[str, object]:
    """Return what is known of a guide by name; ``facts`` come first.

    Example:
        >>> import torch
        >>> facts_of(torch.nn.Linear(2, 1), kind="points")
        {'kind': 'points', 'parameters': '3'}
    """
    count = sum(value.numel() for value in guide.parameters())
    how = note_of(guide)
    return {**facts, "parameters": f"{count:,}", **({"trained": how} if how else {})}


def told(guide: nn.Module, facts: dict[str, object]) -> str:
    """Return the facts as one line."""
    return f"{type(guide).__name__}({', '.join(f'{name}: {value}' for name, value in facts.items())})"


def guide_card(guide: nn.Module, facts: dict[str, object]) -> str:
    """Return the facts as HTML, for notebooks."""
    return card(type(guide).__name__, facts)
