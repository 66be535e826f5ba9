"""The public names, with the module that each comes from; they are imported when first used."""

from .conformal import Conformal as Conformal
from .decisions import Cascade as Cascade
from .decisions import RejectionCurve as RejectionCurve
from .decisions import cascade as cascade
from .decisions import rejection_curve as rejection_curve
from .decisions import thompson as thompson
from .diagnostics.elbo_report import ElboReport as ElboReport
from .diagnostics.elbo_report import elbo_report as elbo_report
from .diagnostics.inference_data import LOOResult as LOOResult
from .diagnostics.sbc import SBCResult as SBCResult
from .recalibration import refit_tau as refit_tau
from .recalibration import refit_temperature as refit_temperature
from .recalibration import tempered as tempered
from .recalibration import with_tau as with_tau
from .scores.calibration import CoverageCurve as CoverageCurve
from .scores.calibration import UncertaintyPercentile as UncertaintyPercentile
from .scores.calibration import coverage_curve as coverage_curve
from .scores.calibration import pit as pit
from .scores.calibration import rescale as rescale
from .scores.class_calibration import Reliability as Reliability
from .scores.class_calibration import brier as brier
from .scores.class_calibration import reliability as reliability
from .scores.distance import PredictiveDistance as PredictiveDistance
from .scores.distance import predictive_distance as predictive_distance
from .scores.errors import interval_score as interval_score
from .support import Support as Support
