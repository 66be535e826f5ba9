"""The public names, with the module that each comes from; they are imported when first used."""

from .compare import Comparison as Comparison
from .large_k import plot_kl_gap as plot_kl_gap
