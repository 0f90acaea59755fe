"""Mutations: small faults put into a copy of the sources, one at a time; the named tests must catch each.

``python -m tests.mutations [--only NAME ...]`` exits with 1 if a mutation survives or its text is not found once.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("benchmarks", "docs", "patches", "service", "tests")
HEAVY = (
    *("torch", "transformers", "transformers.generation.continuous_batching", "fastapi", "sqlalchemy", "pyarrow"),
    *("schemathesis", "hypothesis", "pytest_asyncio", "transformers.models.llama.modeling_llama"),
)
"""Imported once, before a process is forked for every run."""

LONGEST_S = 900
ENDED = 64
"""Added to pytest's exit code, so that a process that breaks is not taken for a test that fails."""

PASSED, FAILED = ENDED + pytest.ExitCode.OK, ENDED + pytest.ExitCode.TESTS_FAILED


@dataclass(frozen=True)
class Mutation:
    """``text`` occurs once in the package ``folder``; ``wrong`` replaces it, and one of ``tests`` must fail."""

    name: str
    folder: str
    text: str
    wrong: str
    tests: tuple[str, ...]

    def file(self, root: Path) -> Path:
        """The source file that holds the text.

        Raises:
            LookupError: unless exactly one file holds it, once.
        """
        found = [path for path in sorted((root / self.folder).rglob("*.py")) for _ in range(self.count_in(path))]
        if len(found) != 1:
            raise LookupError(f"{self.name}: {len(found)} places in {self.folder} hold {self.text!r}")
        return found[0]

    def count_in(self, path: Path) -> int:
        return path.read_text(encoding="utf-8").count(self.text)


MULTIMODAL = "tests/patches/model/architectures/test_multimodal.py"
NATIVE_POSITIONS = "tests/patches/model/architectures/test_native_positions.py"
OTHER_FAMILIES = "tests/patches/model/architectures/test_other_families.py"
GPT_NEO = "test_the_local_layers_of_gpt_neo_have_a_window"
CODEGEN = "test_the_heads_of_codegen_come_from_every_quarter_of_its_projection"
DUAL_CHUNK = "tests/patches/model/test_dual_chunk.py"
OWN_ATTENTION = "tests/patches/model/test_own_attention.py"
UNSUPPORTED = "tests/service/openai/test_unsupported.py::test_cached_tokens_of_a_prompt"
RESPONSE_TOOLS = "tests/service/openai/structure/test_response_tools.py"
RESPONSE_LOGPROBS = "tests/service/openai/structure/test_response_logprobs.py"
DROPPED = "tests/service/openai/text/test_dropped.py"
MESSAGES = "tests/service/openai/anthropic/test_messages.py"
ANTHROPIC_MODELS = "tests/service/openai/anthropic/test_models.py"
STOP_REASONS = "tests/service/openai/text/test_stop_reasons.py"
TEMPLATING = "tests/service/openai/text/test_templating.py"
CARD = "tests/service/engine/cards/test_card.py"
LOCAL_PAGES = "tests/service/engine/adapter/test_local_pages.py"
SECTORS = "tests/service/engine/adapter/test_sectors.py"
PAGED_ATTENTION = "tests/service/engine/adapter/test_paged_attention.py"
FUSED = "tests/patches/attention/test_fused.py"
IN_PLACE = "tests/service/engine/decode/test_in_place.py"
PLAN, RINGS = "tests/patches/attention/decode/test_plan.py", "tests/patches/attention/decode/sums/test_rings.py"
STEPS = "tests/patches/model/test_steps_ahead.py"
PLANS = "tests/service/engine/decode/test_decoding_plans.py"
STRIDED = "tests/patches/attention/decode/test_strided.py"
RAGGED = "tests/patches/attention/decode/sums/test_ragged.py"
TABLES = "tests/patches/attention/decode/test_tables.py"
CPU = "tests/service/engine/test_cpu.py"
SINGLE = "tests/patches/attention/decode/test_single_query.py"
LAYERS = "test_layers_share_tables_without_mixing_them_up"
OVERFLOW = "test_the_merge_survives_scores_that_overflow_an_exponential"
PAPER = "tests/patches/attention/test_paper_parity.py"
SCORES = "tests/patches/attention/test_scores.py"
DECODE = "tests/patches/model/test_decode.py"
SLOTS = "tests/patches/model/test_slots.py"
TIDYING = "tests/patches/model/recorded/test_tidying.py"
RECORDING = "tests/patches/model/recorded/test_recording.py"
INT4 = "tests/service/models/linear/test_int4.py"
RECIPE = "tests/patches/encoding/test_recipe.py"
TEMPERATURE = "tests/patches/encoding/test_temperature.py"
PADDING = "tests/patches/model/library/test_padding.py"
PARITY = "tests/patches/model/library/test_transformers_parity.py"
MAPS = "tests/patches/methods/test_position_maps.py"
RECOMMEND = "tests/service/evaluation/recommend/test_answer.py"
DECLARED = "tests/service/evaluation/recommend/test_declared.py"
EXPORTABLE = "tests/service/evaluation/recommend/test_exportable.py"
SWEEPS = "tests/service/evaluation/sweep"
PICTURES = "tests/service/figures/test_pictures.py"
WORDS = "tests/service/figures/test_words.py"
EXPORTS = "tests/service/export/test_targets.py"
STRUCTURED = "tests/service/openai/structure/test_structured.py"
OWN_SCALING = "tests/service/export/test_own_scaling.py"
BIASES = "tests/patches/methods/test_biases.py"
FREQUENCIES = "tests/patches/methods/test_frequencies.py"
ENGINE = "tests/service/engine/test_engine.py"
ALLOWED = "tests/service/openai/structure/test_allowed_tools.py"
ADJUSTMENT = "tests/service/engine/sampling/test_adjustment.py"
SAMPLING = "tests/service/engine/sampling/test_sampling.py"
GRAPHS = "tests/service/engine/cards/test_graphs.py"
BETWEEN = "tests/service/engine/cards/test_between_steps.py"
AHEAD = "tests/service/engine/cards/test_ahead.py"
LATE = "tests/service/engine/cards/test_late.py"
JOINING, MOVING = "test_requests_join_a_batch_and_leave_it", "test_encodings_that_move_positions_have_other_graphs"
ADDING = "test_encodings_that_move_added_positions_have_other_graphs"
EVICTION = "tests/service/engine/adapter/test_paged_eviction.py"
FAIRNESS = "tests/service/engine/test_fairness.py"
OUT_OF_MEMORY = "tests/service/engine/test_out_of_memory.py"
VERIFICATION = "tests/service/engine/test_verification.py"
CHOICE = "tests/service/engine/test_choice.py"
HYBRIDS = "tests/service/engine/padded/test_hybrids.py"
PADDED = "tests/service/engine/padded/test_padded.py"
CHOSEN_KEYS = "tests/patches/model/architectures/test_chosen_keys.py"
TOKENS_OF = f"{HYBRIDS}::test_tokens_are_those_of_generate_alone_and_among_others"
QUEUE = "tests/service/jobs/test_queue.py"
UNITS = "tests/service/jobs/test_units.py"
SERVERS = "tests/service/jobs/test_servers.py"
STORE = "tests/service/jobs/test_store.py"
RATES = "tests/service/api/test_rates.py"
PRUNING = "tests/service/jobs/test_pruning.py"
FAILING = "tests/service/jobs/test_failing.py"
ADDRESS = "tests/service/jobs/test_address.py"

ATTENTION = [
    Mutation("a gap in a mask is ignored", "patches", "if count and begin + count + end != seen:", "if False:",
             (f"{PADDING}::test_a_gap_in_a_mask_is_refused",)),
    Mutation("positions between the ends are not read", "patches", "(position_ids.diff() == 1).all(1)",
             "(position_ids[:, :1] >= 0).all(1)", (f"{PADDING}::test_every_position_of_a_text_is_checked",)),
    Mutation("a forward without an encoding has the trained length", "patches", "if length <= own.length:", "if True:",
             (f"{PARITY}::test_without_an_encoding_the_length_of_a_forward_decides_as_in_transformers",)),
    Mutation(
        "merge without the maximum",
        "patches",
        "torch.logaddexp(old_lse, new_lse)",
        "torch.log(torch.exp(old_lse) + torch.exp(new_lse))",
        (f"{FUSED}::{OVERFLOW}",),
    ),
    Mutation("log-sum-exp without the maximum", "patches", "torch.logsumexp(scores, dim=-1)",
             "torch.log(torch.exp(scores).sum(-1))", (f"{FUSED}::{OVERFLOW}",)),
    Mutation("merge weighs by the old sum", "patches", "torch.sigmoid(new_lse - old_lse)",
             "torch.sigmoid(old_lse - new_lse)", (FUSED,)),
    Mutation("wrong head of grouped queries", "patches", "upcast(key.repeat_interleave(groups, 1))",
             "upcast(key.repeat(1, groups, 1, 1))", (FUSED,)),
    Mutation("causal mask hides the query itself", "patches", ".triu_(keys - new + 1)", ".triu_(keys - new)",
             (DECODE,)),
    Mutation("sign of a distance", "patches", "query_map, band.query_map) + (",
             "band.query_map, query_map) + (", (SINGLE,)),
    Mutation("attention factor missing in a slot", "patches", "self.attention_factor[slot] = resolved.attention_factor",
             "self.attention_factor[slot] = 1.0", (SLOTS,)),
    Mutation("attention factor once more in a band", "patches", "rotary_table(by, inv_freq, 1.0,",
             "rotary_table(by, inv_freq, self.resolved.attention_factor,", (FUSED,)),
    Mutation("tables shared between recipes", "patches", "(kind, self.resolved, self.q_start,",
             "(kind, self.q_start,", (f"{FUSED}::{LAYERS}",)),
    Mutation("constant temperature ignored", "patches", "multiplier *= temperature.multiplier", "multiplier *= 1.0",
             (PAPER,)),
    Mutation("keys of the next page are read", "service", "[range(blocks[0] * page,",
             "[range((blocks[0] + 1) * page,", (IN_PLACE,)),
    Mutation("blocks keep what an earlier request left", "service",
             "parts[:, :, blocks.start * page : blocks.stop * page].zero_()", "pass", (IN_PLACE,)),
    Mutation("keys of other sequences weigh in one call", "patches", "masked_fill_(behind, torch.finfo(dtype).min)",
             "masked_fill_(behind, 0.0)", (STRIDED,)),
    Mutation("sequences turn by the first one's table", "patches", "whole[number, start : start + len(piece)]",
             "whole[0, start : start + len(piece)]", (STRIDED,)),
    Mutation("a turned query reads keys of another turn", "patches", "bias[number, index, :, first:end] = 0.0",
             "bias[number, :, :, first:end] = 0.0", (STRIDED,)),
    Mutation("queries beside turned keys stay", "patches",
             "own += [(row, table) for row in queries if table is not None]", "pass", (STRIDED,)),
    Mutation("one call reads beyond a request's row", "patches", "<= min(room, len(one.place))",
             "<= max(room, len(one.place))", (STRIDED,)),
    Mutation("a broken sequence is summed into others", "patches", "entries.zero_()", "pass", (RAGGED,)),
    Mutation("sums read another head's keys", "patches", "np.arange(heads)[:, None] * kv_heads // heads",
             "np.arange(heads)[:, None] % kv_heads", (RAGGED,)),
    Mutation("keys are summed as they were written", "patches", "by_head[:, piece] = firsts + np", "_ = firsts + np",
             (RAGGED,)),
    Mutation("values of turned keys are read beside them", "patches", "values, batch.values, batch.bags",
             "values, batch.columns, batch.bags", (RAGGED,)),
    Mutation("more keys turn than there is room", "patches", "if member.turned_keys <= room", "if room >= 0",
             (RAGGED,)),
    Mutation("sums under one turn of the query", "patches", "len(cosines) + 1 if tables else 0",
             "0", (RAGGED,)),
    Mutation("moves of the block before", "patches", "whole[positions.start - first * BLOCK :",
             "whole[positions.start % 7 :", (TABLES,)),
    Mutation("small pieces turn in places of others", "patches", "spare, together = spare + _keys(together), []",
             "together = []", (RAGGED,)),
    Mutation("sums leave biases out", "patches", "entries.copy_(batch.biases.bias)", "entries.zero_()", (RAGGED,)),
    Mutation("sums of a sequence's first piece alone", "patches", "first += len(run)", "pass", (RAGGED,)),
    Mutation("many heads sum long sequences", "patches", "or keys * dim <= MOST_NUMBERS", "or keys * dim > 0",
             (RAGGED,)),
    Mutation("layers of other shapes share a plan", "patches",
             "self.query.shape[1], self.cached[0].shape, self.cached[1].shape", "0", (IN_PLACE,)),
    Mutation("a plan goes on for other sequences", "patches", "self.names != before.names or self.places is None",
             "self.places is None", (PLAN,)),
    Mutation("a layer reads by the plan of the step before", "patches", "row is not None and row.batch is batch",
             "row is not None", (PLANS,)),
    Mutation("another layer takes the place of one", "patches", "return self.layer is layer and row", "return row",
             (PLAN,)),
    Mutation("repeated rows share memory while both are read", "patches", "flat is None or last >= order[node]",
             "flat is None", (TIDYING,)),
    Mutation("halves in their order roll", "patches", "second.args != (root, size, stride, offset + size[-1])",
             "second.args[0] != root", (TIDYING,)),
    Mutation("new keys do not count", "patches", "self._memory[self._added[step - 1]] = 0.0", "pass", (PLAN,)),
    Mutation("keys count out of reach", "patches", "self._memory[self._removed[step - 1]] = EXCLUDED", "pass", (PLAN,)),
    Mutation("queries turn as in the step before", "patches", "torch.index_select(each[step], 0",
             "torch.index_select(each[0], 0", (PLAN,)),
    Mutation("an ordinary plan goes on behind a chunk", "patches", "[ORDINARY] * len(places)",
             "[ORDINARY] * steps",
             (PLANS,)),
    Mutation("an ordinary plan goes on into sums", "patches",
             "steps - 1 if self._turns_once(steps - 1) == (rings is not None) else 0",
             "steps - 1", (PLANS,)),
    Mutation("readings with biases are kept", "patches", "_kept_readings if resolved.recipe.score_bias is None else",
             "_kept_readings if True else", (PLANS,)),
    Mutation("new keys of a ring are taken for one", "patches", "if is_alike or steps == 1 else", "if True else",
             (PLAN,)),
    Mutation("a slot keeps the tables of its last encoding", "patches", "self.uploads += 1", "pass", (STEPS,)),
    Mutation("tables of several steps are those of the first", "patches", "(steps[-1] + 1).numpy()",
             "(steps[0] + 1).numpy()", (STEPS,)),
    Mutation("a repeated step has turned its key", "patches", "min(self.known.stop, positions.stop - 1)",
             "self.known.stop", (RINGS,)),
    Mutation("rings stay after a step without memory", "service", "self.cache.kept.clear()", "pass", (PLANS,)),
    Mutation("a ring has numbers of another sequence", "patches", "return missing if self.known else",
             "return missing if True else", (PLANS,)),
    Mutation("a plan goes on without a place", "patches", "row.room < self.left - 1", "row.room < 0", (PLAN,)),
    Mutation("pieces of keys are one page long", "service", "(int(part[-1]) + 1) * page", "(int(part[0]) + 1) * page",
             (IN_PLACE,)),
    Mutation("the rest of the sinks' page is read", "service", "window.sink_pages * self.tokens_per_page + window",
             "0 * window", (IN_PLACE,)),
    Mutation("a plan goes on for keys elsewhere", "patches", "(runs[:-1], runs[-1].start)", "(other_runs[:-1], 0)",
             (PLAN,)),
    Mutation("reserved blocks are given away", "service", "for run in self.reserved.values():", "for run in ():",
             (IN_PLACE,)),
    Mutation("keys turn in the cache itself", "patches", "key = key.clone()\n    for piece",
             "key = key.view_as(key)\n    for piece", (IN_PLACE,)),
    Mutation("keys of several sequences turn in the cache", "patches", "if turns_query else key.clone()",
             "if turns_query else key", (STRIDED, IN_PLACE)),
    Mutation("a layer's window is left out of short texts", "patches", "and states.is_bare\n        and isinstance(",
             "and states.num_sinks == 0\n        and isinstance(", (FUSED,)),
    Mutation("idle threads keep their OpenMP threads", "service", "if ends:\n            end_openmp_threads()",
             "if ends:\n            pass", (CPU,)),
    Mutation("denormal numbers in generation threads", "service", "torch.set_flush_denormal(True)",
             "torch.set_flush_denormal(False)", (CPU,)),
    Mutation("triangle one column off", "patches", "part(keys, slice(first - low))",
             "part(keys, slice(first - low + 1))", (FUSED,)),
    Mutation("band of a long segment one key short", "patches", "slice(first - low, states.q_stop - low)",
             "slice(max(0, first - low - 1), max(0, first - low - 1) + states.q_stop - first)", (FUSED,)),
    Mutation("staircase stops a width early", "patches", "while width < query.shape[2]:",
             "while 2 * width < query.shape[2]:", (FUSED,)),
    Mutation("a bias one distance off", "patches", "first = states.q_stop - 1 - q_high + columns.start",
             "first = states.q_stop - q_high + columns.start", (FUSED,)),
    Mutation("base of the fewest keys", "patches", "return max(self.bands, key=", "return min(self.bands, key=",
             (RECIPE,)),
    Mutation("bias after the mask", "patches", "scores = scores + states.resolved.recipe.score_bias(q_idx, kv_idx)",
             "scores = scores - states.resolved.recipe.score_bias(q_idx, kv_idx)", (FUSED,)),
    Mutation("sinks keep their weight", "patches", "logits = torch.cat([scores, nothing], dim=-1)",
             "logits = torch.cat([scores, nothing - 1.0], dim=-1)", (FUSED,)),
]  # fmt: skip

ENCODING = [
    Mutation("lower edge of a band", "patches", "inside = distance >= self.low", "inside = distance > self.low",
             (RECIPE,)),
    Mutation("upper edge of a band", "patches", "inside & (distance < self.high)", "inside & (distance <= self.high)",
             (RECIPE,)),
    Mutation("reach of a band one key short", "patches", "return first, max(first, q_high - self.low + 1)",
             "return first, max(first, q_high - self.low)", (RECIPE,)),
    Mutation("chunk edge", "patches", "inside & (apart < self.high)", "inside & (apart <= self.high)", (RECIPE,)),
    Mutation("one key more among the first", "patches", "(kv_idx < self.count)", "(kv_idx <= self.count)", (MAPS,)),
    Mutation("rotation the other way", "patches", "(-sin[..., :half], sin[..., half:])",
             "(sin[..., :half], -sin[..., half:])", (SCORES,)),
    Mutation("attention factor missing on sin", "patches", "angles.sin() * attention_factor", "angles.sin()",
             (SCORES,)),
    Mutation("a step of frequencies is refused", "patches", "if self.beta_fast < self.beta_slow:",
             "if self.beta_fast <= self.beta_slow:", (f"{FREQUENCIES}::test_equal_turns_make_a_step",)),
    Mutation("attention factor lost on resolving", "patches", "attention_factor=float(attention_factor)",
             "attention_factor=1.0", (FREQUENCIES,)),
    Mutation("groups without their shift", "patches", "return position // self.group_size + self.shift",
             "return position // self.group_size", (MAPS,)),
    Mutation("log-n one position late", "patches", "(q_idx.float() + 1.0).log()", "q_idx.float().log()",
             (TEMPERATURE,)),
    Mutation("no table of a bias by distance", "patches", "case _ if bias.by_distance:", "case _ if False:",
             ("tests/patches/attention/paged/test_rows.py::test_any_bias_by_distance_has_a_row",)),
    Mutation("a method without its example", "patches", "if field.is_required()}", "if False}",
             ("tests/service/test_adding_a_method.py::test_a_required_parameter_without_an_example_is_named",)),
    Mutation("temperature of a bias", "patches", "scores = scores + resolved.recipe.score_bias(*pairs)",
             "scores = scores + resolved.recipe.score_bias(*pairs) * (1 if temperature is None else 1.7)",
             (f"{SCORES}::test_a_temperature_multiplies_products_and_no_bias",)),
    Mutation("square of a temperature", "patches", "(0.1 * math.log(self.factor) + 1.0) ** 2",
             "(0.1 * math.log(self.factor) + 1.0)", (TEMPERATURE,)),
    Mutation("bias with the wrong slopes", "patches", "finer[0::2]", "finer[1::2]", (BIASES,)),
    Mutation("a slot is not released", "patches", "self._users[slot] -= 1", "self._users[slot] -= 0", (SLOTS,)),
    Mutation("declared chunks are passed over", "patches/model", " or declared or _in_chunks(config, parameters)",
             " or declared", (f"{DUAL_CHUNK}::test_the_published_entries_are_what_vllm_computes",)),
    Mutation("a map over the map of the checkpoint", "patches",
             "native.base if isinstance(native, BasedMethod) else native", "native",
             (f"{DUAL_CHUNK}::test_another_map_takes_its_place",)),
    Mutation("local layers of GPT-Neo see everything", "patches/model", 'if module.attention_type == "local" else None',
             'if module.attention_type == "none" else None', (f"{OTHER_FAMILIES}::{GPT_NEO}",)),
    Mutation("values of CodeGen as its keys", "patches/model", "query, value, key = ", "query, key, value = ",
             (f"{OTHER_FAMILIES}::{CODEGEN}",)),
]  # fmt: skip

SERVED = [
    Mutation("one method alone is the best", "service", "if method.rank == 1] if len(methods) > 1 else []",
             "if method.rank == 1]", (f"{SWEEPS}/test_answer.py",)),
    Mutation("block table off by one", "service/engine", "position - self.evicted_pages.get(request_id, 0) *",
             "position - max(0, self.evicted_pages.get(request_id, 0) - 1) *", (EVICTION,)),
    Mutation("window dropped a page early", "service/engine", "(position - self.window_size + 1) // self.page_size",
             "(position - self.window_size + 1 + self.page_size) // self.page_size", (EVICTION,)),
    Mutation("pages of windows leave early", "service/engine", "begins = position - position % self.page_size",
             "begins = position + self.page_size", (SECTORS,)),
    Mutation("the last window of a prefix has gaps", "service/engine", "missing < self.unread(",
             "missing <= self.unread(", (SECTORS,)),
    Mutation("parts of sectors are shared", "service/engine", "if count % unit == 0 and missing", "if missing",
             (SECTORS,)),
    Mutation("half a sector stays known", "service/engine", "for block in range(each * size, (each + 1) * size)",
             "for block in [each * size]", (SECTORS,)),
    Mutation("a group reads the table of the other", "service/engine",
             'kwargs["group"] = self.layer_to_allocator[layer_idx].index', 'kwargs["group"] = 0', (LOCAL_PAGES,)),
    Mutation("pages of a prompt stay until the next one", "service/engine", "if self.cache.has_sectors:", "if False:",
             (LOCAL_PAGES,)),
    Mutation("the longest text as if no layer slid", "service/engine",
             "rounded(self.thread.manager.max_cached_len(None, length))", "rounded(length)",
             (f"{LOCAL_PAGES}::test_a_model_serves_texts_that_are_longer_than_its_cache",)),
    Mutation("prefixes shared between encodings", "service/engine", "token | self._salt", "token",
             (ENGINE,)),
    Mutation("slots of the wrong requests", "service/engine", "encode(written.position_ids[: len(slots)], slots)",
             "encode(written.position_ids[: len(slots)], slots.flip(0))", (VERIFICATION,)),
    Mutation("a repeated step goes on", "service/engine", "future.state.position_offset -= future.query_length",
             "future.state.position_offset -= 0", (OUT_OF_MEMORY,)),
    Mutation("top-p forgets the blocks before", "service/engine", "sums[block - 1] if block else 0.0",
             "0.0", (SAMPLING,)),
    Mutation("every token from the same noise", "service/engine", "_mixed(_mixed(seeds) + indices *",
             "_mixed(_mixed(seeds) + 0 * indices *", (SAMPLING,)),
    Mutation("cancelled generations run on", "service/engine", "manager.cancel_request(request.request_id)", "pass",
             (f"{EVICTION}::test_cancelling_gives_everything_back",)),
    Mutation("a request keeps its slot", "service/engine", "self._slots.release(slot)", "pass",
             (f"{ENGINE}::test_a_dead_thread_fails_what_ran_and_comes_back",)),
    Mutation("a tenant keeps its share of slots", "service/engine", "ticket.leave()", "pass",
             (f"{FAIRNESS}::test_one_tenant_cannot_take_every_slot",)),
    Mutation("prompts of a tenant last in first out", "service/engine", "[*decoding[:rows], *mine]",
             "[*decoding[:rows], *mine[::-1]]",
             (f"{FAIRNESS}::test_a_tenants_requests_come_in_their_order",)),
    Mutation("a short row attends to its padding", "service/engine", "(columns >= longest - uploaded(",
             "(columns >= 0 * uploaded(",
             (f"{CHOICE}::test_layers_that_keep_a_state_go_to_the_padded_engine",)),
    Mutation("every row leaves with the first one's cache", "service/engine", "parts[0][row : row + 1]",
             "parts[0][:1]", (f"{PADDED}::test_joined_caches_come_apart_again",)),
    Mutation("an answer stays in the states", "service/engine", "return torch.cat(parts)", "return parts[0]",
             (f"{HYBRIDS}::test_an_answer_is_forgotten_after_it_is_scored",)),
    Mutation("a row without keys is NaN on a card", "patches", "torch.finfo(query.dtype).min / 2)",
             "torch.finfo(query.dtype).min)", (f"{CARD}::test_a_long_text_by_chunks_has_the_same_scores",)),
    Mutation("uploads wait for the card", "patches", "tensor.pin_memory().to(device, non_blocking=True)",
             "tensor.to(device)", (f"{CARD}::test_a_replayed_step_waits_for_its_tokens_only",)),
    Mutation("inputs are written to the card one by one", "service/engine", "on_host(processor) if on_card and",
             "on_host(processor) if not on_card and", (f"{CARD}::test_a_replayed_step_waits_for_its_tokens_only",)),
    Mutation("padding writes into a request's page", "patches", "host[np.arange(count), columns], spare",
             "host[np.arange(count), columns], self._table.host[0, 0]", (f"{GRAPHS}::{JOINING}[llama]",)),
    Mutation("pages of blocks that were given up", "service/engine", "if known != blocks:",
             "if len(known) != len(blocks):", (f"{PAGED_ATTENTION}::test_pages_are_those_of_the_blocks",)),
    Mutation("block tables of the first step only", "patches", "if pages is not known and pages != known:",
             "if not known:", (f"{GRAPHS}::{JOINING}[llama]",)),
    Mutation("a graph for every table of slots", "service", "return step.size, self._patch.prepare(step.longest)",
             "return step.size, bool(self._patch.prepare(step.longest))", (f"{GRAPHS}::{MOVING}",)),
    Mutation("the mask of a packed row is read", "patches", "if attention_mask is None or seams.packs or bool(",
             "if attention_mask is None or bool(", (f"{GRAPHS}::{ADDING}",)),
    Mutation("a graph for any encoding that moves added positions", "patches",
             "return self.slots.moves, self.slots.adds(longest), ",
             "return self.slots.moves, bool(self.slots.adds(longest)), ", (f"{GRAPHS}::{ADDING}",)),
    Mutation("a list of calls for any number of rows", "patches", "(name, value.shape, value.stride(), value.dtype)",
             "(name, value.stride(), value.dtype)", (RECORDING,)),
    Mutation("a list of calls for inputs in any order", "patches", "(name, value.shape, value.stride(), value.dtype)",
             "(name, value.shape, value.dtype)", (TIDYING,)),
    Mutation("products are joined past a write", "patches", "return all(node in calls.pure or node in calls.seams",
             "return all(node in calls.pure or True", (TIDYING,)),
    Mutation("equal numbers of two types are one argument", "patches",
             "key = node.target, repr(node.args), repr(node.kwargs)", "key = node.target, node.args, repr(node.kwargs)",
             (TIDYING,)),
    Mutation("products are joined by their order", "patches",
             "by_address = sorted(products, key=lambda product: lefts[product].data_ptr())", "by_address = products",
             (TIDYING,)),
    Mutation("a list of calls names a function that is another one", "patches", "if is_misnamed or isinstance(",
             "if isinstance(", (RECORDING,)),
    Mutation("a list of calls has numbers of its first inputs", "patches", "_depends_on_numbers(func, args):", "False:",
             (RECORDING,)),
]  # fmt: skip

JOBS = [
    Mutation("a lease never ends", "service/jobs", "lapsed = Job.lease_until < now(session)",
             "lapsed = Job.lease_until.is_(None)", (QUEUE,)),
    Mutation("a lease is not checked", "service/jobs", "Job.number == number, Job.owner == self._owner,",
             "Job.number == number,", (QUEUE,)),
    Mutation("a finished unit is not stored", "service/jobs", "session.add(row)", "pass", (QUEUE,)),
    Mutation("claims are not counted from a unit on", "service/jobs", "job.claims = 0\n", "job.claims += 0\n",
             (QUEUE,)),
    Mutation("a death counts twice under another plan", "service/jobs",
             "case((counted, Job.claims), else_=Job.claims + 1)", "Job.claims + 1", (UNITS,)),
    Mutation("released jobs stay running", "service/jobs", 'waits = {"state": "queued",',
             'waits = {"state": "running",', (QUEUE,)),
    Mutation("units of others recorded", "service/jobs", "if unit.position in new:", "if True:", (UNITS,)),
    Mutation("a unit claimed twice", "service/jobs", "row.model == model, row.owner.is_(None), ~claimed)",
             "row.model == model)", (UNITS,)),
    Mutation("a key claimed by two jobs", "service/jobs", "row.owner.is_(None), ~claimed)", "row.owner.is_(None))",
             (UNITS,)),
    Mutation("units of another plan are recorded", "service/jobs", "if keys[position] == key]", "]", (UNITS,)),
    Mutation("units of another plan are taken again", "service/jobs", " or plan == self._other_plans.get(number):", ":",
             ("tests/service/jobs/test_failing.py", UNITS)),
    Mutation("a new plan of a job is left alone too", "service/jobs",
             "tuple_(Job.number, Job.plan).in_(list(self._other_plans.items()))", "Job.number.in_(self._other_plans)",
             (UNITS,)),
    Mutation("other weights plan a waiting job", "service/jobs", "or_(seen.ours, ~seen.left)", "true()",
             (SERVERS,)),
    Mutation("a server fails what another can plan", "service/jobs",
             "others_may = session.scalar(select(Job.number).where(others)) is not None", "others_may = False",
             (SERVERS,)),
    Mutation("jobs at once have more room", "service/jobs",
             "alone(session, tenant)\n                terms.check(session, tenant, without=job.number)", "pass",
             (STORE,)),
    Mutation("another plan is not left alone", "service/jobs", "self._other_plans[number] = plan", "pass", (UNITS,)),
    Mutation("outcomes shared between tenants", "service/jobs", '"tenant": tenant,\n', '"tenant": "",\n', (ADDRESS,)),
    Mutation("the encoding is not in the address", "service/jobs", '"encoding": encoding(unit),',
             '"encoding": "",', (ADDRESS,)),
    Mutation("a second value replaces the first", "service/cli", "if times > 1 and not option.multiple",
             "if False and not option.multiple", ("tests/service/cli/test_commands.py",)),
    Mutation("listings of long requests are empty", "service/jobs", "return found if len(written(found)) <=",
             "return {} if len(written(found)) <=", (STORE,)),
    Mutation("a failed measurement stays", "patches", "self._keeps_texts_apart = measured",
             "self._keeps_texts_apart = measured is not False", ("tests/patches/model/test_batch_layout.py",)),
    Mutation("the main module is swapped by several", "service/sharing", "    with _main_module:", "    if True:",
             ("tests/service/sharing/test_workers.py",)),
    Mutation("evaluators of a sweep are left out", "service/evaluation",
             ".union(*(part.models() for part in self.parts()))", "", ("tests/service/jobs/test_setup.py",)),
    Mutation("models that answered are left out", "service/evaluation",
             "return {method.model for method in self.methods}", "return {self.model}",
             ("tests/service/jobs/test_setup.py",)),
    Mutation("jobs of other tenants", "service/jobs", "select(Job).where(Job.id == job_id, Job.tenant == tenant)",
             "select(Job).where(Job.id == job_id)", (STORE,)),
    Mutation("a stage that others finished is left alone", "service/jobs",
             "job.plan.in_stages and job.digest != digest:", "job.plan.in_stages:",
             ("tests/service/jobs/test_stages.py",)),
    Mutation("jobs of a key that is gone run on", "service/jobs", "oldest = self._with_keys(oldest)", "pass",
             ("tests/service/jobs/test_runner.py",)),
    Mutation("a jump of the clock removes jobs", "service/jobs", "if gained > JUMP_S:", "if False:", (PRUNING,)),
    Mutation("outcomes of others leave with a job", "service/jobs", "join(Job).where(leaving, SHARES_NOTHING)",
             "join(Job).where(leaving)", (PRUNING,)),
    Mutation("one retry less", "service/jobs", "job.failures[position] > MOST_RETRIES",
             "job.failures[position] >= MOST_RETRIES", (FAILING,)),
]  # fmt: skip

CARRIED = [
    Mutation("keys of an indexer are not joined", "service/engine", '("keys", "values", "indexer_keys")',
             '("keys", "values")', (f"{TOKENS_OF}[deepseek_v32]",)),
    Mutation("a dropped state is read on from", "service/engine",
             "if pending <= token_budget or not self._forward.patch.continues:", "if pending <= token_budget:",
             (f"{TOKENS_OF}[jamba]",)),
    Mutation("a row leaves with the padding of its batch", "service/engine", "max(0, part.shape[-2] - num_tokens)", "0",
             (f"{PADDED}::test_joined_caches_come_apart_again",)),
    Mutation("a cache with a gap joins a batch", "service/engine", "together and row.request.sink_window is None",
             "together", (PADDED,)),
    Mutation("the check at the start joins no rows", "service/engine", "longest * STEP // PROMPT", "longest // 4",
             (f"{PADDED}::test_the_check_joins_rows_at_any_length_of_its_prompt",)),
    Mutation("rows that do not join end the engine", "service/engine", "        except CannotJoin as error:",
             "        except ZeroDivisionError as error:",
             (f"{HYBRIDS}::test_rows_that_do_not_join_in_service_have_a_forward_each",)),
    Mutation("rows that did not join are no reason of the engine", "service/engine",
             "        self.choice = self.choice.apart(error)", "        pass",
             (f"{HYBRIDS}::test_rows_that_do_not_join_in_service_have_a_forward_each",)),
    Mutation("the check ends within the window", "service/engine", "else max(PROMPT, window + BEHIND)", "else PROMPT",
             (f"{VERIFICATION}::test_the_check_reaches_past_the_window",)),
    Mutation("quantized layers may round by any amount", "patches", "min(ROUNDED * found, MOST_ROUNDED)", "1.0",
             (f"{VERIFICATION}::test_faults_are_caught_beside_rounding",)),
    Mutation("rounding of any size without a comparison in float32", "patches", "            check(undo)\n",
             "            pass\n", (f"{OWN_ATTENTION}::test_a_fault_beside_amplified_rounding_is_refused",)),
    Mutation("a fault in half precision passes for rounding", "patches", "return ROUNDED * max(found)", "return 9.0",
             (f"{OWN_ATTENTION}::test_a_fault_in_half_precision_alone_is_refused",)),
    Mutation("states of several streams are not looked at", "patches", "is_floating_point() and value.ndim > 2)",
             "is_floating_point() and value.ndim == 3)", (f"{MULTIMODAL}::test_text_is_carried[glm5_next]",)),
    Mutation("parts keep the attention of a patch", "patches", "for config in _every_config(model):",
             "for config in [model.config, text_config(model)]:",
             (f"{MULTIMODAL}::test_parts_beside_the_text_keep_their_attention",)),
    Mutation("SmolLM3 always rotates", "patches", "return any(config.no_rope_layers)", "return True",
             (NATIVE_POSITIONS,)),
    Mutation("keys of zero are measured", "patches", "if not key.any():", "if False:",
             ("tests/patches/model/test_unsupported.py::test_keys_of_zero_are_refused",)),
    Mutation("chosen keys beside a plain mask are not noted", "patches", "if indices is not None or mask is None or",
             "if mask is None or", (CHOSEN_KEYS,)),
    Mutation("a second chunk continues in every model", "patches", "return bool(((logits - expected).abs().amax(-1) <=",
             "return bool(((logits - expected).abs().amax(-1) * 0 <=", (f"{TOKENS_OF}[zamba]",)),
    Mutation("one product for every input", "patches", "last.x is not x or number not in last.parts",
             "number not in last.parts", ("tests/patches/model/fusion/test_projections.py",)),
    Mutation("parts whose keys turn have the code of others", "patches", "codes = codes + TURNING * _some_turn(",
             "codes = codes + 0 * _some_turn(", ("tests/patches/attention/paged/test_codes.py",)),
    Mutation("a norm of another sum", "patches", "_last.norm is norm and _last.total is x else",
             "_last.norm is norm else", ("tests/patches/model/fusion/test_residual.py",)),
    Mutation("a layer that hides the cache is fused", "patches", "attention.given == arguments and not any", "not any",
             ("tests/patches/model/fusion/test_residual.py",)),
    Mutation("parts of another length", "patches", "2 * (cached > 64 * split)", "2 * (cached > 32 * split)",
             ("tests/patches/attention/paged/test_decode.py",)),
    Mutation("parts within a gap", "patches", "part += within * (part >= before)", "part += 0",
             ("tests/patches/attention/paged/test_decode.py",)),
    Mutation("a step ahead without its tokens", "patches", "        self.input_ids[0, : len(tokens)].copy_(tokens)\n",
             "", (f"{AHEAD}::test_tokens_are_those_of_ordinary_steps",)),
    Mutation("a step ahead with the noise of the one before", "service/engine", "(state.generated_tokens, ahead)\n",
             "(state.generated_tokens)\n", (f"{AHEAD}::test_tokens_are_those_of_ordinary_steps",)),
    Mutation("work in a step does not count", "service/engine", "return len(self._queue) + is_in_step",
             "return len(self._queue)", ("tests/service/engine/test_engine.py",)),
    Mutation("top-p without likely tokens", "service/engine", "(1.0 - top_p) / 2 * total", "(1.0 - top_p) * 99 * total",
             (f"{SAMPLING}::test_the_last_of_top_p_is_that_of_all_weights_in_order",)),
    Mutation("top-k by its bound alone", "service/engine", "return _last(likely, top_k) if",
             "return _last(likely, 1) if",
             (f"{SAMPLING}::test_the_last_of_top_k_is_that_of_all_weights_in_order",)),
    Mutation("truncation drops its last token", "service/engine", "least.nextafter(torch.full_like(least, -math.inf))",
             "least",
             (f"{SAMPLING}::test_truncation_keeps_what_it_says",)),
    Mutation("a penalty without its token", "service/engine", "            and not request.sampling.needs_tokens\n", "",
             (f"{AHEAD}::test_what_needs_the_tokens_before_waits_for_them",)),
    Mutation("an end before that of the grammar", "service/engine", "            allowed[self._ends] = False\n",
             "            pass\n",
             ("tests/service/engine/sampling/test_grammar.py",)),
    Mutation("a grammar that reads a token twice", "service/engine", "        self._taken = len(answer)\n", "",
             ("tests/service/engine/sampling/test_grammar.py",)),
    Mutation("joined schemas are closed", "service/models", " and id(node) not in opened and", " and",
             ("tests/service/models/text/test_json_schemas.py",)),
    Mutation("strict closes nothing", "service/api", "schema if strict is False else closed(schema, bare=bool(strict))",
             "schema", ("tests/service/openai/structure/test_strict.py",)),
    Mutation("reasoning that is held back is not counted", "service/api", "                    reasoning += unsaid\n",
             "                    reasoning += len(piece.tokens)\n", ("tests/service/openai/text/test_reasoning.py",)),
    Mutation("bodies in UTF-16", "service/api", 'json.loads(raw.decode("utf-8-sig"),', "json.loads(raw,",
             ("tests/service/api/http/test_bodies.py",)),
    Mutation("unknown formats reach the library", "service/models", '            del node["format"]\n',
             "            pass\n",
             ("tests/service/models/text/test_json_schemas.py",)),
    Mutation("changed logits stay", "service/engine", "for at, values in reversed(changed):", "for at, values in ():",
             ("tests/service/engine/sampling/test_adjustment.py",)),
    Mutation("a token is counted twice", "service/engine", "        self._read = len(answer)\n", "",
             ("tests/service/engine/sampling/test_adjustment.py",)),
    Mutation("a stop string that is asked for is left out", "service", "at + len(self.stop) if self._with_stop else at",
             "at", ("tests/service/openai/text/test_ends.py::test_any_text_in_any_pieces",)),
    Mutation("a stop token that is asked for is left out", "service", "ends if self.wanted.with_stop else ", "",
             ("tests/service/openai/test_drawing.py::TestStopTokens",)),
    Mutation("token ids without text are lost", "service", "len(ids) if final else min(self._sent", "min(self._sent",
             ("tests/service/openai/test_token_ids.py",)),
    Mutation("token ids of calls are lost", "service", 'found = found or [{"delta": {}}]', "if not found: return found",
             ("tests/service/openai/test_token_ids.py::test_tokens_of_calls_are_among_them",)),
    Mutation("a bad word ends behind any token", "service/engine", "self._lasts.setdefault(tuple(before), [])",
             "self._lasts.setdefault((), [])", (f"{ADJUSTMENT}::test_the_last_token_of_a_bad_word_may_not_come",)),
    Mutation("bad words are drawn ahead of their tokens", "service/engine", " or bool(self.bad_words)", "",
             (f"{ADJUSTMENT}::test_the_last_token_of_a_bad_word_may_not_come",)),
    Mutation("a form may need a token that is not allowed", "service/engine", "allowed = allowed & listed", "pass",
             ("tests/service/openai/test_bounds.py::TestAllowedTokens::test_within_a_form",)),
    Mutation("scoring draws a bad word", "service", "not (changes or bounds)", "not changes",
             ("tests/service/openai/test_drawing.py::test_the_token_of_scoring_is_drawn_where_something_changes_it",)),
    Mutation("any function may be called", "service", "parsing_of(tokenizer, prompt, tools), names=self.allowed",
             "parsing_of(tokenizer, prompt, tools)", (f"{ALLOWED}::test_a_call_of_another_function_is_text",)),
    Mutation("any function must be called", "service", "strict=each.strict) for each in self.callees",
             "strict=each.strict) for each in self.functions", (f"{ALLOWED}::test_required_forms_calls_of_these",)),
    Mutation("a conversation loses its instructions", "service", "[*range(lead), *range(begin, len(roles))]",
             "[*range(start, len(roles))]", ("tests/service/openai/test_shortening.py",)),
    Mutation("a result without its call begins", "service", "range(lead + 1, len(roles)) if roles[at] != \"tool\"",
             "range(lead + 1, len(roles))", ("tests/service/openai/test_shortening.py::test_any_conversation",)),
    Mutation("a conversation that fits is shortened", "service", "await count(whole) <= room.whole",
             "await count(whole) <= room.short", ("tests/service/openai/test_shortening.py",)),
    Mutation("a shorter prompt loses its BOS", "service", "min(most, 1) if ids[0] == bos else 0", "0",
             ("tests/service/openai/test_truncation.py",)),
    Mutation("a shorter prompt is echoed whole", "service", "prompt.text[begin:], kept)", "prompt.text, kept)",
             ("tests/service/openai/test_truncation.py::test_the_echo_is_that_of_the_tokens",)),
    Mutation("a prompt always loses its beginning", "service", 'if keeps.side == "right":', "if False:",
             ("tests/service/openai/test_truncation.py::test_the_first_tokens_stay",)),
    Mutation("a prompt without its end is echoed whole", "service", "text = prompt.text[: prompt.starts[most]]",
             "text = prompt.text",
             ("tests/service/openai/test_truncation.py::test_the_echo_is_that_of_the_tokens",)),
    Mutation("half a character that is echoed whole", "service", "text if is_whole else f", "text if True else f",
             ("tests/service/openai/test_truncation.py::test_half_a_character_at_the_end",)),
    Mutation("answers decoded without the prompt", "service", "self.wanted.stops, least, context,",
             "self.wanted.stops, least, (),", ("tests/service/openai/text/test_first_words.py",)),
    Mutation("a context that begins within a character", "service",
             "            if byte is None or not 0x80 <= byte < 0xC0:\n", "            if True:\n",
             ("tests/service/openai/text/test_first_words.py",)),
    Mutation("half a character in the prompt", "service", "self._begun_character() or ", "",
             ("tests/service/openai/text/test_first_words.py",)),
    Mutation("a developer whom the template drops", "service", '{**message, "role": "system"} if', "message if",
             (DROPPED,)),
    Mutation("a developer whom the template knows is renamed", "service", 'return "developer" in _texts',
             'return "" in _texts', (DROPPED,)),
    Mutation("an effort that reaches no template", "service", "EFFORT: effort}", '"effort": effort}', (TEMPLATING,)),
    Mutation("two efforts", "service", ".get(EFFORT, effort) != effort:", ".get(EFFORT, effort) is None:",
             (TEMPLATING,)),
    Mutation("scores that count as cached", "service",
             "found = 0 if self._prompts[prompt].wanted.scored else ", "found = ",
             (UNSUPPORTED,)),
    Mutation("usage without the cache", "service", "scored else generation.cached_tokens", "scored else 0",
             (UNSUPPORTED,)),
    Mutation("reasoning among the tokens of a text", "service", "self.start < end and self.stop > begin",
             "self.start < end", (f"{RESPONSE_TOOLS}::test_log_probabilities_are_of_the_text",)),
    Mutation("tokens of text that is held back", "service", "[held for held in self._held if held.start >= end]", "[]",
             (RESPONSE_LOGPROBS,)),
    Mutation("text that is held back counts as said", "service", "self.behind = 0 if self._failed else len(self._raw)",
             "self.behind = 0", (RESPONSE_LOGPROBS,)),
    Mutation("text that a form holds back counts as said", "service", "self.behind = self._thoughts.behind + (",
             "self.behind = 0 * (", (RESPONSE_LOGPROBS,)),
    Mutation("empty prompts are refused", "service", '_Prompt = Annotated[str, Tag("one_text")]', "_Prompt = _Text",
             ("tests/service/openai/test_completions.py::test_an_empty_prompt_begins_at_bos",)),
    Mutation("a reference to an item", "service", 'raise problem("reference", STORES_NOTHING, "type")', "return {}",
             (f"{RESPONSE_TOOLS}::test_refusals_name_the_field",)),
    Mutation("a message that the template drops", "service", "if place not in written and messages",
             "if not written and messages", (DROPPED,)),
    Mutation("a mark that takes another branch", "service",
             " and messages[place][\"content\"].strip() not in text:", ":", (DROPPED,)),
    Mutation("marks in capitals", "service", "MARK.findall(render(marked).lower())", "MARK.findall(render(marked))",
             (DROPPED,)),
    Mutation("a text that only a user's last turn has", "service",
             "not found or any(place in written for written in found)", "not found", (DROPPED,)),
    Mutation("a mark in place of an object", "service", 'f"{content[:-1]}{_mark(place)}{content[-1]}"',
             "_mark(place)", (DROPPED,)),
    Mutation("a lead that the next one replaces", "service", 'if own["role"] not in LEADS else set())', ")",
             (DROPPED,)),
    Mutation("two leads where the template refuses the second", "service", "        if leads < 2:\n            raise\n",
             "        raise\n", (DROPPED,)),
    Mutation("places before the leads were one", "service", "place + leads - 1 if place else place", "place",
             (DROPPED,)),
    Mutation("the role that the template was given", "service", "_left_out(messages[dropped],",
             "_left_out(own[dropped],", (DROPPED,)),
    Mutation("a table without an end", "service", "if geometry.table_rows is None:\n        return model.max_length",
             "if True:\n        return model.max_length", ("tests/service/api/test_echo.py",)),
    Mutation("turns of one role apart", "service", """runs[-1][0]["role"] == message["role"] != "tool":""", "False:",
             (MESSAGES,)),
    Mutation("a prefilled text that ends", "service", "(is_text and not self.add_generation_prompt)", "False",
             (MESSAGES,)),
    Mutation("an end of the text as a stop token", "service", "for token in self.stop_token_ids if token not in eos)",
             "for token in self.stop_token_ids)", (STOP_REASONS,)),
    Mutation("a stop token before a stop string", "service", "self.stop_token if self.stop is None else self.stop",
             "self.stop if self.stop_token is None else self.stop_token", (STOP_REASONS,)),
    Mutation("a stream without the reason of its end", "service", '"stop_reason": part.piece.stop_reason, **echo',
             "**echo", (STOP_REASONS,)),
    Mutation("a round by the last tokens alone", "service", "evidence[subject].loss_of_round)",
             "evidence[subject].loss)", ("tests/service/evaluation/recommend/test_answer.py",)),
    Mutation("a last turn that says nothing", "service", 'if messages[-1] == {"role": "assistant", "content": ""}:',
             "if False:", (MESSAGES,)),
    Mutation("failures before a route in the form of others", "service", "path.startswith(tuple(f", "bool(tuple(f",
             (MESSAGES,)),
    Mutation("Anthropic's list of models for everybody", "service", "if is_from_client(Headers(scope=scope)) else",
             "if scope else", (ANTHROPIC_MODELS,)),
    Mutation("failures about models in the form of others", "service", '_is_under(path, "/v1") and',
             "False and", (ANTHROPIC_MODELS,)),
    Mutation("failures about models in Anthropic's form for everybody", "service", "is_from_client(headers) and _is",
             "_is", (ANTHROPIC_MODELS,)),
    Mutation("reasoning that a cut prompt has not begun", "service", "return first, await run_in_threadpool(",
             "return first, (lambda *_: text)(", ("tests/service/openai/text/test_reasoning.py",)),
    Mutation("a begun call before the whole ones", "service", 'Said("" if calls else self._raw,', "Said(self._raw,",
             ("tests/service/openai/structure/test_tools.py",)),
    Mutation("a count of a conversation that is not shortened", "service",
             "name.served, await text_of(body, request, name))", "name.served, body.written(name.served))",
             ("tests/service/openai/test_responses.py",)),
    Mutation("failures of OpenAI's routes in another form", "service", "and not _is_under(path, *OF_OPENAI)",
             "", (ANTHROPIC_MODELS,)),
    Mutation("a page of models from the first one", "service", "start = max(0, end - limit)", "start = 0",
             (ANTHROPIC_MODELS,)),
    Mutation("a page of models begins with its cursor", "service", 'after_id, places) + 1', "after_id, places)",
             (ANTHROPIC_MODELS,)),
    Mutation("more models in the other direction", "service", "if before_id is None else start > 0",
             "", (ANTHROPIC_MODELS,)),
    Mutation("cached tokens as input", "service", "usage.prompt_tokens - cached,", "usage.prompt_tokens,", (MESSAGES,)),
    Mutation("places without the instructions", "service", "offer.for_template(), fields)\n",
             "offer.for_template())\n", (DROPPED,)),
    Mutation("no effort, refused", "service", '(effort == "none" and not thinks(tokenizer))', "False", (TEMPLATING,)),
    Mutation("no effort of a model that reasons", "service", '(effort == "none" and not thinks(tokenizer))',
             'effort == "none"', (TEMPLATING,)),
    Mutation("a type that is named twice", "service", """f"must be one of {', '.join(KINDS)}", "type")""",
             """f"must be one of {', '.join(KINDS)}, not {kind!r}", "type")""",
             (f"{RESPONSE_TOOLS}::test_refusals_name_the_field",)),
    Mutation("a step ahead into the same page", "patches", "is_written and (rows[:, 1] % self.page_size).all() else",
             "is_written else", (f"{AHEAD}::test_one_request_waits_for_the_host_at_edges_only",)),
    Mutation("a step that is being read, overwritten", "patches",
             "self._now, self._next = (_Numbers(layout, page_size, device) for _ in range(2))",
             "self._now = self._next = _Numbers(layout, page_size, device)",
             (f"{LATE}::test_tokens_are_those_of_steps_at_once",)),
    Mutation("tokens read before they are drawn", "service/engine", "                self._arrival.synchronize()\n",
             "                pass\n", (f"{LATE}::test_tokens_are_those_of_steps_at_once",)),
    Mutation("a step before its inputs", "service/engine",
             "            stream.wait_stream(torch.cuda.current_stream(stream.device))\n", "            pass\n",
             (f"{LATE}::test_tokens_are_those_of_steps_at_once",)),
    Mutation("scoring beside a step in flight", "service/engine",
             "            torch.cuda.current_stream(stream.device).wait_stream(stream)\n", "            pass\n",
             (f"{LATE}::test_scoring_between_steps_comes_behind_them",)),
    Mutation("a step in flight behind the last request", "service/engine",
             "            self.hand_out()\n            self.model_runner.drop_ahead()\n        return ready",
             "            self.hand_out()\n        return ready",
             (f"{AHEAD}::test_requests_that_come_and_leave_change_nothing",)),
    Mutation("a step has slots of two moments", "service/engine", "self.rows.numbers[:, 0].tolist())",
             "[r.slot if (r := self.requests.get(f.state.request_id)) else 0 for f in self.requests_in_batch])",
             (f"{BETWEEN}::test_a_request_that_leaves_before_its_step_changes_no_other",)),
    Mutation("logits of the first part only", "service/evaluation", "for start in range(0, len(logits), rows):",
             "for start in range(0, rows, rows):", ("tests/service/evaluation/perplexity/test_scoring.py",)),
    Mutation("blocks of a document as if independent", "service/evaluation",
             "if documents > 1 or len(pieces) <= LEAST:", "if True:", ("tests/service/evaluation/test_student.py",)),
    Mutation("two intervals for the same tokens", "service/evaluation",
             "if same_tokens and a is not None", "if False and a is not None",
             (f"{SWEEPS}/test_doubt.py::test_what_is_hard_for_both_is_no_doubt",)),
    Mutation("a limit without doubt of its own", "service/evaluation", "factor * (others.high - other.value)", "0",
             (f"{SWEEPS}/test_doubt.py",)),
    Mutation("a reference without doubt of its own", "service/evaluation",
             "factor * (other.value - others.low)", "0", (f"{SWEEPS}/test_doubt.py",)),
    Mutation("a product for one row more", "service/models", "for most, product in self.choice if rows <= most",
             "for most, product in self.choice if rows <= most + 1", ("tests/service/models/linear/test_layers.py",)),
    Mutation("a product without a gradient", "service/models", "if rows == 0 or torch.is_grad_enabled() or",
             "if rows == 0 or", ("tests/service/models/linear/test_layers.py",)),
    Mutation("a product under autocast", "service/models", ' or torch.is_autocast_enabled("cpu"):', ":",
             ("tests/service/models/linear/test_layers.py",)),
    Mutation("a kernel for each number of rows", "service/models", "        found.remove(plain)", "        pass",
             ("tests/service/models/linear/test_layers.py",)),
    Mutation("disturbed runs count", "service/models", "second < ALIKE * first for", "True for",
             ("tests/service/models/linear/test_times.py",)),
    Mutation("a product that is hardly faster", "service/models", "if taken < GAIN * times[best]:",
             "if taken < times[best]:", ("tests/service/models/linear/test_times.py",)),
    Mutation("packed weights that are slower", "service/models", "if packed_choice and not is_slower else None",
             "if packed_choice else None", ("tests/service/models/linear/test_layers.py",)),
    Mutation("one number of rows decides on packing", "service/models", "MOST = 1.5\n", "MOST = 1e9\n",
             ("tests/service/models/linear/test_layers.py",)),
    Mutation("a tied weight is packed", "service/models", "choices.packed and linear.weight.data_ptr() not in kept:",
             "choices.packed:", ("tests/service/models/linear/test_layers.py",)),
    Mutation("events for a revoked key", "service/api", "if not (is_valid or was_valid):", "if False:",
             ("tests/service/api/http/test_access.py",)),
    Mutation("a request waits for a model with the memory of another", "service/api",
             "tickets.popitem()[1].leave()", "tickets.popitem()", ("tests/service/sharing/test_admission.py",)),
    Mutation("one model's own limit keeps others out of the pool", "service/sharing",
             "and self.reserved + blocked.needed <= self.capacity", "", ("tests/service/sharing/test_admission.py",)),
    Mutation("following counts as a request", "service/api", 'r"GET /jobs/[^/]+/events|DELETE', 'r"DELETE',
             ("tests/service/api/http/test_access.py",)),
    Mutation("cancelling counts as a request", "service/api", '/events|DELETE /jobs/[^/]+")', '/events")',
             ("tests/service/api/http/test_access.py",)),
    Mutation("submissions under one key go side by side", "service/api",
             "async with submissions.setdefault((tenant, key), asyncio.Lock()):", "async with asyncio.Lock():",
             (RATES,)),
    Mutation("an evaluation gives back what it read", "service/api",
             "reserved.tokens = charged - progress.tokens_done", "pass", (RATES,)),
    Mutation("a cancelled job keeps its tokens", "service/jobs", "moved = before.tokens_total - before.tokens_done",
             "moved = 0", (STORE,)),
    Mutation("one start of a child", "service/sharing", "TRIES = 3", "TRIES = 1",
             ("tests/service/sharing/test_workers.py",)),
    Mutation("pool without a bound", "service/sharing", "fits = self.reserved + size <= self.capacity or not",
             "fits = True or not", ("tests/service/sharing/test_admission.py",)),
    Mutation("pool without an order", "service/sharing", "return fits and all(arrived < since for since in older)",
             "return fits", ("tests/service/sharing/test_admission.py",)),
    Mutation("untouched caches count as free", "service/models", "free_bytes(device) - sum(untouched))",
             "free_bytes(device))", ("tests/service/models/memory/test_cache_size.py",)),
    Mutation("allocated pages count twice", "service/models", " and not served.engine.has_pages()", "",
             ("tests/service/models/memory/test_reserved.py",)),
    Mutation("states count as free", "service/models", "return 2 * cache if padded else cache", "return cache",
             ("tests/service/models/memory/test_reserved.py",)),
    Mutation("a model that is only scored has a cache", "service/models", "padded=padded) if choice.generates else 0",
             "padded=padded)", ("tests/service/models/memory/test_reserved.py",)),
    Mutation("packed without memory", "service/models", "    if available_bytes() >= 2 * size:\n        return True",
             "    return True", ("tests/service/models/linear/test_layers.py",)),
    Mutation("a weight is packed that others read", "service/models", "_shared(model) | _read_by_others(model), True",
             "_shared(model), True", ("tests/service/models/linear/test_layers.py",)),
    Mutation("a layout that nobody knows", "service/models",
             "if fits and _is_same(_by_rows(_blocks(packed, weight, width), outputs), weight):", "if fits:",
             ("tests/service/models/linear/test_packing.py",)),
    Mutation("layers that cannot be packed keep others plain", "service/models",
             "kind, width_of(linear.weight)].append", "kind, None].append",
             ("tests/service/models/linear/test_layers.py",)),
    Mutation("a weight in another layout than its probe", "service/models",
             "if not _is_same(_by_rows(blocks[group][None], outputs - first), weight[first : first + width]):",
             "if False:", ("tests/service/models/linear/test_packing.py",)),
    Mutation("a refused page costs its neighbours", "service/models", "    if refused and stop - start > PAGE:",
             "    if False:", ("tests/service/models/memory/test_huge_pages.py",)),
    Mutation("a packed weight is written", "service/models", "        if func._schema.is_mutable:", "        if False:",
             ("tests/service/models/linear/test_packing.py",)),
    Mutation("a packed weight's memory is freed", "service/models", "    memory.packed = packed\n", "    pass\n",
             ("tests/service/models/linear/test_packing.py",)),
    Mutation("int4 multiplies a prompt row by row", "service/models",
             "((FEW, by_codes), (UNBOUNDED, by_blocks))", "((UNBOUNDED, by_codes),)", (INT4,)),
    Mutation("all numbers of an int4 weight exist at once", "service/models",
             "most = min(outputs, max(LEAST, BLOCK // (4 * inputs)))", "most = outputs", (INT4,)),
    Mutation("neighbours in an int4 weight are swapped", "service/models", "even | odd << 4", "odd | even << 4",
             (INT4,)),
    Mutation("an int4 layer in bfloat16 leaves torchao's kernel", "service/models",
             "and layer.weight.dtype != torch.bfloat16", "", (INT4,)),
    Mutation("contents depend on the layout", "service/models", "    if isinstance(tensor, PackedWeight):\n",
             "    if False:\n", ("tests/service/models/linear/test_packing.py",)),
    Mutation("an adapter shares no packed weight", "service/models",
             'lambda name: not CHANGED.isdisjoint(name.split("."))', "lambda name: True",
             ("tests/service/models/linear/test_packing.py",)),
    Mutation("the folder of an adapter is read by other systems", "service/export",
             "declared = source.base or geometry", "declared = geometry",
             (f"{EXPORTS}::test_what_the_folder_of_an_adapter_declares_is_written_out",)),
    Mutation("own encodings are the same in every system", "service/export",
             "expression = target.own(replace(wanted, geometry=declared))", "expression = target.unchanged(length)",
             (OWN_SCALING,)),
    Mutation("null ends an entry that SGLang reads", "service/export", "name: ended.get(name) for", "name: None for",
             (OWN_SCALING,)),
    Mutation("a refused export without a length is like one with it", "service/api",
             "raise error.without_length(trained) from None", "raise",
             ("tests/service/export/test_route.py::test_bad_input_is_refused_with_the_field_and_what_it_takes",)),
    Mutation("a caption has the width of its table", "service/cli", "caption, table.caption = table.caption, None",
             "caption = None", ("tests/service/cli/test_tables.py",)),
    Mutation("true is a number", "patches", 'ConfigDict(extra="forbid", strict=True)', 'ConfigDict(extra="forbid")',
             ("tests/service/api/test_openapi.py::test_each_violated_field_is_refused_as_documented",)),
    Mutation("a document twice", "service/evaluation", "        if before != index:\n", "        if False:\n",
             ("tests/service/evaluation/test_checks.py::test_a_repeated_document_is_no_second_one",)),
    Mutation("without a cache, only the last chunk is read", "service/evaluation",
             "self.cache = ids if self.cache is None else torch.cat((self.cache, ids))", "self.cache = ids",
             (f"{HYBRIDS}::test_a_model_that_returns_no_cache_is_scored_only",)),
    Mutation("moved positions reach the trained length", "patches",
             "return None if trained is None else self.stretched(trained, geometry)", "return trained", (EXPORTS,)),
    Mutation("layers that do not attend have keys", "service/models", "patch.cached, len(patch.caching_layers)",
             "patch.cached, patch.model.config.get_text_config().num_hidden_layers",
             ("tests/service/models/memory/test_cache_size.py::test_only_layers_that_attend_have_keys[jamba]",)),
    Mutation("a budget cuts windows without a word", "service/evaluation", "    if read < room:\n", "    if False:\n",
             ("tests/service/evaluation/recommend/test_plan.py::test_a_budget_bounds_the_tokens",)),
    Mutation("the own encoding alone is timed", "service/cli", 'if error.param != "methods.0":', "if True:",
             ("tests/service/cli/test_evaluations.py::test_the_speed_is_that_of_an_encoding_with_the_length",)),
    Mutation("one window is a reason against a candidate", "service/evaluation", "LEAST_SHARED = 2", "LEAST_SHARED = 1",
             (f"{RECOMMEND}::test_one_window_is_no_reason_against_a_candidate",)),
    Mutation("another finalist is exported although the answer can be", "service/evaluation",
             "for s in (chosen, *others)", "for s in others",
             (f"{EXPORTABLE}::test_an_answer_that_no_system_can_express_says_so_and_names_one_that_is",)),
    Mutation("an encoding to avoid is exported", "service/evaluation", "if label not in avoided), None)", "), None)",
             (f"{EXPORTABLE}::test_an_encoding_to_avoid_is_not_named_for_export",)),
    Mutation("the best exportable encoding leaves early", "service/evaluation",
             "next(filter(self._carriers, ranked), 0)", "0",
             (f"{EXPORTABLE}::test_the_best_that_a_system_can_express_is_measured_to_the_end",)),
    Mutation("the best of the least cost leaves early", "service/evaluation",
             "cheap, exportable = self._cheap(ranked),", "cheap, exportable = 0,",
             (f"{RECOMMEND}::test_the_best_of_the_least_cost_is_measured_as_long_as_it_may_be_good_enough",)),
    Mutation("short requests of a policy keep a declared scaling that costs quality", "service/evaluation",
             "return 0 if above.is_tie or above.mean <= self._tolerance else plain", "return 0",
             (f"{DECLARED}::test_plain_rope_serves_short_requests_if_a_declared_scaling_surely_costs_quality",)),
    Mutation("key tokens of other windows", "service/evaluation", '"protocol", "windows", "bos")', '"protocol", "bos")',
             ("tests/service/evaluation/test_long_perplexity.py::test_windows_bound_the_passes_of_tail_alone",)),
    Mutation("a partial result speaks of all methods", "service/evaluation",
             "return text if text.startswith(lead) else lead + text", "return text",
             (f"{WORDS}::TestPartial::test_words_and_heading_begin_with_the_scope",)),
    Mutation("lengths that only one of the methods has finished are compared", "service/evaluation",
             "shared = set.intersection(*complete.values())", "shared = set.union(*complete.values())",
             ("tests/service/jobs/test_early.py::test_lengths_are_complete_where_no_method_is",)),
    Mutation("the answer of a partial sweep speaks of all evaluations", "service/evaluation/sweep",
             "self.answer.words = self._scoped(self.answer.words)", "pass",
             (f"{WORDS}::test_the_json_of_an_answer_begins_with_the_scope_once",)),
    Mutation("pictures of a partial result without its scope", "service/figures", "if scope := result.scope():",
             "if (scope := result.scope()) and False:",
             (f"{WORDS}::TestPartial::test_every_picture_has_it_above",)),
    Mutation("tables of paired perplexities say nothing of the ratio", "service/reports",
             'by_ratio = ratio_note(scores) if below else ""', 'by_ratio = ""',
             (f"{WORDS}::TestByRatio::test_tables_figures_and_reports_of_perplexities_name_it",)),
    Mutation("the reference is compared with itself", "service/evaluation",
             "itself = limit is not None and score is reference", "itself = False",
             (f"{SWEEPS}/test_doubt.py::test_the_reference_itself_is_no_doubt",)),
    Mutation("shares are compared by a ratio", "service/evaluation",
             "by_ratio=limit is not None and not itself and self._is_by_ratio(part, score, reference),",
             "by_ratio=True,",
             (f"{SWEEPS}/test_doubt.py::test_shares_and_other_tokens_are_not_judged_by_a_ratio",)),
    Mutation("shared text counts against the longer document", "service/evaluation",
             "np.minimum(sizes[:, None], sizes)", "np.maximum(sizes[:, None], sizes)",
             ("tests/service/evaluation/test_overlap.py::test_shares_are_those_of_sets_of_windows",)),
    Mutation("labels of encodings that begin alike are equal", "service/figures",
             "text if len(group) == 1 else _around(texts[name], differs, most)", "text",
             (f"{PICTURES}::TestLooks::test_other_long_names_show_the_part_that_differs",)),
    Mutation("labels of encodings lack the parameters that differ", "service/figures", "if part not in shared",
             "if part in shared", (f"{PICTURES}::TestLooks::test_long_encodings_show_the_parameters_that_differ",)),
    Mutation("looks by the order of the request", "service/figures", "enumerate((OWN, *others, AUTO))",
             "enumerate(names)",
             (f"{PICTURES}::TestLooks::test_a_method_has_one_look_in_all_figures_of_the_same_methods",)),
    Mutation("a status without the reason of a replica", "service/scale", 'message=reason_in(deployment["message"]) or',
             "message=", ("tests/service/scale/test_command.py::TestCluster",)),
]  # fmt: skip

MUTATIONS = [*ATTENTION, *CARRIED, *ENCODING, *SERVED, *JOBS]


def copied(folder: Path) -> Path:
    """A copy of the sources below ``folder``, beside a link to the shared data."""
    root = folder / "repository"
    root.mkdir()
    for name in COPIED:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    shared = ROOT.parent / "shared"
    if shared.is_dir():
        (folder / shared.name).symlink_to(shared)
    return root


def tested(root: Path, tests: Sequence[str]) -> int:
    """Exit code of a fork of this process that runs ``tests`` in the sources of ``root``."""
    process = multiprocessing.get_context("fork").Process(target=run_pytest, args=(root, tests))
    process.start()
    process.join(LONGEST_S)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def run_pytest(root: Path, tests: Sequence[str]) -> None:
    """Silently, with the sources of ``root`` in place of these."""
    for name in [name for name in sys.modules if name.partition(".")[0] in COPIED]:
        del sys.modules[name]
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    os._exit(ENDED + pytest.main([*options, *tests], plugins=[WithoutShrinking()]))


class WithoutShrinking:
    """One example that fails is enough; hypothesis would look for the smallest."""

    @staticmethod
    def pytest_collection() -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("unshrunk", settings.get_profile("ropeway"), phases=phases)
        settings.load_profile("unshrunk")


def verdict(mutation: Mutation, root: Path) -> str:
    """ "caught", "survived" or why it was not tested; the sources of ``root`` are restored."""
    try:
        path = mutation.file(root)
    except LookupError as error:
        return f"not applied: {error}"
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace(mutation.text, mutation.wrong), encoding="utf-8")
    try:
        code = tested(root, mutation.tests)
    finally:
        path.write_text(source, encoding="utf-8")
    return {PASSED: "survived", FAILED: "caught"}.get(code, f"not tested: the process ended with {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[mutation.name for mutation in MUTATIONS], metavar="NAME")
    parser.add_argument("--tests-pass", action="store_true", help="do not run the tests without a mutation first")
    arguments = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if arguments.only is None or mutation.name in arguments.only]
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    for module in HEAVY:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        tests = sorted({test for mutation in chosen for test in mutation.tests})
        if not arguments.tests_pass and tested(root, tests) != PASSED:
            print("the tests fail without any mutation")
            return 1
        verdicts = {}
        for mutation in chosen:
            verdicts[mutation.name] = verdict(mutation, root)
            print(f"{mutation.name}: {verdicts[mutation.name]}", flush=True)
    print()
    for mutation in chosen:
        print(f"| {mutation.name} | {mutation.folder} | {verdicts[mutation.name]} |")
    caught = sum(found == "caught" for found in verdicts.values())
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
