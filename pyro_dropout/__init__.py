"""MC dropout as a Pyro guide, on one scale with the other posterior approximations of neural networks.

``__init__.pyi`` lists the names that most programs need. Each is imported when it is first used, so the command line
shows its help without waiting for torch. The other public names are in the submodules, as ``docs/api.md`` says.
"""

from importlib.util import find_spec as _find_spec
from typing import Any as _Any

import lazy_loader as _lazy_loader

from pyro_dropout.registry import FLOORS as _FLOORS

_find, _, _listed = _lazy_loader.attach_stub(__name__, __file__)
_NEED_SKLEARN = ("DropoutClassifier", "DropoutRegressor")
_SUBMODULES = (*_FLOORS, "errors", "paper", "protocols", "registry")
__all__ = [name for name in _listed if name not in _SUBMODULES]
# Names that were here, by the submodule that has them now. All of this goes in the version after this one.
_MOVED = {
    "paper": """
        ArcCosine ArcSine BernoulliMixture DeepGP dropout_objective finite_rank_features
        finite_rank_log_marginal FiniteRank FiniteRankGP implied_length_scale kl kl_gap label_entropy
        Layered MultiplicativeNormal optimizer_weight_decay RowMixture second_layer_features SecondLayer
        weight_decay
    """,
    "errors": """
        DamagedFileError DifferentModelError DivergedError IgnoredInputsWarning NoWeightWarning
        PyroDropoutError RangeError ShapeError SingularError
    """,
    "generative": "GP Likelihood",
    "guides": "AutoLaplace",
    "training": "Checkpoint Evidence History inverse_decay maximise_evidence Update warm_up",
    "prediction": "FleetPrediction LinearisedPrediction predict_fleet Prediction SampledPosterior SitePrediction",
    "judging": """
        brier Cascade cascade Conformal coverage_curve CoverageCurve elbo_report ElboReport
        interval_score pit predictive_distance PredictiveDistance refit_tau refit_temperature
        rejection_curve RejectionCurve Reliability reliability rescale Support tempered thompson
        UncertaintyPercentile with_tau
    """,
    "references": "conjugate GaussianPosterior gp_posterior",
    "tables": "Table",
    "datasets": "co2",
    "comparison": "Comparison plot_kl_gap",
    "tabular": "FittedTable",
}
_PLACES = {name: f"{place}.{name}" for place, names in _MOVED.items() for name in names.split()} | {
    "LOO": "judging.LOOResult",
    "SBC": "judging.SBCResult",
    "precision": "paper.implied_tau",
    "standardised_precision": "paper.standardised_tau",
}

if _find_spec("sklearn") is None:  # an optional extra: ``import *`` must not fail without it
    __all__ = [name for name in __all__ if name not in _NEED_SKLEARN]


def __getattr__(name: str) -> _Any:
    """Import a public name, or a submodule, when it is first used."""
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("pyro-dropout")
        except PackageNotFoundError:  # a source tree that was never installed
            return "0+source"
    if name in _PLACES:
        return _moved(name)
    if name not in (*__all__, *_SUBMODULES, *_NEED_SKLEARN):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_suggestion(name)}", name=name)
    try:
        import_module(f"{__name__}.mathematics.divergence")  # registers our q(w) with torch's kl_divergence
        found = _find(name)
    except ModuleNotFoundError as missing:
        if name not in _NEED_SKLEARN:
            raise
        raise ImportError(f'{name} needs scikit-learn; pip install "pyro-dropout[sklearn]"') from missing
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names and the submodules, loaded or not."""
    special = {name for name in globals() if name.startswith("__")}
    return sorted({*special, *__all__, *_SUBMODULES, "__version__"})


def _moved(name: str) -> _Any:
    """Return a name from where it is now, with a warning at each place that uses the old one."""
    from importlib import import_module

    from pyro_dropout.errors import warn_caller
    from pyro_dropout.mathematics.checks import GONE_IN

    place, new = _PLACES[name].split(".")
    instead = f"use {__name__}.{place}.{new}"
    warn_caller(f"{__name__}.{name} will be removed in version {GONE_IN}; {instead}.", DeprecationWarning)
    return getattr(import_module(f"{__name__}.{place}"), new)


def _suggestion(name: str) -> str:
    """Return a question with the public name that is spelt most like this one, if there is one."""
    from difflib import get_close_matches

    known = {each.lower(): each for each in (*__all__, *_SUBMODULES)}
    close = [known[each] for each in get_close_matches(name.lower(), known, n=1) if not name.startswith("_")]
    return f"; did you mean {close[0]!r}?" if close else ""
