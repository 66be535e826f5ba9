"""The public names, with the module that each comes from; they are imported when first used."""

from .bundled import co2 as co2
