"""Layers with weights that come as one draw, as many draws at once, or as a draw for every data point.

Pyro puts sample dimensions in front and reserves one for the data plate: a matrix is then (P, 1, K, Q) and a bias
(P, 1, K), and results computed from them and inputs (N, Q) must be (P, N, K).

torch runs recurrent and attention layers in one kernel that takes a single set of weights. Written out step by step
they are made of ``F.linear``, which a handler can rewrite: the same draw is then used for a whole sequence, as in Gal
(2016).
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Size, Tensor, nn

from pyro_dropout.engines.torch_internals import onednn
from pyro_dropout.errors import NotFollowedError
from pyro_dropout.generative.inputs import AnyInputs, X, copies
from pyro_dropout.generative.layouts import computes_otherwise, is_conv1d
from pyro_dropout.generative.trial_run import run_for_shapes
from pyro_dropout.mathematics.per_data_point import (
    POINTS_FIRST,
    MisplacedPointsError,
    Placement,
    drawn_per_data_point,
)
from pyro_dropout.mathematics.shapes import broadcast_shape


def without_plate(value: Tensor) -> Tensor:
    """Return matrices (..., N, D) from a draw of them (..., 1, N, D)."""
    return value.squeeze(-3) if value.dim() > 2 else value


def add_bias(h: Tensor, bias: Tensor) -> Tensor:
    """Add a bias to each row of ``h``, (..., N, K); a bias of shape (..., 1, K) already has the row dimension."""
    return h + (bias if bias.dim() == 1 or bias.size(-2) == 1 else bias.unsqueeze(-2))


def linear(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return h Wᵀ + b, (..., N, K)."""
    if weight.dim() == 2 and (bias is None or bias.dim() == 1):
        return F.linear(h, weight, bias)
    product = h @ without_plate(weight).mT
    return product if bias is None else add_bias(product, bias)


def sample_dimensions(batch: Size) -> Size:
    """Return a batch shape without its last dimension, that of the plate "data"; Predictive omits that dimension."""
    return batch[:-1] if batch and batch[-1] == 1 else batch


def one_for_each_point(
    weights: Mapping[str, Tensor], dimensions: Mapping[str, int], x: X
) -> tuple[dict[str, Tensor], X, Size]:
    """Return weights without sample dimensions, matching inputs, and the sample dimensions of the result.

    Where weights are drawn for each data point inside the layers, P draws become P copies of every data point. Other
    weights are returned as they are, and broadcast. ``dimensions`` are how many each weight has of its own.
    """
    recipes = {site: drawn_per_data_point(value) for site, value in weights.items()}
    if all(recipe is None for recipe in recipes.values()):
        return dict(weights), x, Size()
    batches = {site: value.shape[: value.dim() - dimensions[site]] for site, value in weights.items()}
    particles = broadcast_shape(*map(sample_dimensions, batches.values()))
    single: dict[str, Tensor] = {}
    for site, value in weights.items():
        recipe, batch = recipes[site], batches[site]
        if recipe is not None:
            recipe.count = particles.numel() * len(x)
        elif batch.numel() > 1 and any(step for step, size in zip(value.stride(), batch, strict=False) if size > 1):
            raise NotFollowedError(
                f"site {site!r} has shared draws for many particles, but others have a draw for each point.", site
            )
        single[site] = value[(0,) * len(batch)] if recipe is None else recipe.weight
    if particles.numel() > 1:
        x = copies(x, particles.numel())
    return single, x, particles


def other_count(count: int) -> int:
    """Return another number of data points than ``count``, small and without small factors."""
    return 11 if count == 13 else 13


def check_points_first(
    run: Callable[[dict[str, Tensor], AnyInputs], object], weights: Mapping[str, Tensor], x: AnyInputs
) -> None:
    """Raise unless draws for each data point meet inputs with the data points first; ``run`` is the network.

    An input may have as many rows as there are data points and still not have one for each: a table of positions,
    learned queries, a sequence that comes first. So the network is run with another number of points: rows of the data
    change with it, and others do not.
    """
    count = other_count(len(x))
    recipes = {site: drawn_per_data_point(value) for site, value in weights.items()}
    fresh = {site: weights[site] if r is None else Placement(r, count).weight for site, r in recipes.items()}
    other = x[torch.arange(count, device=x.device) % len(x)]
    try:
        run_for_shapes(lambda: run(fresh, other), x.device.type == "cuda")
    except MisplacedPointsError as cause:
        raise misplaced(cause) from None
    except NotFollowedError:
        raise
    except Exception as cause:
        raise NotFollowedError(
            f"the network runs with {len(x)} data points but not with {count}, so a draw for each of them cannot be"
            f" checked: {cause}. Use shared draws (per_example=False)."
        ) from cause


def misplaced(cause: MisplacedPointsError) -> MisplacedPointsError:
    """Return the error for a site that met an input whose first dimension did not change with the number of points."""
    reason = (
        "is used on an input whose first dimension is not that of the data points: it does not change with their number"
    )
    return MisplacedPointsError(f"site {cause.site!r} {reason}. {POINTS_FIRST}", cause.site, f"it {reason}")


State = tuple[Tensor, ...]  # of a recurrent layer: h, and c of an LSTM


@contextlib.contextmanager
def written_out(net: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Within the context, layers of ``net`` that have weights drawn per data point run in matrix products."""
    recipes = {name: found for name, value in weights.items() if (found := drawn_per_data_point(value)) is not None}
    changed: list[nn.Module] = []
    fast = torch.backends.mha.get_fastpath_enabled()
    for path, module in net.named_modules() if recipes else ():
        kinds = (kind for kind in _WRITTEN_OUT if isinstance(module, kind))
        run = _run_conv1d if is_conv1d(module) else _WRITTEN_OUT.get(next(kinds, nn.Module))
        inside = [recipe for name, recipe in recipes.items() if name.startswith(f"{path}." if path else "")]
        if run is not None and inside and not computes_otherwise(module):
            for recipe in inside:
                recipe.reused = True  # one draw is used at every step of a sequence
            module.__dict__["forward"] = functools.partial(run, module)  # shadows the method until the context ends
            changed.append(module)
    try:
        if recipes:
            torch.backends.mha.set_fastpath_enabled(False)  # one kernel for a whole encoder layer
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]
        torch.backends.mha.set_fastpath_enabled(fast)


def recordable(modules: Iterable[nn.Module], recorded: bool) -> contextlib.AbstractContextManager[None]:
    """Within this context, where operations are recorded, an LSTM among ``modules`` uses those that can be compiled.

    On a CPU oneDNN has one kernel for a whole layer, and a compiled program cannot call it.
    """
    return onednn(not (recorded and any(isinstance(module, nn.LSTM) for module in modules)))


def _step(module: nn.RNNBase, x: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    """Take one step: input and state in, new state out (its first tensor is the output)."""
    w_ih, w_hh, b_ih, b_hh = weights
    h = state[0]
    from_x, from_h = F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh)  # type: ignore[arg-type]
    if isinstance(module, nn.LSTM):
        i, f, g, o = (from_x + from_h).chunk(4, -1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    if isinstance(module, nn.GRU):
        (r_x, z_x, n_x), (r_h, z_h, n_h) = from_x.chunk(3, -1), from_h.chunk(3, -1)
        n = torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
        z = torch.sigmoid(z_x + z_h)
        return ((1 - z) * n + z * h,)
    squash = torch.relu if module.nonlinearity == "relu" else torch.tanh
    return (squash(from_x + from_h),)


def _run_layer(module: nn.RNNBase, x: object, hx: Tensor | State | None = None) -> tuple[Tensor, Tensor | State]:
    """Run an RNN, LSTM or GRU of any number of layers, in one or both directions."""
    if not isinstance(x, Tensor) or x.dim() != 3:
        raise NotFollowedError("per-data-point draws need recurrent input (N, T, features), not packed or unbatched.")
    if module.proj_size:
        raise NotFollowedError("per-data-point draws do not cover LSTMs with proj_size; use shared draws.")
    h = x if module.batch_first else x.transpose(0, 1)
    directions = 2 if module.bidirectional else 1
    is_lstm = isinstance(module, nn.LSTM)
    if hx is None:
        zero = h.new_zeros(module.num_layers * directions, h.shape[0], module.hidden_size)
        hx = (zero, zero) if is_lstm else zero
    start = hx if isinstance(hx, tuple) else (hx,)
    ends: list[State] = []
    for layer in range(module.num_layers):
        outputs = []
        for back in range(directions):
            suffix = f"l{layer}" + "_reverse" * back
            names = [f"{part}_{suffix}" for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            weights = [getattr(module, name, None) for name in names]
            state = tuple(each[layer * directions + back] for each in start)
            seen: list[Tensor] = []
            for t in reversed(range(h.shape[1])) if back else range(h.shape[1]):
                state = _step(module, h[:, t], state, weights)
                seen.append(state[0])
            outputs.append(torch.stack(seen[::-1] if back else seen, 1))
            ends.append(state)
        h = torch.cat(outputs, -1)
        if module.dropout and layer < module.num_layers - 1:
            h = F.dropout(h, module.dropout, module.training)
    last = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    return (h if module.batch_first else h.transpose(0, 1)), (last if is_lstm else last[0])


def _run_conv1d(module: Any, x: Tensor) -> Tensor:
    """Run transformers' Conv1D, which lays all positions out in one dimension before its product."""
    result: Tensor = x @ module.weight + module.bias
    return result


def _run_attention(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run multi-head attention; data points must come first."""
    if not module.batch_first or query.dim() != 3:
        raise NotFollowedError("per-data-point draws need attention with batch_first=True and inputs (N, T, features).")
    if module.bias_k is not None or module.add_zero_attn or not module._qkv_same_embed_dim:
        raise NotFollowedError(
            "per-data-point draws do not cover kdim, vdim, add_bias_kv and add_zero_attn; use shared draws."
        )
    # One matrix holds all three maps, and is applied to each input.
    whole = {id(t): F.linear(t, module.in_proj_weight, module.in_proj_bias).chunk(3, -1) for t in (query, key, value)}
    q, k, v = whole[id(query)][0], whole[id(key)][1], whole[id(value)][2]
    heads, width = module.num_heads, module.head_dim
    q, k, v = (t.unflatten(-1, (heads, width)).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.mT / math.sqrt(width)
    if attn_mask is not None and attn_mask.dim() != 2:
        attn_mask = attn_mask.unflatten(0, (-1, heads))
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask[:, None, None, :]
    for mask in (attn_mask, key_padding_mask):
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = F.dropout(scores.softmax(-1), module.dropout, module.training)
    out = F.linear((weights @ v).transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    seen = weights.mean(1) if average_attn_weights else weights
    return out, seen if need_weights else None


_WRITTEN_OUT: dict[type[nn.Module], Callable[..., object]] = {
    nn.RNNBase: _run_layer,
    nn.MultiheadAttention: _run_attention,
}
