"""The tasks by their names in RULER's synthetic.yaml. Of its thirteen, qa_1 and qa_2 are absent: they need data sets.

Generators are ours. The wording and the new tokens are RULER's (github.com/NVIDIA/RULER, Apache-2.0). The numbers of
keys, values, queries, hops and words are RULER's too. Its one worked example before vt and cwe is left out.
"""

from __future__ import annotations

import zlib

import numpy as np

from service.evaluation.retrieval.haystack import Haystack
from service.evaluation.retrieval.prompts import Draft
from service.evaluation.ruler import counting, niah, tracking
from service.evaluation.ruler.niah import NEEDLES
from service.evaluation.ruler.request import RulerRequest
from service.evaluation.ruler.results import TaskName


def draft_of(task: TaskName, sample: int, request: RulerRequest, documents: Haystack | None) -> Draft:
    """One prompt of a task, the same at every length but for its filler."""
    rng = np.random.default_rng([request.seed, zlib.crc32(task.encode()), sample])
    name = f"{task}, sample {sample}"

    def new_tokens(most: int) -> int:
        return min(most, request.max_new_tokens or most)

    if task in NEEDLES:
        return NEEDLES[task].draft(name, rng, documents, new_tokens(niah.NEW_TOKENS))
    if task == "vt":
        most = new_tokens(tracking.NEW_TOKENS)
        return tracking.tracking_draft(name, rng, request.vt_chains, request.vt_hops, most)
    if task == "cwe":
        most = new_tokens(counting.COMMON_NEW_TOKENS)
        return counting.common_words_draft(name, rng, request.cwe_frequency, request.cwe_uncommon_frequency, most)
    return counting.frequent_words_draft(name, rng, request.fwe_alpha, new_tokens(counting.FREQUENT_NEW_TOKENS))
