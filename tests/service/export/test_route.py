"""``POST /export``, its client method and ``ropeway export``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.client import AsyncRopeway, Ropeway, RopewayError
from service.export.targets import TARGETS
from tests.service.cli.shell import ropeway
from tests.service.conftest import tiny_checkpoint

YARN = {"method": "yarn", "factor": 4}


def refused(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/export", json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_a_client_gets_configuration_options_and_a_line(server: str) -> None:
    with Ropeway(server) as client:
        result = client.export("yarn:4", "vllm", model="tiny")
    expected = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    assert result.config == {"rope_parameters": expected, "max_position_embeddings": 256}
    assert result.arguments == ["--hf-overrides", json.dumps(result.config), "--max-model-len", "256"]
    assert result.usage.startswith("vllm serve tiny --hf-overrides '{")
    assert (result.exact, result.changes, result.length) == (True, True, 256)
    assert (result.pe["method"], result.pe["factor"]) == ("yarn", 4.0)


async def test_both_clients_answer_alike(server: str) -> None:
    async with AsyncRopeway(server) as client:
        theirs = await client.export(YARN, "llama.cpp", length=200)
    with Ropeway(server) as blocking:
        assert blocking.export(YARN, "llama.cpp", length=200) == theirs
    assert theirs.arguments[-2:] == ["--ctx-size", "200"]


def test_the_echo_of_an_answer_is_exported_as_the_encoding_itself(client: httpx.Client) -> None:
    body = {"pe": YARN, "target": "sglang", "length": 200}
    first = client.post("/export", json=body).json()
    assert client.post("/export", json=body | {"pe": first["pe"]}).json() == first


def test_the_echo_of_a_generation_needs_no_length(client: httpx.Client) -> None:
    """It has the layers of the model, which are compared before it is exported."""
    echo = client.post("/generate", json={"prompt": "A", "max_new_tokens": 2, "pe": YARN}).json()["results"][0]["pe"]
    assert echo["layers"]
    body = {"target": "vllm"}
    found = client.post("/export", json=body | {"pe": echo}).json()
    assert found["config"] == client.post("/export", json=body | {"pe": YARN}).json()["config"]
    wrong = echo | {"frequency_hash": "000000000000"}
    assert refused(client, pe=wrong, target="vllm")["param"].startswith("pe")


@pytest.mark.parametrize("target", TARGETS)
def test_the_checkpoints_own_encoding_needs_no_option(client: httpx.Client, target: str) -> None:
    answer = client.post("/export", json={"pe": "default", "target": target}).json()
    assert (answer["changes"], answer["exact"], answer["config"], answer["length"]) == (False, True, {}, 64)
    assert "rope" not in answer["usage"]


def test_the_length_defaults_to_the_factor_under_a_wrapper_too(client: httpx.Client) -> None:
    body = {"pe": {"method": "resonance", "base": {"method": "yarn", "factor": 3}}, "target": "transformers"}
    assert client.post("/export", json=body).json()["length"] == 192


def test_bad_input_is_refused_with_the_field_and_what_it_takes(client: httpx.Client) -> None:
    error = refused(client, pe="self_extend:4", target="vllm", length=256)
    assert (error["code"], error["param"], error["closest"]) == ("not_expressible", "pe", "yarn:4")
    assert "vllm 0.33.0 cannot express" in error["message"]
    error = refused(client, pe="none", target="vllm", length=1 << 20)  # no factor reaches so far
    assert (error["code"], error["param"]) == ("not_expressible", "pe")
    assert "pydantic" not in error["message"]
    error = refused(client, pe=YARN, target="vlm")
    assert error["param"] == "target"
    assert "unknown target 'vlm': did you mean vllm?" in error["message"]
    error = refused(client, pe="dynamic", target="vllm")
    length = "length: required, from 2 to 16777215 tokens, since this encoding depends on it"
    assert (error["param"], error["message"]) == ("length", length)
    for pe in ("rerope", "lm_infinite"):
        error = refused(client, pe=pe, target="vllm")
        assert (error["code"], error["param"], error["closest"]) == ("not_expressible", "pe", "default")
        end = "it can: default, for 64 tokens. A length gives the closest one for that length"
        assert error["message"].endswith(end)
        error = refused(client, pe=pe, target="vllm", length=256)
        assert (error["closest"], error["message"].partition("it can: ")[2]) == ("yarn:4", "yarn:4")
    for auto in ("auto", {"method": "auto"}):
        error = refused(client, pe=auto, target="vllm")
        assert error["message"].endswith("has no fixed encoding to export: choose one")
    error = refused(client, pe=YARN, target="vllm", length=1)
    assert error["param"] == "length"
    error = refused(client, pe={"method": "yarn", "factor": 4, "partial_rotary_factor": 0.5}, target="vllm")
    assert "partial_rotary_factor" in error["message"]
    assert client.post("/export", json={"pe": YARN, "target": "vllm", "model": "x"}).status_code == 404


def test_the_place_of_options_names_the_program_of_the_line(client: httpx.Client) -> None:
    """The sentence sent the options of `llama-completion` to `llama-server`."""
    for pe, place in (
        (YARN, "Add the options to `llama-server`."),
        ("self_extend:4", "Add the options to `llama-completion`: `llama-server` has no group attention."),
    ):
        answer = client.post("/export", json={"pe": pe, "target": "llama.cpp", "length": 200}).json()
        assert (answer["apply"], answer["usage"].split()[0] in place) == (place, True)


@pytest.mark.parametrize("target", TARGETS)
def test_positions_that_only_ropeway_reads_are_for_no_other_system(client: httpx.Client, target: str) -> None:
    """They would rotate weights that were trained without, and say nothing."""
    for pe in ("alibi", "default", "alibi:slope_factor=2"):
        error = refused(client, pe=pe, model="tiny-alibi", target=target, length=64)
        assert "`position_encoding`, which only Ropeway reads" in error["message"]
        assert error["closest"] is None


def test_the_command_prints_what_is_pasted_on_stdout_and_the_rest_on_stderr(server: str) -> None:
    result = ropeway("export", "yarn:4", "--to", "exllamav3", "--server", server)
    assert result.exit_code == 0, result.stderr
    config, line = result.stdout.rsplit("}\n", 1)
    assert json.loads(config + "}")["rope_scaling"]["rope_type"] == "yarn"
    assert line.strip() == "python examples/chat.py --model_dir tiny --cache_size 256"
    assert "1.6.5" in result.stderr
    as_json = ropeway("export", "yarn:4", "--to", "exllamav3", "--json", "--server", server)
    with Ropeway(server) as client:
        assert json.loads(as_json.stdout) == client.export("yarn:4", "exllamav3").model_dump()


def test_a_line_of_a_command_without_a_server_has_the_folder(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "mine")
    given = ("export", "yarn:4", "--to", "vllm", "--model", str(folder))
    assert ropeway(*given).stdout.startswith(f"vllm serve {folder} --hf-overrides ")
    assert json.loads(ropeway(*given, "--json").stdout)["usage"].startswith(f"vllm serve {folder} ")


def test_the_command_refuses_before_it_loads_a_model() -> None:
    result = ropeway("export", "yarn:4", "--to", "lama.cpp")
    assert result.exit_code == 2
    assert "llama.cpp" in result.stderr
    assert ropeway("export", "yarm:4", "--to", "vllm").exit_code == 2


def test_the_client_raises_the_servers_words(server: str) -> None:
    with (
        Ropeway(server) as client,
        pytest.raises(RopewayError, match="closest encoding that it can: yarn:4") as refused,
    ):
        client.export("rerope", "tgi", length=256)
    assert refused.value.code == "not_expressible"
