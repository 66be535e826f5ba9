"""The public names, with the module that each comes from; they are imported when first used."""

from .posteriors import FromLaplace as FromLaplace
from .posteriors import from_state_dicts as from_state_dicts
from .problems import Problem as Problem
from .problems import missing_references as missing_references
from .problems import problem as problem
from .problems import problems as problems
from .reference import Reference as Reference
from .result import Results as Results
from .run import benchmark as benchmark
