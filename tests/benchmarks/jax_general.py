"""The steps of ``tests.benchmarks.general`` by hand in JAX: many of them in one compiled loop, with given batches."""

import time
from typing import Any

import numpy as np

from tests.benchmarks.jax_peers import started

GUIDES = ("dropout", "mean field", "concrete", "multiplicative")  # those that are written here
LENGTH = 2000  # steps of a loop


def seconds(setting: Any, device: str, rounds: int) -> float:
    """Return the seconds of one step, the best of some rounds."""
    jax = started(device, "highest")
    jnp = jax.numpy
    x, y = (jnp.asarray(np.asarray(each)) for each in setting.data())
    net = setting.network(dropout=False)
    layers = [(each.weight.detach().numpy().T, each.bias.detach().numpy()) for each in net if hasattr(each, "weight")]
    layers = [(jnp.asarray(w), jnp.asarray(b)) for w, b in layers]
    act = _activation(jax, setting.activation.__name__)
    count, batch = len(x), setting.batch
    start: Any = [(w, b, *_more(jnp, setting.guide, w, b)) for w, b in layers]

    def loss(layers: Any, key: Any, index: Any, t: Any) -> Any:
        h, kl = x[index], 0.0
        for k, layer in enumerate(layers):
            key, own = jax.random.split(key)
            h = h if k == 0 else act(h)
            h, more = _layer(jax, setting.guide, layer, h, own)
            kl = kl + more
        misfit = _misfit(jax, setting.likelihood, h, y[index])
        heat = setting.temperature if isinstance(setting.temperature, float) else 1.0
        return count / batch * misfit + heat * kl

    def step(carry: Any, index: Any) -> Any:
        layers, first, second, t, key = carry
        key, own = jax.random.split(key)
        value, slopes = jax.value_and_grad(loss)(layers, own, index, t)
        t, rate = t + 1, 1e-3
        if setting.clip:
            norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(slopes)))
            slopes = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / (norm + 1e-6)), slopes)
        rate = rate * 0.5 ** (t / 1000) if setting.schedule else rate
        if setting.optim == "sgd":
            first = jax.tree.map(lambda m, g: 0.9 * m + g, first, slopes)
            layers = jax.tree.map(lambda p, m: p - 1e-3 * rate * m, layers, first)
            return (layers, first, second, t, key), value
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slopes)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, slopes)

        def moved(p: Any, m: Any, v: Any) -> Any:
            return p - rate * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)

        return (jax.tree.map(moved, layers, first, second), first, second, t, key), value

    dice = np.random.default_rng(0)
    order = jnp.asarray(np.stack([dice.permutation(count)[:batch] for _ in range(LENGTH)]))
    loop = jax.jit(lambda carry: jax.lax.scan(step, carry, order))
    zeros = jax.tree.map(jnp.zeros_like, start)
    state = (start, zeros, zeros, jnp.zeros(()), jax.random.PRNGKey(1))
    best = float("inf")
    for _ in range(rounds + 1):  # the first one compiles
        begin = time.perf_counter()
        state, losses = loop(state)
        jax.block_until_ready(losses)
        best = min(best, (time.perf_counter() - begin) / LENGTH)
    return best


def _activation(jax: Any, name: str) -> Any:
    nn = jax.nn
    return {
        "ReLU": nn.relu,
        "Tanh": jax.numpy.tanh,
        "GELU": lambda z: nn.gelu(z, approximate=False),
        "SiLU": nn.silu,
        "ELU": nn.elu,
        "LeakyReLU": nn.leaky_relu,
        "Softplus": nn.softplus,
    }[name]


def _more(jnp: Any, guide: str, w: Any, b: Any) -> tuple[Any, ...]:
    """Return what a guide trains besides means: log widths, or a logit of each row."""
    if guide == "mean field":
        return jnp.full_like(w, -4.0), jnp.full_like(b, -4.0)
    return (jnp.full(w.shape[:1], 2.2),) if guide == "concrete" else ()


def _layer(jax: Any, guide: str, layer: Any, h: Any, key: Any) -> tuple[Any, Any]:
    """Return the outputs of a layer with noise of its own for each point, and its KL."""
    jnp, (w, b, *more) = jax.numpy, layer
    if guide == "mean field":
        widths, own = more
        keys = jax.random.split(key)
        spread = jnp.sqrt((h**2) @ jnp.exp(2 * widths) + 1e-12)
        noise = spread * jax.random.normal(keys[0], spread.shape)
        bias = b + jnp.exp(own) * jax.random.normal(keys[1], spread.shape)
        kl = sum(((jnp.exp(2 * s) + m**2) / 2 - s).sum() for m, s in ((w, widths), (b, own)))
        return h @ w + noise + bias, kl
    kl = (w**2).sum() / 2 + (b**2).sum() / 2
    if guide == "multiplicative":
        return (h * (1 + 0.1**0.5 * jax.random.normal(key, h.shape))) @ w + b, kl
    if guide == "concrete":
        (logit,) = more
        u = jax.random.uniform(key, h.shape, minval=1e-6, maxval=1 - 1e-6)
        keep = jax.nn.sigmoid((logit + jnp.log(u) - jnp.log1p(-u)) / 0.1)
        p = jax.nn.sigmoid(logit)
        entropy = -(p * jnp.log(p) + (1 - p) * jnp.log1p(-p)).sum()
        return (h * keep) @ w + b, kl - entropy
    return (h * jax.random.bernoulli(key, 0.9, h.shape)) @ w + b, kl


def _misfit(jax: Any, likelihood: str, h: Any, y: Any) -> Any:
    jnp = jax.numpy
    if likelihood == "classes":
        return -jnp.take_along_axis(jax.nn.log_softmax(h), y[:, None], 1).sum()
    if likelihood == "counts":
        return (jnp.exp(h) - y * h).sum()
    if likelihood == "yes or no":
        return (jax.nn.softplus(h) - y * h).sum()
    return 2.0 * ((h - y) ** 2).sum()
