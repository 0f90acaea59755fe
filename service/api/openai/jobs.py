"""Prompts from a request to the engine's door: room is taken, then they are tokenized, checked and counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from patches import ResolvedRecipe
from service.api.admission import admit, charge, log_prompts, upper_bound
from service.api.openai.names import Named
from service.api.prompts import Prompt, check_logprobs, check_prompt, prompts_of
from service.errors import context_length_exceeded
from service.settings import Settings
from service.sharing.admission import Ticket


@dataclass(frozen=True)
class Wanted:
    """What is to be done with every prompt of a request.

    ``max_tokens`` None is as many as the server and the context allow; ``answers`` counts generations, and
    ``scored`` says whether the prompt is scored, ``echoed`` whether its text is needed. ``alternatives`` are reported
    for every token, ``copies`` times where the prompt is echoed. ``param`` is the field that prompts came in.
    """

    max_tokens: int | None
    answers: int
    stops: list[str]
    scored: bool = False
    alternatives: int | None = None
    copies: int = 0
    echoed: bool = False
    param: str = "prompt"
    add_special_tokens: bool = True
    cache_salt: str | None = None


@dataclass(frozen=True)
class Job:
    """One prompt under one encoding, checked and admitted: a ticket per generation, and one for scoring."""

    prompt: Prompt
    named: Named
    resolved: ResolvedRecipe
    max_tokens: int
    wanted: Wanted
    tickets: list[Ticket]
    score_ticket: Ticket | None

    def pe(self) -> dict[str, Any]:
        """The encoding as it takes effect, as ``/generate`` echoes it."""
        return self.named.target.patch.describe(self.named.method, len(self.prompt.token_ids) + self.max_tokens)


async def admitted(request: Request, name: Named, given: Sequence[str | list[int]], wanted: Wanted) -> list[Job]:
    """A job per prompt. Everything that can be refused is refused here, before a stream opens.

    Raises:
        ApiError, QueueFull: from admission and from ``check_prompt``.
    """
    settings: Settings = request.app.state.settings
    target = name.target
    bounds = [upper_bound(item, target.max_length) for item in given]
    most_new = settings.max_new_tokens if wanted.max_tokens is None else wanted.max_tokens
    places = [(target.engine.generations, bound + most_new) for bound in bounds for _ in range(wanted.answers)]
    score_places = [(target.engine.scores, bound) for bound in bounds if wanted.scored]
    tickets = await admit(request, [*places, *score_places])
    log_prompts(request, given)
    how = {"add_special_tokens": wanted.add_special_tokens, "with_text": wanted.echoed}
    jobs = []
    for index, prompt in enumerate(await prompts_of(request, given, name.served, wanted.param, **how)):
        tokens = len(prompt.token_ids)
        max_tokens = max(1, min(most_new, target.max_length - tokens)) if wanted.max_tokens is None else most_new
        resolved = check_prompt(prompt.token_ids, max_tokens, name.method, target, wanted.param)
        if wanted.scored and tokens > target.engine.scores.most:
            raise context_length_exceeded(tokens, 0, target.engine.scores.most, wanted.param)
        mine = tickets[index * wanted.answers : (index + 1) * wanted.answers]
        score_ticket = tickets[len(places) + index] if wanted.scored else None
        jobs.append(Job(prompt, name, resolved, max_tokens, wanted, mine, score_ticket))
    shown = sum(wanted.copies * len(job.prompt.token_ids) + wanted.answers * job.max_tokens for job in jobs)
    check_logprobs("logprobs", wanted.alternatives, shown)
    await charge(request, sum(len(job.prompt.token_ids) + wanted.answers * job.max_tokens for job in jobs))
    return jobs
