"""An example of every evaluation that has pictures. Those that judge methods do so by results made from formulas."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

from service.evaluation.cost import EncodingCost
from service.evaluation.recommend.results import Answer as Recommendation
from service.evaluation.recommend.results import AtLength, Avoid, Memory, Range, RecommendMethod, RecommendResult
from service.evaluation.scores import Interval
from service.evaluation.search.results import FOUND, Generation, HeldOut, SearchMethod, SearchResult
from service.evaluation.search.results import Answer as SearchAnswer
from service.evaluation.sweep.results import Answer, Judgement, SweepMethod, SweepResult
from service.figures import Picture, pictures_of
from service.jobs.records import JobInfo
from service.reports.html import report_of
from tests.service.figures.measured import DOCUMENT, NAMES, long_perplexity, passkey, perplexity, probe, ruler


def sweep(names: Sequence[str] = NAMES) -> SweepResult:
    """Perplexity and passkey at 2,048 tokens."""
    parts = [perplexity(names), passkey(names)]
    methods = []
    for index, name in enumerate(names):
        values = [parts[0].methods[index].lengths[-1].perplexity, parts[1].methods[index].lengths[-1].score]
        intervals = [parts[0].methods[index].lengths[-1].interval, parts[1].methods[index].lengths[-1].interval]
        limits = [7.15, 0.9]
        methods.append(
            SweepMethod(
                label=name,
                pe={"method": name},
                model="tiny",
                cost=EncodingCost(attentions=1, rotated_when_read=False, bias=False),
                windowed=False,
                judgements=[
                    Judgement(
                        evaluation=part,
                        measure=("perplexity", "share found")[part],
                        value=values[part],
                        interval=intervals[part],
                        reference=(6.5, 1.0)[part],
                        limit=limits[part],
                        adequate=(values[0] <= limits[0], values[1] >= limits[1])[part],
                        sure=index == 0,
                        rank=index + 1,
                    )
                    for part in range(2)
                ],
                adequate=False,
                sure=True,
                rank=index + 1,
            )
        )
    answer = Answer(
        best=names[-1],
        runner_up=names[-1],
        confidence=0.93,
        cheapest_adequate=None,
        cheapest_is_sure=None,
        words=f"At 2,048 tokens {names[1]} is best; no method stays within 10%.",
    )
    return SweepResult(
        model="tiny",
        trained_length=256,
        target_length=2048,
        tolerance=0.1,
        answer=answer,
        methods=methods,
        evaluations=parts,
    )


def recommend(names: Sequence[str] = NAMES) -> RecommendResult:
    """The second one is recommended at 2,048 tokens."""
    parts = [perplexity(names), passkey(names)]
    methods = []
    for index, name in enumerate(names):
        at, found = parts[0].methods[index].lengths[-1], parts[1].methods[index].lengths[-1]
        above = max(0.0, math.log(at.perplexity / parts[0].methods[1 % len(names)].lengths[-1].perplexity))
        length = AtLength(
            length=2048,
            windows=32 if index < 2 else 2,
            perplexity=at.perplexity,
            perplexity_interval=at.interval,
            recall=found.score,
            recall_interval=found.interval,
            recall_first=0.1,
            loss=math.log(at.perplexity) + 1 - found.score,
            difference=above,
            difference_interval=Interval(low=above / 2, high=above + 0.1, kind="windows"),
            good_enough=above <= 0.1,
        )
        methods.append(
            RecommendMethod(
                label=name,
                pe={"method": name},
                model="tiny",
                request={"method": name},
                cost=EncodingCost(attentions=1, rotated_when_read=False, bias=False),
                memory=Memory(tokens=2048, bytes=1 << 20),
                window=None,
                rounds=3 if index < 2 else 1,
                verdict=("worse", "recommended")[index] if index < 2 else "dropped",
                lengths=[length],
            )
        )
    chosen = names[1 % len(names)]
    answer = Recommendation(
        label=chosen,
        pe={"method": chosen},
        native_is_enough=False,
        recall_counts=True,
        recall_shown="yes",
        runner_up=names[0],
        confidence=0.99,
        tied=[],
        runners_up=[names[0]],
        avoid=[Avoid(label=names[0], reason="its perplexity is 58.3 times that of the recommended one")],
        ranges=[
            Range(up_to=256, label=names[0], pe={"method": names[0]}),
            Range(up_to=2048, label=chosen, pe={"method": chosen}),
        ],
        words=[f"For 2,048 tokens use {chosen}.", f"Avoid {names[0]}."],
    )
    return RecommendResult(
        fingerprint="0" * 64,
        model="tiny",
        trained_length=256,
        target_length=2048,
        reference_length=256,
        lengths=[256, 2048],
        tolerance=0.1,
        windows=32,
        tail=64,
        segment=16,
        seed=0,
        bos=False,
        tokens_read=100_000,
        tokens_of_all=262_144,
        documents=[DOCUMENT],
        answer=answer,
        methods=methods,
    )


def search(names: Sequence[str] = NAMES) -> SearchResult:
    """Factors of eight pairs at 2,048 tokens, in three generations."""
    parts, methods = perplexity(names), []
    found = [1.0, 1.2, 1.9, 3.4, 7.5, 8.0, 8.0, 9.1]
    for index, name in enumerate([FOUND, *names]):
        at = parts.methods[max(0, index - 1)].lengths[-1]
        factors = [found, [1.0] * 8, [8.0] * 8, None, [8 ** (pair / 7) for pair in range(8)]][index % 5]
        held_out = HeldOut(
            perplexity=6.1 if index == 0 else at.perplexity,
            interval=Interval(low=6.0, high=6.2, kind="windows") if index == 0 else at.interval,
            times_search=1.0 if index == 0 else at.perplexity / 6.1,
            times_search_interval=None,
            groups=[(1.8, 1)] * 8,
        )
        numbers = {"factors": factors, "search_loss": 1.8 + 0.1 * index, "held_out": held_out}
        methods.append(SearchMethod(label=name, pe={"method": name}, model="tiny", request={"method": name}, **numbers))
    words = [f"{FOUND} is best on 8 held-out windows of 2,048 tokens: perplexity 6.1.", "It is an example."]
    return SearchResult(
        fingerprint="0" * 64,
        model="tiny",
        trained_length=256,
        target_length=2048,
        windows=4,
        held_out=8,
        population=24,
        seed=0,
        bos=False,
        tokens_read=100_000,
        documents=[DOCUMENT],
        pe={"method": FOUND},
        generations=[
            Generation(candidates=24 >> min(n, 1), best=1.86 - 0.03 * n, median=2.2 - 0.1 * n) for n in range(3)
        ],
        answer=SearchAnswer(label=FOUND, pe={"method": FOUND}, surely_beats=[], words=words),
        methods=methods,
    )


def figures_of(page: str) -> dict[str, dict[str, Any]]:
    """The figures that a page draws, by the id of their place: data, and layouts for wide and narrow screens."""
    found = re.findall(r'<script type="application/json" data-figure="([^"]+)">(.*?)</script>', page, re.DOTALL)
    return {name: json.loads(figure) for name, figure in found}


EVERY = {
    "perplexity": perplexity,
    "long_perplexity": long_perplexity,
    "passkey": passkey,
    "ruler": ruler,
    "probe": probe,
    "sweep": sweep,
    "recommend": recommend,
    "search": search,
}


def job_of(body: dict[str, Any]) -> JobInfo:
    """The finished job of a request."""
    return JobInfo(
        id="f" * 32,
        evaluation="ruler",
        model=None,
        state="done",
        created_at=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        units_total=8,
        units_done=8,
        units_reused=3,
        tokens_total=4096,
        seconds=12.5,
        request=body,
    )


@cache
def pictures(evaluation: str) -> list[Picture]:
    """Those of the example, made once."""
    return pictures_of(EVERY[evaluation]())


@cache
def report(evaluation: str) -> str:
    """The page of the example with its job, made once."""
    return report_of(EVERY[evaluation](), job_of({"input": "text"}))
