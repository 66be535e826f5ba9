"""The public names, with the module that each comes from; they are imported when first used."""

from .problems import Problem as Problem
from .problems import missing_references as missing_references
from .problems import problem as problem
from .problems import problems as problems
from .reference import Reference as Reference
