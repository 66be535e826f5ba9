"""What a person does with exported draws, all of it, on whichever ArviZ is installed; needs no torch."""

from pathlib import Path
from typing import Any

import numpy as np

POINTS, DRAWS = 40, 800


def groups(chains: int = 1) -> tuple[dict[str, Any], Any, Any]:
    """Draws of a line through 40 points from a Gaussian wider than the posterior, with log p and log q, (S,)."""
    rng = np.random.default_rng(0)
    x = np.stack([np.linspace(-1, 1, POINTS), np.ones(POINTS)], 1)
    y = x @ [1.5, -0.5] + 0.5 * rng.normal(size=POINTS)
    precision = np.eye(2) + 4 * x.T @ x  # prior N(0, 1), noise of precision 4
    mean, std = np.linalg.solve(precision, 4 * x.T @ y), 1.3 / np.sqrt(np.diag(precision))
    w = mean + std * rng.normal(size=(chains, DRAWS, 2))
    f = w @ x.T
    log_likelihood = -2 * (y - f) ** 2 + 0.5 * np.log(4 / (2 * np.pi))
    log_q = (-0.5 * ((w - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)).sum(-1)
    lp = log_likelihood.sum(-1) - 0.5 * (w**2).sum(-1) - np.log(2 * np.pi)
    draws = ("chain", "draw")
    found = {
        "posterior": {
            "0.weight": ((*draws, "0.weight_dim_0", "0.weight_dim_1"), w[..., None, :1]),
            "0.bias": ((*draws, "0.bias_dim_0"), w[..., 1:]),
        },
        "posterior_predictive": {"y": ((*draws, "point"), f + 0.5 * rng.normal(size=f.shape))},
        "log_likelihood": {"y": ((*draws, "point"), log_likelihood)},
        "sample_stats": {"lp": (draws, lp), "log_q": (draws, log_q)},
        "observed_data": {"y": (("point",), y)},
    }
    return found, lp, log_q


def exercise(export: Any, data: Any, folder: Path) -> dict[str, Any]:
    """Summary, LOO, four plots and a file: everything that is promised to work; returns what was seen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    az, seen = export.arviz(), {}
    plt.close("all")  # those of other tests
    summary = az.summary(data, kind="stats")
    seen["summary"] = list(summary.index)
    assert np.isfinite(summary["mean"].astype(float)).all()
    elpd = az.loo(data, pointwise=True)
    seen["loo"] = float(elpd.elpd_loo if hasattr(elpd, "elpd_loo") else elpd.elpd)
    seen["khat"] = np.asarray(elpd.pareto_k)
    az.plot_khat(elpd)
    (az.plot_ppc_dist if export.holds_trees(az) else az.plot_ppc)(data)
    az.plot_loo_pit(data, **({} if export.holds_trees(az) else {"y": "y"}))
    assert len(plt.get_fignums()) == 3
    plt.close("all")
    path = folder / "draws.nc"
    data.to_netcdf(str(path))
    back = az.from_netcdf(str(path))
    for group in ("posterior", "posterior_predictive", "log_likelihood", "sample_stats", "observed_data"):
        for name in data[group].data_vars:
            assert data[group][name].dims == back[group][name].dims
            assert np.array_equal(data[group][name].values, back[group][name].values), f"{group}/{name} changed"
    assert dict(back["sample_stats"].attrs)["inference_library"] == "pyro_dropout"
    back.close()
    return seen


def container(export: Any, chains: int = 1) -> Any:
    found, _, _ = groups(chains)
    return export.container(found, {group: {"inference_library": "pyro_dropout"} for group in found})


def compared(export: Any) -> Any:
    """The table of ``az.compare`` from our own results: as ArviZ has them, and with all points made worse by 0.1."""
    az = export.arviz()
    theirs = az.loo(container(export), pointwise=True)
    each = np.asarray(theirs.loo_i if hasattr(theirs, "loo_i") else theirs.elpd_i)
    khat, make = np.asarray(theirs.pareto_k), export.loo_results()
    se = float(np.sqrt(len(each) * each.var()))
    good = make(each.sum(), se, 2.0, each, khat, DRAWS, False)
    worse = make((each - 0.1).sum(), se, 2.0, each - 0.1, khat, DRAWS, True)
    import matplotlib.pyplot as plt

    az.plot_khat(good)
    plt.close("all")
    table = az.compare({"worse": worse, "good": good, "theirs": theirs})
    assert list(table.index)[-1] == "worse"
    assert abs(float(table["elpd_diff"].abs().max()) - 0.1 * POINTS) < 1e-2
    assert float(table.loc["worse", "weight"]) < 0.01
    return table
