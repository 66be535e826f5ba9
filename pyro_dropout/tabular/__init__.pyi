"""The public names, with the module that each comes from; they are imported when first used."""

from .fitted import FittedTable as FittedTable
