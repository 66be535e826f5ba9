"""What a guide says of itself: what it is, how many parameters it has, and how it was trained."""

from torch import nn

from pyro_dropout.mathematics.notebook_card import card


def note_training(guide: object, how: str) -> None:
    """Let a guide remember how it was trained, for its ``repr``; it forgets when its parameters change again."""
    if isinstance(guide, nn.Module):
        guide.__dict__["_trained_how"] = (how, _state(guide))


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
    how, state = getattr(guide, "_trained_how", ("", []))
    return {**facts, "parameters": f"{count:,}", **({"trained": how} if how and state == _state(guide) else {})}


def told(guide: nn.Module, facts: dict[str, object]) -> str:
    """Return the facts as one line."""
    return f"{type(guide).__name__}({', '.join(f'{name}: {value}' for name, value in facts.items())})"


def guide_card(guide: nn.Module, facts: dict[str, object]) -> str:
    """Return the facts as HTML, for notebooks."""
    return card(type(guide).__name__, facts)
