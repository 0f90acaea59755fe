"""A generation as the engine sees it: its request, its parameters, and the state of its answer."""

from service.engine.request.engine_request import EngineRequest
from service.engine.request.grammar import Grammar, GrammarFailed
from service.engine.request.occurrences import Occurrences
from service.engine.request.params import SamplingParams, TokenLogprobs

__all__ = ["EngineRequest", "Grammar", "GrammarFailed", "Occurrences", "SamplingParams", "TokenLogprobs"]
