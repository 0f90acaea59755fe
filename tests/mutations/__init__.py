"""Mutations: small faults in the sources, by subject. ``python -m tests.mutations`` tries them."""

from tests.mutations.api import API
from tests.mutations.attention import ATTENTION
from tests.mutations.checkpoints import CHECKPOINTS
from tests.mutations.encodings import ENCODINGS
from tests.mutations.engine import ENGINE
from tests.mutations.evaluation import EVALUATION
from tests.mutations.models import MODELS

MUTATIONS = [*ATTENTION, *ENCODINGS, *MODELS, *CHECKPOINTS, *ENGINE, *EVALUATION, *API]
