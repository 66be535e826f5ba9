"""Thompson sampling: act as if one draw from the posterior were the truth (§5.2).

An action is then chosen with the probability, under the posterior, that it is the best one. How long uncertain actions
are tried depends on whether the posterior narrows with data; that of dropout with a fixed ``keep`` need not.
"""

from torch import Tensor

from pyro_dropout.generative.own_noise import check_no_noise
from pyro_dropout.mathematics.errors import ShapeError
from pyro_dropout.mathematics.shapes import Int
from pyro_dropout.prediction.predict import predict
from pyro_dropout.protocols import PyroModel


def thompson(model: PyroModel, posterior: object, contexts: Tensor, *, seed: int | None = None) -> Int[Tensor, "..."]:
    """Choose an action for each context: the best one under a single draw of the weights.

    All contexts and all actions share the draw, so actions are compared under one function. Every call makes a new
    draw.

    Args:
        model: a Pyro model of the reward, with one target: ``Gaussian``, ``Bernoulli`` or ``Poisson``.
        posterior: a guide of its weights.
        contexts: the model's input for each action: (N, A, features...) for N contexts of A actions, or
            (A, features) for one context.
        seed: makes the draw reproducible, and leaves torch's random state unchanged.

    Returns:
        The index of the action for each context, (N,); for one context, ().

    Example:
        >>> import torch, pyro_dropout as pd
        >>> model = pd.BayesianNet(torch.nn.Linear(2, 1, bias=False))
        >>> guide = pd.AutoMeanField(model, init=lambda name, shape: torch.zeros(shape), init_scale=1.0)
        >>> arms = torch.eye(2)  # two actions, equally good a priori
        >>> chosen = [pd.thompson(model, guide, arms, seed=k).item() for k in range(20)]
        >>> set(chosen) == {0, 1}
        True
    """
    if not isinstance(contexts, Tensor) or contexts.dim() < 2 or contexts.numel() == 0:
        given = f"shape {tuple(contexts.shape)}" if isinstance(contexts, Tensor) else type(contexts).__name__
        raise ShapeError(f"contexts must be (N, A, features...) or (A, features), and not empty; got {given}.")
    lead = contexts.shape[: 1 if contexts.dim() == 2 else 2]
    x = contexts.flatten(0, len(lead) - 1)
    reward = predict(model, posterior, x, samples=1, shared=True, seed=seed, keep_samples=True).mean
    check_no_noise(model, "Thompson sampling")  # found when the network runs
    if reward.shape[-1] != 1:
        raise ShapeError(f"model must have one target, the reward of an action; it has {reward.shape[-1]}.")
    best: Tensor = reward.reshape(lead).argmax(-1)
    return best
