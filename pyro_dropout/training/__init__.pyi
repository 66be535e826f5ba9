"""The public names, with the module that each comes from; they are imported when first used."""

from .checkpoints.training_checkpoint import Checkpoint as Checkpoint
from .history import History as History
from .laplace.evidence import Evidence as Evidence
from .laplace.evidence import maximise_evidence as maximise_evidence
from .loss.temperature import warm_up as warm_up
from .optimisers import Update as Update
from .optimisers import inverse_decay as inverse_decay
