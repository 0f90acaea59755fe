"""Chat templates: the models' own, the built-in one, and a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from service.cli.server import StartFailed, local_server
from service.models.checkpoint.loading import DEMO, ModelLoadError, load
from service.models.text.chat import PLAIN, TemplateUnusable, use_template
from service.settings import Settings
from tests.service.conftest import tiny_tokenizer
from tests.service.serving import serving

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "The 3 ropes?"},
    {"role": "assistant", "content": "21 ways."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "4?"}]},
]
TEXT = "System: Be short.\n\nUser: The 3 ropes?\n\nAssistant: 21 ways.\n\nUser: And 4?\n\nAssistant:"


def completed(url: str, prompt: Any, **body: Any) -> str:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "temperature": 0, "max_tokens": 8, **body})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def chatted(url: str, messages: Any = MESSAGES, **body: Any) -> httpx.Response:
    asked = {"messages": messages, "temperature": 0, "max_tokens": 8, **body}
    return httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)


def said(answer: httpx.Response) -> tuple[str, int]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]["prompt_tokens"]


def test_a_base_model_chats_by_the_plain_template(checkpoints: Path) -> None:
    tokens = len(tiny_tokenizer()(TEXT)["input_ids"])
    with serving(checkpoints, chat_template="plain") as (url, _):
        assert said(chatted(url)) == (completed(url, TEXT), tokens), "as the same text, with the BOS of any other text"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            reply = client.chat.completions.create(model="tiny@yarn:4", messages=MESSAGES, temperature=0, max_tokens=8)
        assert reply.choices[0].message.content == completed(url, TEXT, pe="yarn:4")
        assert httpx.get(f"{url}/tokenizer_info").json()["chat_template"] == PLAIN


def test_the_plain_template_writes_tools_and_calls() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = PLAIN
    tool = {"type": "function", "function": {"name": "tie", "parameters": {"type": "object"}}}
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": {"a": "\u00e9"}}} for name in "fg"
    ]
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "done", "tool_call_id": "f"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert text == (
        'Functions, called by [{"name": ..., "arguments": {...}}]:\n'
        '{"name": "tie", "parameters": {"type": "object"}}\n\n'
        "User: Go.\n\n"
        'Assistant: [{"name": "f", "arguments": {"a": "\u00e9"}}, {"name": "g", "arguments": {"a": "\u00e9"}}]\n\n'
        "Tool: done\n\nAssistant:"
    )


def test_a_file_replaces_the_models_own_template(checkpoints: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ bos_token }}{% for message in messages %}[{{ message.content }}]{% endfor %}")
    with serving(checkpoints, chat_template=str(file)) as (url, _):
        ids = tiny_tokenizer()("<bos>[a]", add_special_tokens=False)["input_ids"]
        assert said(chatted(url, [{"role": "user", "content": "a"}])) == (completed(url, ids), len(ids))


def test_without_a_template_the_error_says_how_to_set_one(client: httpx.Client) -> None:
    reply = client.post("/v1/chat/completions", json={"messages": MESSAGES})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "no_chat_template", "model")
    assert "'tiny' has no chat template: set ROPEWAY_CHAT_TEMPLATE to plain" in error["message"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "neither plain nor a file that can be read"),
        (b"\xff\xfe\xfd", "neither plain nor a file that can be read"),
        (b"{% for message in messages %}\n{{ message.content }", "line 2: "),
        (b"{% endfor %}", "line 1: "),
    ],
    ids=["absent", "not text", "cut", "no beginning"],
)
def test_a_file_that_is_no_template_stops_the_start(tmp_path: Path, text: bytes | None, says: str) -> None:
    file = tmp_path / "template"
    if text is not None:
        file.write_bytes(text)
    tokenizer = tiny_tokenizer()
    with pytest.raises(TemplateUnusable, match=says):
        use_template(tokenizer, str(file))
    assert tokenizer.chat_template is None
    settings = Settings(_env_file=None, model="demo", chat_template=str(file))
    with pytest.raises(ModelLoadError, match=f"ROPEWAY_CHAT_TEMPLATE: .*{says}"):
        load("ropeway-demo", DEMO / "ropeway-demo", settings)
    with pytest.raises(StartFailed, match="ROPEWAY_CHAT_TEMPLATE"), local_server(settings):
        pass


def test_a_template_may_ask_for_more_than_one_message(tmp_path: Path) -> None:
    file = tmp_path / "strict.jinja"
    file.write_text("{% if messages | length < 2 %}{{ raise_exception('begin with a system message') }}{% endif %}x")
    tokenizer = tiny_tokenizer()
    use_template(tokenizer, str(file))
    assert tokenizer.chat_template.endswith("x")


@pytest.mark.parametrize("folder", sorted(path.parent for path in DEMO.glob("*/config.json")), ids=lambda p: p.name)
def test_the_demo_models_ship_the_plain_template(folder: Path) -> None:
    assert AutoTokenizer.from_pretrained(folder).chat_template == PLAIN
