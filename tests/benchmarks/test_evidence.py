"""The pages of evidence show the recorded numbers, and the requests behind them do what they are said to."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.quality import evidence
from benchmarks.quality.method_table import DRAWN, MORE, applicable
from benchmarks.speed import method_cost
from benchmarks.timing import Report, write
from benchmarks.typical import REACH, typical
from patches import METHODS, RopeGeometry, from_text, parse, patched, resolve
from tests.methods import ROWS
from tests.models import tiny_model

EVIDENCE, WHOLE, QUANTIZATION = (page.read_text(encoding="utf-8") for page in evidence.PAGES)
GEOMETRIES = [
    RopeGeometry(64, 64, 1e4, 256, 256, num_attention_heads=4),
    RopeGeometry(8, 8, 1e4, 512, 512, num_attention_heads=8),
    RopeGeometry(64, 16, 5e5, 2048, 2048, num_attention_heads=2),
]


def test_the_measured_tables_are_the_recorded_numbers() -> None:
    """Regenerate with: python -m benchmarks.quality.evidence"""
    for page in (EVIDENCE, WHOLE, QUANTIZATION):
        assert evidence.filled(page, evidence.recorded()) == page


def test_every_table_is_on_the_page_once() -> None:
    marked = [found[1] for found in evidence.MARKED.finditer(EVIDENCE + QUANTIZATION)]
    assert sorted(marked) == sorted([*evidence.METHODS, *evidence.TABLES, *evidence.SOURCES])
    assert (EVIDENCE + QUANTIZATION).count("<!-- measured:") == 2 * len(marked)
    whole = [found[1] for found in evidence.MARKED.finditer(WHOLE)]
    models = [entry["model"] for entry in evidence.recorded()["method_table"]["models"]]
    assert sorted(whole) == sorted([*(f"{evidence.WHOLE}{model}" for model in models), "method_table"])
    assert all(set(names) <= set(METHODS) for names in evidence.METHODS.values())


def test_labels_of_the_whole_table_can_be_sent() -> None:
    """Or they show that a long list is left out."""
    for model in evidence.recorded()["method_table"]["models"]:
        for entry in model["methods"]:
            label = evidence.named(entry)
            if "[…]" in label:
                assert any(isinstance(value, list) and len(value) > 2 for value in entry["request"].values())
                assert "`[…]` is a list" in WHOLE
            else:
                assert parse(from_text(label)) == parse(entry["request"])


def test_another_number_is_another_page() -> None:
    changed = copy.deepcopy(evidence.recorded())
    model = changed["method_table"]["models"][0]
    model["methods"][0]["perplexity"][-1] = 123456.0
    assert "| 123,456 |" in evidence.filled(EVIDENCE, changed)
    assert "| 123,456 <sub>" in evidence.filled(WHOLE, changed)
    changed["quantization"]["models"][0]["formats"]["int4"]["perplexity"]["default"][0] = 98765.0
    assert "| 98,765 (" in evidence.filled(QUANTIZATION, changed)
    model["methods"] = [entry for entry in model["methods"] if entry["method"] != "linear"]
    without = evidence.filled(EVIDENCE, changed)
    assert f"| {model['model']} | `linear" not in without, "a model without it has no rows there"


def test_a_marker_without_a_table_is_an_error() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        evidence.filled("<!-- measured:nonsense:start -->\n<!-- measured:nonsense:end -->", evidence.recorded())


def test_pictures_and_links_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", EVIDENCE + WHOLE + QUANTIZATION) if "://" not in link]
    assert links
    for link in links:
        assert (evidence.PAGES[0].parent / link).exists(), link


def test_recording_writes_pictures_and_numbers_beside_the_results(tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text("# Results\n", encoding="utf-8")
    numbers = {"multiples": [1], "models": [{"a": 0.1}]}
    write(Report("first", "title", ("what",), notes=["short"], pictures={"first-x": b"png"}, numbers=numbers), results)
    folder = tmp_path / "recorded"
    assert (folder / "first-x.png").read_bytes() == b"png"
    assert "![first-x](recorded/first-x.png)" in results.read_text(encoding="utf-8")
    for other in ("dynamic_consistency", "recall_table", "quantization", "search_table"):
        (folder / f"{other}.json").write_text("{}", encoding="utf-8")
    (folder / "first.json").rename(folder / "method_table.json")
    again = evidence.recorded(folder)["method_table"]
    assert again.pop("machine")
    assert again == {"notes": ["short"], **numbers}


def test_every_method_is_in_the_cost_table_once() -> None:
    patch: Any = SimpleNamespace(geometry=GEOMETRIES[0])
    families = ["rotary", "learned", "sinusoidal", "shaw", "transformer_xl"]
    names = [fields["method"] for family in families for fields in method_cost.requests(patch, family)]
    assert sorted(names) == sorted(METHODS)


def test_a_cost_is_of_the_method_and_leaves_no_slot_behind() -> None:
    report = Report("method_cost", "title", ())
    with patched(tiny_model("llama", attn_implementation="sdpa")[1]) as patch:
        bands, ratio = method_cost.measure(patch, None, {"method": "self_extend"}, (40, 1), report)
        assert patch.slots.in_use() == 0
    assert bands == 2
    assert ratio > 0
    assert report.rows[0][:2] == ("self_extend", "2")


# The requests


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=["demo", "four_pairs", "partial"])
def test_every_method_has_a_request_that_fits_the_model(geometry: RopeGeometry) -> None:
    requests = typical(geometry)
    assert list(requests) == list(METHODS)
    for name, fields in requests.items():
        method = parse(fields)
        assert method.method == name
        if method.family in ("learned", "sinusoidal", "relative"):
            rows = REACH * geometry.original_max_position_embeddings if method.family == "learned" else None
            own = replace(geometry, family=method.family, native=method, table_rows=rows)
            resolve(method, own, REACH * geometry.original_max_position_embeddings)
        elif name != "proportional" or geometry.rotary_dim == geometry.head_dim:
            resolve(method, geometry, REACH * geometry.original_max_position_embeddings)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=["demo", "four_pairs", "partial"])
def test_requests_of_position_maps_reach_as_far_as_they_say(geometry: RopeGeometry) -> None:
    longest = REACH * geometry.original_max_position_embeddings
    for row in ROWS:
        if row.reach is not None:
            reach = row.reach(parse(typical(geometry)[row.name]).parameters(geometry))
            assert (reach >= longest) == (row.name not in ("string", "lm_infinite")), row.name
    for fields in MORE:
        resolve(parse(fields), geometry, longest)


def test_self_extend_stays_within_two_thirds_of_its_reach() -> None:
    parameters = parse(typical(GEOMETRIES[0])["self_extend"]).parameters(GEOMETRIES[0])
    row = next(row for row in ROWS if row.name == "self_extend")
    assert row.reach is not None
    assert math.isclose(REACH * 256 / row.reach(parameters), 2 / 3, abs_tol=0.01)


def test_the_table_asks_for_what_the_model_takes_and_for_each_encoding_once() -> None:
    model = tiny_model("llama")[1]
    with patched(model) as patch:
        taken, refused = applicable(patch, [64, 1024])
    names = {str(fields["method"]) for fields in taken}
    assert names | set(refused) == set(METHODS)
    assert not names & set(refused)
    assert {"t5_bias", "shaw", "learned"} <= set(refused)
    assert set(DRAWN) <= names
    model = tiny_model("bloom")[1]
    with patched(model) as patch:
        taken, refused = applicable(patch, [64, 1024])
    assert [fields for fields in taken if fields["method"] == "alibi"] == [MORE[-1]], "its own is default already"
    assert "linear" in refused


def test_words_about_quantization_have_the_recorded_ratios() -> None:
    times = {entry["scheme"]: entry["seconds"] for entry in evidence.recorded()["quantization"]["cost"]}
    served = times["float32, as served"]
    steps = times["int4"]["decode 16"] / served["decode 16"]
    most = max(times["int8"][name] / served[name] for name in served)
    said = f"Steps of 16 sequences take {steps:.1f} times as long, and int8 up to {most:.1f} times."
    assert said in " ".join(QUANTIZATION.split())


def test_words_about_fixed_factors_hold() -> None:
    """Under `ntk`, perplexity is flat up to a quarter of the factor, and not up to half of it."""
    (model,) = [entry for entry in evidence.recorded()["method_table"]["models"] if entry["model"] == "ropeway-demo"]
    (ntk,) = [entry for entry in model["methods"] if entry["method"] == "ntk" and entry["request"]["factor"] == 32]
    first, _, _, quarter, half = ntk["perplexity"]
    assert quarter < 1.1 * first < half


def test_words_about_the_search_hold() -> None:
    """At the small budget, two models surely beat YaRN with a factor of 1; larger budgets do on the third."""
    searches = evidence.recorded()["search_table"]["searches"]
    small = [entry for entry in searches if entry["population"] == 16]
    beaten = [(entry["model"], entry["others"]["yarn"]["interval"][0] > 1) for entry in small]
    assert beaten == [(model, model != "ropeway-demo") for model, _ in beaten]
    assert all(entry["attention_factor"] == 1 for entry in small if entry["model"] != "ropeway-demo")
    (doubtful,) = [entry for entry in small if (entry["model"], entry["times"]) == ("stories260K", 4)]
    for name in ("ntk", "default"):
        low, high = doubtful["others"][name]["interval"]
        assert low < 1 < high
    budgets = [entry for entry in searches if (entry["model"], entry["times"]) == ("ropeway-demo", 8)]
    assert [entry["others"]["yarn"]["interval"][0] > 1 for entry in budgets] == [False, True, True]
    perplexity = [entry["perplexity"] for entry in budgets]
    assert perplexity == sorted(perplexity, reverse=True)
