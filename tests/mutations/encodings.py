"""Faults in the formulas of encodings, and in recipes."""

from tests.mutations.mutation import Mutation

RECIPE = "tests/patches/encoding/test_recipe.py"
TEMPERATURE = "tests/patches/encoding/test_temperature.py"
MAPS = "tests/patches/methods/test_position_maps.py"
BIASES = "tests/patches/methods/test_biases.py"
FREQUENCIES = "tests/patches/methods/test_frequencies.py"
WRITTEN = "tests/patches/encoding/test_rope_parameters.py"

ENCODINGS = [
    Mutation("base of the fewest keys", "patches", "return max(self.bands, key=", "return min(self.bands, key=",
             (RECIPE,)),
    Mutation("lower edge of a band", "patches", "inside = distance >= self.low", "inside = distance > self.low",
             (RECIPE,)),
    Mutation("upper edge of a band", "patches", "inside & (distance < self.high)", "inside & (distance <= self.high)",
             (RECIPE,)),
    Mutation("reach of a band one key short", "patches", "return first, max(first, q_high - self.low + 1)",
             "return first, max(first, q_high - self.low)", (RECIPE,)),
    Mutation("chunk edge", "patches", "inside & (apart < self.high)", "inside & (apart <= self.high)", (RECIPE,)),
    Mutation("one key more among the first", "patches", "(kv_idx < self.count)", "(kv_idx <= self.count)", (MAPS,)),
    Mutation("a step of frequencies is refused", "patches", "if self.beta_fast < self.beta_slow:",
             "if self.beta_fast <= self.beta_slow:", (f"{FREQUENCIES}::test_equal_turns_make_a_step",)),
    Mutation("a factor without effect", "patches", "if last < 0 or first", "if first",
             (f"{FREQUENCIES}::test_a_range_that_no_pair_reaches_is_refused",)),
    Mutation("attention factor lost on resolving", "patches", "attention_factor=float(attention_factor)",
             "attention_factor=1.0", (FREQUENCIES,)),
    Mutation("groups without their shift", "patches", "return position // self.group_size + self.shift",
             "return position // self.group_size", (MAPS,)),
    Mutation("log-n one position late", "patches", "(q_idx.float() + 1.0).log()", "q_idx.float().log()",
             (TEMPERATURE,)),
    Mutation("a method without its example", "patches", "if field.is_required()}", "if False}",
             ("tests/service/test_adding_a_method.py::test_a_required_parameter_without_an_example_is_named",)),
    Mutation("square of a temperature", "patches", "(0.1 * math.log(self.factor) + 1.0) ** 2",
             "(0.1 * math.log(self.factor) + 1.0)", (TEMPERATURE,)),
    Mutation("written as a type without its factor", "patches",
             'if own is None or ("attention_factor" not in own and factor != 1.0):', "if own is None:", (WRITTEN,)),
    Mutation("bias with the wrong slopes", "patches", "finer[0::2]", "finer[1::2]", (BIASES,)),
]  # fmt: skip
