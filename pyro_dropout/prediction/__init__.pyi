"""The public names, with the module that each comes from; they are imported when first used."""

from .linearised_prediction import LinearisedPrediction as LinearisedPrediction
from .predict_fleet import FleetPrediction as FleetPrediction
from .predict_fleet import predict_fleet as predict_fleet
from .prediction import Prediction as Prediction
from .sampled_posterior import SampledPosterior as SampledPosterior
from .site_prediction import SitePrediction as SitePrediction
