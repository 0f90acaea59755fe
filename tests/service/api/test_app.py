"""Methods, models, probes and the OpenAPI document over a real socket."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import service.app
from patches import METHODS, parse
from service.figures.drawing.raster import png
from service.figures.encodings.positions import distance_figure
from service.figures.encodings.samples import GEOMETRY
from service.models.checkpoint import loading
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.forks.parent import list_modules
from tests.forks.process import forked
from tests.service.serving import serving


def test_methods_are_listed_in_short(client: httpx.Client) -> None:
    answer = client.get("/methods")
    listed = answer.json()["methods"]
    assert [info["method"] for info in listed] == list(METHODS)
    assert len(answer.content) < 40_000
    for info in listed:
        method = METHODS[info["method"]]
        assert set(info) == {"method", "kind", "family", "summary", "parameters", "questions"}
        assert (info["summary"], info["family"]) == (method.summary, method.family)
        fields = {name: field for name, field in method.model_fields.items() if name != "method"}
        assert {parameter["name"] for parameter in info["parameters"]} == set(fields)
        for parameter in info["parameters"]:
            field = fields[parameter["name"]]
            assert set(parameter) == {"name", "type", "required", "default"}
            assert parameter["required"] == field.is_required()
            assert parameter["default"] == (None if field.is_required() else field.default)
    by_name = {info["method"]: info for info in listed}
    assert by_name["linear"]["parameters"][0] == {
        "name": "factor",
        "type": "number from 1 up to 4,096",
        "required": True,
        "default": None,
    }
    assert [by_name[name]["kind"] for name in ("yarn", "self_extend", "streaming", "alibi", "none")] == [
        *("frequency schedule", "position map", "mask", "bias", "none")
    ]


def test_models_are_loaded_on_a_thread_that_ends(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With it end its OpenMP threads, which would slow those of the generation thread down."""
    threads, build = [], service.app.ModelRegistry

    def kept(*arguments: Any) -> ModelRegistry:
        threads.append(threading.current_thread())
        return build(*arguments)

    monkeypatch.setattr(service.app, "ModelRegistry", kept)
    with serving(checkpoints / "tiny") as (url, _):
        assert httpx.get(f"{url}/health/ready").status_code == 200
        assert [thread.is_alive() for thread in threads] == [False]


@pytest.mark.parametrize(
    ("setting", "value", "package", "told"),
    [
        ("database_url", "postgresql://127.0.0.1:9/jobs", "psycopg", "refused"),
        ("shared_url", "redis://127.0.0.1:9", "redis", "does not answer"),
    ],
)
async def test_a_store_out_of_reach_is_found_before_models_load(
    setting: str, value: str, package: str, told: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.setattr(service.app, "ModelRegistry", lambda *_: pytest.fail("models load"))
    app = service.app.create_app(Settings(_env_file=None, model=str(checkpoints / "tiny"), **{setting: value}))
    with pytest.raises(service.app.REFUSALS, match=told):
        async with app.router.lifespan_context(app):
            pass


def test_one_method_in_full(client: httpx.Client) -> None:
    listed = client.get("/methods", params={"full": True}).json()["methods"]
    assert [client.get(f"/methods/{info['method']}").json() for info in listed] == listed
    unknown = client.get("/methods/yrn")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "name")
    assert "did you mean yarn?" in unknown.json()["error"]["message"]


def test_every_method_is_listed_with_its_schema(client: httpx.Client) -> None:
    listed = client.get("/methods", params={"full": True}).json()["methods"]
    assert [info["method"] for info in listed] == list(METHODS)
    for info in listed:
        for about in ("summary", "formula", "use", "avoid", "reach", "evidence", "training_free", "paper", "family"):
            assert info[about] == getattr(METHODS[info["method"]], about)
        assert info["parameters"]["properties"]["method"]["const"] == info["method"]
        assert set(info["parameters"]["properties"]) == set(METHODS[info["method"]].model_fields)


def test_models_report_their_encoding_and_variants(client: httpx.Client) -> None:
    tiny, alibi = client.get("/models").json()["models"]
    assert (tiny["id"], tiny["default"], tiny["trained_length"]) == ("tiny", True, 64)
    assert tiny["variants"] == {"alibi": "tiny-alibi"}
    assert (tiny["pe"]["method"], alibi["pe"]["method"]) == ("default", "alibi")
    assert tiny["max_length"] == 4096


def test_a_variant_that_is_not_served_is_not_listed(checkpoints: Path) -> None:
    with serving(checkpoints / "tiny") as (url, _):
        (tiny,) = httpx.get(f"{url}/models").json()["models"]
        assert tiny["variants"] == {}
        names = [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
        assert "tiny@yarn:8" in names
        assert "tiny@alibi" not in names
        scored = {"input": "The ropes of the ways are long.", "lengths": [8], "methods": ["alibi"]}
        assert httpx.post(f"{url}/perplexity", json=scored).json()["methods"][0]["model"] == "tiny", (
            "as it was asked for"
        )


def test_a_folder_is_one_model_or_all_that_it_holds(checkpoints: Path) -> None:
    def served(model: Path | str) -> dict[str, Path | str]:
        return loading.sources(Settings(_env_file=None, model=str(model)))

    assert served(checkpoints / "tiny") == {"tiny": checkpoints / "tiny"}
    assert list(served(checkpoints)) == ["tiny", "tiny-alibi"], "the first by name is the default"
    assert list(served("demo")) == ["ropeway-demo", "ropeway-demo-alibi"]
    assert served("an/id") == {"an/id": "an/id"}


def test_frequencies_before_and_after(client: httpx.Client) -> None:
    table = client.get("/methods/linear/frequencies", params={"factor": 4}).json()
    assert len(table["pairs"]) == 8
    for pair in table["pairs"]:
        assert pair["inv_freq_after"] == pytest.approx(pair["inv_freq_before"] / 4)
        assert pair["wavelength_after"] == pytest.approx(2 * math.pi / pair["inv_freq_after"])
        assert pair["turns_in_trained_length"] == pytest.approx(64 / pair["wavelength_after"])
    short, long = (
        client.get("/methods/dynamic/frequencies", params={"factor": 2, "length": n}).json() for n in (64, 512)
    )
    assert short["pairs"][-1]["inv_freq_after"] > long["pairs"][-1]["inv_freq_after"]
    none = client.get("/methods/none/frequencies").json()
    assert all(pair["wavelength_after"] is None for pair in none["pairs"])
    lists = {"short_factor": str([1.0] * 8), "long_factor": str([2.0] * 8), "length": 65}
    longrope = client.get("/methods/longrope/frequencies", params=lists).json()
    assert longrope["pairs"][0]["inv_freq_after"] == pytest.approx(0.5)


@pytest.mark.parametrize("form", ["frequencies", "frequencies.png"])
def test_the_method_of_frequencies_is_that_of_the_path(client: httpx.Client, form: str) -> None:
    answer = client.get(f"/methods/yarn/{form}", params={"method": "linear", "factor": 4})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "method")


def test_frequencies_as_a_picture(client: httpx.Client) -> None:
    drawn: dict[str, dict[str, Any]] = {
        "yarn": {"factor": 4},
        "self_extend": {"base": "yarn:4"},
        "alibi": {},
        "none": {},
        "streaming": {},
    }
    for name, parameters in drawn.items():
        picture = client.get(f"/methods/{name}/frequencies.png", params=parameters)
        assert picture.headers["content-type"] == "image/png", name
        assert picture.content.startswith(b"\x89PNG")


def test_the_picture_of_a_position_map_is_that_of_its_distances(client: httpx.Client) -> None:
    answer = client.get("/methods/self_extend/frequencies.png", params={"group_size": 4, "neighbor_window": 16})
    method = parse({"method": "self_extend", "group_size": 4, "neighbor_window": 16})
    recipe = method.recipe(replace(GEOMETRY, original_max_position_embeddings=64))
    name = "self_extend(group_size=4, neighbor_window=16) on tiny"
    assert answer.content == png(distance_figure(recipe, 256, 64, name))


def test_frequencies_of_a_schedule_underneath(client: httpx.Client) -> None:
    plain, over = (
        client.get(f"/methods/{name}/frequencies", params=parameters).json()
        for name, parameters in (("yarn", {"factor": 4}), ("self_extend", {"base": "(yarn:factor=4)"}))
    )
    assert over["pairs"] == plain["pairs"]
    assert over["pe"]["base"]["method"] == "yarn"
    refused = client.get("/methods/self_extend/frequencies", params={"base": "yrn:4"})
    assert refused.status_code == 400
    assert "did you mean yarn?" in refused.json()["error"]["message"]
    unknown = client.get("/methods/yrn/frequencies")
    assert unknown.status_code == 404
    assert "did you mean yarn?" in unknown.json()["error"]["message"]


@pytest.mark.parametrize(
    ("address", "param", "says"),
    [
        ("/methods/yarn/frequencies", "factor", "factor: required, this model declares no length"),
        ("/methods/yarn/frequencies.png", "factor", "factor: required"),
        ("/methods/linear/frequencies", "factor", "factor: required"),
        ("/methods/yarn/frequencies?factor=4&beta_fst=3", "beta_fst", "did you mean beta_fast?"),
        ("/methods/longrope/frequencies?short_factor=[1]&long_factor=[2]", "short_factor", "has 8 rotary pairs"),
        ("/methods/self_extend/frequencies?base=yarn", "base", "factor: required"),
        ("/methods/self_extend/frequencies?base=yrn:4", "base", "did you mean yarn?"),
        ("/methods/learned/frequencies", "name", "learned is for models"),
    ],
)
def test_an_error_of_frequencies_names_the_parameter(client: httpx.Client, address: str, param: str, says: str) -> None:
    answer = client.get(address)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert says in error["message"]


def test_probes(client: httpx.Client) -> None:
    assert client.get("/health/live").json() == {"status": "ok"}
    ready = client.get("/health/ready").json()
    assert ready["status"] == "ok"
    assert set(ready["models"]) == {"tiny", "tiny-alibi"}


def test_the_api_document_has_worked_examples(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    body = document["components"]["schemas"]["GenerateRequest"]["examples"][0]
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    sweep = document["paths"]["/perplexity"]["post"]["requestBody"]["content"]["application/json"]["examples"]
    answer = client.post("/perplexity", json={**sweep["demo"]["value"], "lengths": [64, 128]})
    assert answer.status_code == 200, answer.text
    assert client.get("/docs").status_code == 200


@pytest.mark.slow
def test_what_draws_and_migrates_is_loaded_when_it_is_needed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert forked(list_modules, log=log).wait() == 0
    loaded = set(log.read_text().split())
    assert "torch" in loaded
    assert {
        "matplotlib",
        "plotly",
        "alembic",
        "pyarrow",
        "pandas",
        "datasets",
        "service.figures.drawing",
    } & loaded == set()
