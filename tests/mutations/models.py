"""Faults in seams: what a patched model computes for each of its architectures."""

from tests.mutations.mutation import Mutation

ROTATIONS = "tests/patches/model/architectures/test_rotations.py"
LEARNED_FACTORS = f"{ROTATIONS}::test_learned_factors_multiply_frequencies_as_in_transformers"
WITHOUT_EFFECT = "tests/patches/model/architectures/test_without_effect.py"
MULTIMODAL = "tests/patches/model/architectures/test_multimodal.py"
NATIVE_POSITIONS = "tests/patches/model/architectures/test_native_positions.py"
OTHER_FAMILIES = "tests/patches/model/architectures/test_other_families.py"
GPT_NEO = "test_the_local_layers_of_gpt_neo_have_a_window"
DUAL_CHUNK = "tests/patches/model/test_dual_chunk.py"
OWN_ATTENTION = "tests/patches/model/test_own_attention.py"
STEPS = "tests/patches/model/test_steps_ahead.py"
DECODE = "tests/patches/model/test_decode.py"
SLOTS = "tests/patches/model/test_slots.py"
TIDYING = "tests/patches/model/recorded/test_tidying.py"
RECORDING = "tests/patches/model/recorded/test_recording.py"
PADDING = "tests/patches/model/library/test_padding.py"
CALLS = "tests/patches/model/library/test_calls.py"
LIBRARY = "tests/patches/model/library/test_library.py"
GENERATE = "tests/patches/model/library/test_generate_limits.py"
STATIC_CACHE = "tests/patches/model/library/test_static_cache.py"
PARITY = "tests/patches/model/library/test_transformers_parity.py"
CHOSEN_KEYS = "tests/patches/model/architectures/test_chosen_keys.py"

MODELS = [
    Mutation("an encoding without effect is accepted", "patches", "if all(band.keeps_positions for",
             "if False and all(band.keeps_positions for",
             (f"{WITHOUT_EFFECT}::test_maps_and_masks_beyond_every_window_are_refused",)),
    Mutation("encodings lack learned factors", "patches", "if learned is None or _is_final(schedule) else",
             "if True else", (LEARNED_FACTORS,)),
    Mutation("learned factors multiply a list", "patches", "if learned is None or _is_final(schedule) else",
             "if learned is None else",
             (LEARNED_FACTORS,)),
    Mutation("exports divide by learned factors", "patches", "* (geometry.learned_factors or 1.0)", "* 1.0",
             (LEARNED_FACTORS,)),
    Mutation("a table has the order of its buffer", "patches", "kept if self.order is None else kept[self.order]",
             "kept", (f"{ROTATIONS}::test_another_order_of_the_frequencies_is_measured",)),
    Mutation("numbers of a form are rounded", "service/models", "if not _is_exact(number):", "if False:",
             ("tests/service/models/text/test_schema_numbers.py",)),
    Mutation("a gap in a mask is ignored", "patches", "if count and begin + count + end != seen:", "if False:",
             (f"{PADDING}::test_a_gap_in_a_mask_is_refused",)),
    Mutation("masks by type of layer have no padding", "patches", "if isinstance(given, Mapping) else", "if False else",
             (f"{STATIC_CACHE}::test_a_static_cache_of_padded_rows[qwen3]",)),
    Mutation("whole masks of a static cache have no padding", "patches", "mask.ndim in (2, *[4] * is_static)",
             "mask.ndim == 2", (f"{STATIC_CACHE}::test_a_static_cache_of_layers_that_choose_keys[deepseek_v32]",)),
    Mutation("rows of a cache change their encodings", "patches", "elif len(encodings) == len(written):", "elif False:",
             (f"{CALLS}::test_each_row_of_a_cache_continues_under_its_own_encoding",)),
    Mutation("encodings of a cache stay when its rows move", "patches", "if written := getattr(self, _ATTRIBUTE, ()):",
             "if False:", (f"{CALLS}::test_encodings_of_a_cache_follow_its_rows",)),
    Mutation("a patch stops no calls of other threads", "patches",
             "if self._leaving:\n            self._stopped", "if False:\n            self._stopped",
             (f"{GENERATE}::test_leaving_stops_a_call_on_another_thread",)),
    Mutation("a call that nothing stopped returns after a patch", "patches", "if self._left:", "if False:",
             (f"{GENERATE}::test_a_call_that_does_not_stop_in_time_fails",)),
    Mutation("a patch does not say that it stopped a call", "patches", "    calls.refuse_stopped()", "    pass",
             (f"{GENERATE}::test_leaving_stops_a_call_on_another_thread",)),
    Mutation("options of the model's configuration are not read", "patches",
             "return getattr(defaults, name, None) if configured is None else configured", "return configured",
             (f"{LIBRARY}::test_guidance_is_refused_beside_an_encoding",)),
    Mutation("positions between the ends are not read", "patches", "(position_ids.diff() == 1).all(1)",
             "(position_ids[:, :1] >= 0).all(1)", (f"{PADDING}::test_every_position_of_a_text_is_checked",)),
    Mutation("a forward without an encoding has the trained length", "patches", "if length <= own.length:", "if True:",
             (f"{PARITY}::test_without_an_encoding_the_length_of_a_forward_decides_as_in_transformers",)),
    Mutation("causal mask hides the query itself", "patches", ".triu_(keys - new + 1)", ".triu_(keys - new)",
             (DECODE,)),
    Mutation("attention factor missing in a slot", "patches", "self.attention_factor[slot] = resolved.attention_factor",
             "self.attention_factor[slot] = 1.0", (SLOTS,)),
    Mutation("repeated rows share memory while both are read", "patches", "flat is None or last >= order[node]",
             "flat is None", (TIDYING,)),
    Mutation("halves in their order roll", "patches", "second.args != (root, size, stride, offset + size[-1])",
             "second.args[0] != root", (TIDYING,)),
    Mutation("a slot keeps the tables of its last encoding", "patches", "self.uploads += 1", "pass", (STEPS,)),
    Mutation("tables of several steps are those of the first", "patches", "(steps[-1] + 1).numpy()",
             "(steps[0] + 1).numpy()", (STEPS,)),
    Mutation("a slot is not released", "patches", "self._users[slot] -= 1", "self._users[slot] -= 0", (SLOTS,)),
    Mutation("declared chunks are passed over", "patches/model", " or declared or _in_chunks(config, parameters)",
             " or declared", (f"{DUAL_CHUNK}::test_the_published_entries_are_what_vllm_computes",)),
    Mutation("a map over the map of the checkpoint", "patches",
             "native.base if isinstance(native, BasedMethod) else native", "native",
             (f"{DUAL_CHUNK}::test_another_map_takes_its_place",)),
    Mutation("local layers of GPT-Neo see everything", "patches/model", 'if module.attention_type == "local" else None',
             'if module.attention_type == "none" else None', (f"{OTHER_FAMILIES}::{GPT_NEO}",)),
    Mutation("cosines of GPT-J before its sines", "patches/model", "return sin[..., :pairs], cos[..., :pairs]",
             "return cos[..., :pairs], sin[..., :pairs]",
             (f"{OTHER_FAMILIES}::test_the_patched_default_is_the_unpatched_model[gptj]",)),
    Mutation("an attention to earlier layers has an encoding", "patches/attention",
             'hasattr(attention, "layer_idx") or', "True or",
             ("tests/patches/model/architectures/test_learned_distances.py",)),
    Mutation("a paged cache reaches the layers", "patches/model", 'self._parameters.keys() - {"cache"}',
             "set(self._parameters)", ("tests/service/engine/adapter/test_paged_attention.py",)),
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
    Mutation("a failed measurement stays", "patches", "self._keeps_texts_apart = measured",
             "self._keeps_texts_apart = measured is not False", ("tests/patches/model/test_batch_layout.py",)),
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
    Mutation("one product for every input", "patches", "last.x is not x or number not in last.parts",
             "number not in last.parts", ("tests/patches/model/fusion/test_projections.py",)),
    Mutation("a norm of another sum", "patches", "_last.norm is norm and _last.total is x else",
             "_last.norm is norm else", ("tests/patches/model/fusion/test_residual.py",)),
    Mutation("a layer that hides the cache is fused", "patches", "attention.given == arguments and not any", "not any",
             ("tests/patches/model/fusion/test_residual.py",)),
]  # fmt: skip
