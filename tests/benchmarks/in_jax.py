"""The same steps in JAX, many of them in one compiled loop: guides written by hand, and NumPyro's mean field."""

import importlib
import itertools
import os
from typing import Any

import numpy as np
import torch

from tests.benchmarks.settings import DROP, LEARNING_RATE, TAU, Setting
from tests.benchmarks.timing import Absent, Advance, Contestant

GUIDES = ("dropout", "mean field", "concrete", "multiplicative")  # those that are written here


def needed(name: str) -> Any:
    """Import a package, or say that it is absent."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as cause:
        raise Absent(name) from cause


def started(device: str, precision: str) -> Any:
    """Return JAX, told to share the GPU with torch, or to leave it alone."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if torch.get_num_threads() == 1:  # otherwise XLA takes all cores, and there is no other number to tell it
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    jax = needed("jax")
    jax.config.update("jax_default_matmul_precision", "tensorfloat32" if precision == "high" else "highest")
    return jax


def looped(jax: Any, setting: Setting, device: str, step: Any, start: Any) -> tuple[Advance, int]:
    """Return ``step`` in a loop of fixed length, compiled as a whole; it is given the rows of its batch."""
    heavy = sum(a * b for a, b in itertools.pairwise(setting.layers)) > 100_000
    length = (50 if heavy else 2000) if device == "cuda" else (2 if heavy else 200)
    dice, rows = np.random.default_rng(0), None
    if setting.batch < setting.points:
        rows = jax.numpy.asarray(np.stack([dice.permutation(setting.points)[: setting.batch] for _ in range(length)]))
    loop = jax.jit(lambda carry: jax.lax.scan(step, carry, rows, length=length))
    state = [start]
    precision = jax.config.jax_default_matmul_precision  # another contestant may set it later, for all of JAX

    def advance(steps: int) -> None:
        with jax.default_matmul_precision(precision):
            for _ in range(steps // length):
                state[0], losses = loop(state[0])
            jax.block_until_ready(losses)

    return advance, length


def by_hand(setting: Setting, device: str, precision: str = "highest") -> Contestant:
    """Return a guide with its KL, and an optimiser, as one writes them in JAX; "bf16" for products in bfloat16."""

    def build() -> tuple[Advance, int]:
        jax = started(device, precision)
        jnp = jax.numpy
        x, y = (jnp.asarray(np.asarray(each)) for each in setting.data("cpu"))
        net = setting.network(dropout=False)
        layers = [(e.weight.detach().numpy().T, e.bias.detach().numpy()) for e in net if hasattr(e, "weight")]
        layers = [(jnp.asarray(w), jnp.asarray(b)) for w, b in layers]
        start: Any = [(w, b, *_more(jnp, setting.guide, w, b)) for w, b in layers]
        act = _activation(jax, setting.activation.__name__)

        def product(h: Any, w: Any) -> Any:
            return (h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(h.dtype) if precision == "bf16" else h @ w

        def loss(layers: Any, key: Any, rows: Any) -> Any:
            h, target = (x, y) if rows is None else (x[rows], y[rows])
            kl = 0.0
            for k, layer in enumerate(layers):
                key, own = jax.random.split(key)
                h, more = _layer(jax, setting.guide, layer, h if k == 0 else act(h), own, product)
                kl = kl + more
            heat = setting.temperature if isinstance(setting.temperature, float) else 1.0
            return len(x) / len(h) * _misfit(jax, setting.likelihood, h, target) + heat * kl

        def step(carry: Any, rows: Any) -> Any:
            layers, first, second, t, key = carry
            key, own = jax.random.split(key)
            value, slopes = jax.value_and_grad(loss)(layers, own, rows)
            t = t + 1
            rate = LEARNING_RATE * (0.5 ** (t / 1000) if setting.schedule else 1.0)
            if setting.clip:
                norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(slopes)))
                slopes = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / (norm + 1e-6)), slopes)
            if setting.optim == "sgd":
                first = jax.tree.map(lambda m, g: 0.9 * m + g, first, slopes)
                layers = jax.tree.map(lambda p, m: p - 1e-3 * rate * m, layers, first)
                return (layers, first, second, t, key), value
            first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slopes)
            second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, slopes)

            def moved(p: Any, m: Any, v: Any) -> Any:
                return p - rate * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)

            return (jax.tree.map(moved, layers, first, second), first, second, t, key), value

        zeros = jax.tree.map(jnp.zeros_like, start)
        return looped(jax, setting, device, step, (start, zeros, zeros, jnp.zeros(()), jax.random.PRNGKey(1)))

    return Contestant("JAX by hand, lax.scan" + (", bf16" if precision == "bf16" else ""), build)


def _activation(jax: Any, name: str) -> Any:
    special = {"GELU": lambda z: jax.nn.gelu(z, approximate=False), "LeakyReLU": jax.nn.leaky_relu}
    return special[name] if name in special else getattr(jax.nn, name.lower())


def _more(jnp: Any, guide: str, w: Any, b: Any) -> tuple[Any, ...]:
    """Return what a guide trains besides means: log widths, or a logit of each row."""
    if guide == "mean field":
        return jnp.full_like(w, -4.0), jnp.full_like(b, -4.0)
    return (jnp.full(w.shape[:1], 2.2),) if guide == "concrete" else ()


def _layer(jax: Any, guide: str, layer: Any, h: Any, key: Any, product: Any) -> tuple[Any, Any]:
    """Return the outputs of a layer with noise of its own for each point, and its KL."""
    jnp, (w, b, *more) = jax.numpy, layer
    if guide == "mean field":
        widths, own = more
        keys = jax.random.split(key)
        spread = jnp.sqrt((h**2) @ jnp.exp(2 * widths) + 1e-12)
        noise = spread * jax.random.normal(keys[0], spread.shape)
        bias = b + jnp.exp(own) * jax.random.normal(keys[1], spread.shape)
        kl = sum(((jnp.exp(2 * s) + m**2) / 2 - s).sum() for m, s in ((w, widths), (b, own)))
        return product(h, w) + noise + bias, kl
    kl = (w**2).sum() / 2 + (b**2).sum() / 2
    if guide == "multiplicative":
        return product(h * (1 + DROP**0.5 * jax.random.normal(key, h.shape)), w) + b, kl
    if guide == "concrete":
        (logit,) = more
        u = jax.random.uniform(key, h.shape, minval=1e-6, maxval=1 - 1e-6)
        keep = jax.nn.sigmoid((logit + jnp.log(u) - jnp.log1p(-u)) / 0.1)
        p = jax.nn.sigmoid(logit)
        entropy = -(p * jnp.log(p) + (1 - p) * jnp.log1p(-p)).sum()
        return product(h * keep, w) + b, kl - entropy
    return product(h * jax.random.bernoulli(key, 1 - DROP, h.shape), w) + b, kl


def _misfit(jax: Any, likelihood: str, h: Any, y: Any) -> Any:
    jnp = jax.numpy
    if likelihood == "classes":
        return -jnp.take_along_axis(jax.nn.log_softmax(h), y[:, None], 1).sum()
    if likelihood == "counts":
        return (jnp.exp(h) - y * h).sum()
    if likelihood == "yes or no":
        return (jax.nn.softplus(h) - y * h).sum()
    return TAU / 2 * ((h - y) ** 2).sum()


def numpyro_mean_field(setting: Setting, device: str, precision: str) -> Contestant:
    """Return NumPyro's SVI with AutoNormal."""

    def build() -> tuple[Advance, int]:
        jax, numpyro = started(device, precision), needed("numpyro")
        autoguide, infer, optim = (needed(f"numpyro.{name}") for name in ("infer.autoguide", "infer", "optim"))
        dist = needed("numpyro.distributions")
        x, y = (jax.numpy.asarray(np.asarray(each)) for each in setting.data("cpu"))

        def model() -> None:
            h = x
            for k, (a, b) in enumerate(itertools.pairwise(setting.layers)):
                weight = numpyro.sample(f"w{k}", dist.Normal(0, a**-0.5).expand([a, b]).to_event(2))
                bias = numpyro.sample(f"b{k}", dist.Normal(0, 1).expand([b]).to_event(1))
                h = (h if k == 0 else jax.nn.relu(h)) @ weight + bias
            normal = setting.likelihood == "Gaussian"
            likelihood = dist.Normal(h, TAU**-0.5).to_event(2) if normal else dist.Categorical(logits=h).to_event(1)
            numpyro.sample("y", likelihood, obs=y)

        svi = infer.SVI(model, autoguide.AutoNormal(model), optim.Adam(LEARNING_RATE), infer.Trace_ELBO())
        start = svi.init(jax.random.PRNGKey(2))
        return looped(jax, setting, device, lambda state, _: svi.update(state), start)

    return Contestant("NumPyro AutoNormal, lax.scan", build)
