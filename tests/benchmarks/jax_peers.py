"""The same steps in JAX, many of them in one compiled loop: dropout written by hand, and NumPyro's mean field."""

import os
from typing import Any

import torch

from tests.benchmarks.ours import LEARNING_RATE
from tests.benchmarks.peers import needed
from tests.benchmarks.sizes import DROP, TAU, Size
from tests.benchmarks.timing import Advance, Contestant


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


def data(jax: Any, size: Size) -> tuple[Any, Any]:
    """Return one batch of noise."""
    keys = jax.random.split(jax.random.PRNGKey(0), 2)
    x = jax.random.normal(keys[0], (size.batch, size.layers[0]))
    if size.classes:
        return x, jax.random.randint(keys[1], (size.batch,), 0, size.layers[-1])
    return x, jax.random.normal(keys[1], (size.batch, size.layers[-1]))


def looped(jax: Any, size: Size, device: str, step: Any, start: Any) -> tuple[Advance, int]:
    """Return ``step`` in a loop of fixed length, compiled as a whole."""
    heavy = size.weights > 100_000
    length = (50 if heavy else 500) if device == "cuda" else (2 if heavy else 200)
    loop = jax.jit(lambda carry: jax.lax.scan(step, carry, None, length=length))
    state = [start]
    precision = jax.config.jax_default_matmul_precision  # another contestant may set it later, for all of JAX

    def advance(steps: int) -> None:
        with jax.default_matmul_precision(precision):
            for _ in range(steps // length):
                state[0], losses = loop(state[0])
            jax.block_until_ready(losses)

    return advance, length


def dropout(size: Size, device: str, precision: str) -> tuple[Advance, int]:
    """Return dropout with its weight decay, and Adam, as one writes them in JAX; "bf16" for products in bfloat16."""
    jax = started(device, precision)
    jnp = jax.numpy
    x, y = data(jax, size)
    key = jax.random.PRNGKey(1)
    draw = jax.random.normal
    layers = [(draw(k, s) / s[0] ** 0.5, jnp.zeros(s[1])) for k, s in enumerate_keys(jax, key, size.shapes)]

    def loss(layers: Any, key: Any) -> Any:
        h = x
        for k, (weight, bias) in enumerate(layers):
            key, own = jax.random.split(key)
            h = h if k == 0 else jax.nn.relu(h)
            h = h * jax.random.bernoulli(own, 1 - DROP, h.shape)
            low = jnp.bfloat16 if precision == "bf16" else h.dtype
            h = (h.astype(low) @ weight.astype(low)).astype(h.dtype) + bias
        if size.classes:
            misfit = -jnp.take_along_axis(jax.nn.log_softmax(h), y[:, None], 1).sum()
        else:
            misfit = TAU / 2 * ((h - y) ** 2).sum()
        return misfit + sum((1 - DROP) / 2 * (w**2).sum() + (b**2).sum() / 2 for w, b in layers)

    def step(carry: Any, _: Any) -> Any:
        layers, first, second, t, key = carry
        key, own = jax.random.split(key)
        value, slopes = jax.value_and_grad(loss)(layers, own)
        t = t + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slopes)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, slopes)

        def moved(p: Any, m: Any, v: Any) -> Any:
            return p - LEARNING_RATE * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)

        return (jax.tree.map(moved, layers, first, second), first, second, t, key), value

    zeros = jax.tree.map(jnp.zeros_like, layers)
    return looped(jax, size, device, step, (layers, zeros, zeros, jnp.zeros(()), key))


def enumerate_keys(jax: Any, key: Any, shapes: list[tuple[int, int]]) -> Any:
    """Pair every shape with a random key of its own."""
    return zip(jax.random.split(key, len(shapes)), shapes, strict=True)


def numpyro_mean_field(size: Size, device: str, precision: str) -> tuple[Advance, int]:
    """Return NumPyro's SVI with AutoNormal."""
    jax = started(device, precision)
    numpyro = needed("numpyro")
    autoguide, infer, optim = (needed(f"numpyro.{name}") for name in ("infer.autoguide", "infer", "optim"))
    dist = needed("numpyro.distributions")
    x, y = data(jax, size)

    def model() -> None:
        h = x
        for k, (a, b) in enumerate(size.shapes):
            weight = numpyro.sample(f"w{k}", dist.Normal(0, a**-0.5).expand([a, b]).to_event(2))
            bias = numpyro.sample(f"b{k}", dist.Normal(0, 1).expand([b]).to_event(1))
            h = (h if k == 0 else jax.nn.relu(h)) @ weight + bias
        likelihood = dist.Categorical(logits=h).to_event(1) if size.classes else dist.Normal(h, TAU**-0.5).to_event(2)
        numpyro.sample("y", likelihood, obs=y)

    svi = infer.SVI(model, autoguide.AutoNormal(model), optim.Adam(LEARNING_RATE), infer.Trace_ELBO())
    return looped(jax, size, device, lambda state, _: svi.update(state), svi.init(jax.random.PRNGKey(2)))


def contestants(size: Size, device: str, precision: str) -> list[Contestant]:
    """Return the peers that run on JAX."""
    return [
        Contestant("JAX dropout by hand, lax.scan", lambda: dropout(size, device, precision)),
        Contestant("NumPyro AutoNormal, lax.scan", lambda: numpyro_mean_field(size, device, precision)),
    ]
