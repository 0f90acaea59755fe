"""A model with fixed answers: the last token of a prompt decides all of one."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from service.models.text.response_templates import BUILT_IN
from tests.service.conftest import tiny_tokenizer

END = "<|im_end|>"

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}{% if loop.first or message.role != 'system' %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if begun %}<think>\n{% endif %}"
    "{% if hushed or enable_thinking == false %}<think>\n\n</think>\n\n{% endif %}{{ script }}{% endif %}"
)
"""A template in the manner of Qwen's, with tools. The variable ``script`` is the name of an answer. With ``begun`` the
prompt begins its reasoning. With ``hushed``, or ``enable_thinking`` false, it ends it too. A later message of
the system is left out."""

ANCHOR = r"<\|im_start\|>assistant\n(?:(?!<think>).)*"
"""An answer begins behind its name."""


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": parameters}}


KNOT = tool("tie", knot={"enum": ["bowline", "hitch"]}, wet={"type": "boolean"})
SHARED = tool("count", what={"$ref": "#/$defs/what"})
SHARED["function"]["parameters"]["$defs"] = {"what": {"enum": ["turns", "ropes"]}}
TOOLS = [KNOT, SHARED]

SCRIPTS = {
    "[says]": ["Three ", "turns."],
    "[calls]": ["<tool_call>", '\n{"name": "tie", "arguments": {"knot": "hitch", "wet": true}}\n', "</tool_call>"],
    "[both]": [
        "I will ",
        "count. \n",
        "\n<tool_call> ",
        '{"name": "count", "arguments": {"what": "turns"}}',
        "</tool_call>\n",
        "<tool_call>\n",
        '{"name": "tie", "arguments": {"knot": "é"}}',
        " </tool_call>",
    ],
    "[thinks]": ["<think>", "Turns of ", "a rope.", "</think>", "\n\nFour."],
    "[thinks, fits]": ["<think>Which", "? {", " A hitch.</think>", "\n\n{", '"knot":', '"hitch"', " }"],
    "[goes on]": ["so ", "it is</think>\n", '{"knot": ', '"bowline"}'],
    "[thinks, calls]": [
        "<think>Tie",
        "!",
        "</think>\n",
        '[{"name": "count", "arguments": {"what"',
        ': "ropes"',
        "}}]",
    ],
    "[calls twice]": [
        '<tool_call>{"name": "count", "arguments": {"what": "turns"}}</tool_call>\n',
        '<tool_call>{"name": "count", "arguments": {"what": "ropes"}}',
        "\n</tool_call>",
    ],
    "[thinks, calls on]": [
        "<think>Not ",
        "<b>",
        " now",
        ".</think>\n<tool_call>",
        '{"name": "count", "arguments": {"what": "ropes"',
        "}}</tool_call>",
    ],
    "[fits]": ['{ "knot"', " : ", '"hitch" }'],
    "[stumbles]": ["Well, ", "<tool_call>{", "'name': tie}", "</tool_call> "],
    "[breaks off]": ["<tool_call>  ", '{"name": "tie", "argum', 'ents": {"knot": ', '"x"}', "}  </tool_call>"],
}
"""Answers of the model behind the tests' server, by their names."""


def parrot(folder: Path, scripts: dict[str, list[str]]) -> Path:
    """A checkpoint. ``scripts`` are its answers, each as pieces of text; every piece is a token.

    No piece comes twice in all of them, since a token is followed by one other. If a grammar leaves one text, the
    library allows its usual tokens only. So pieces of forms are long. It takes no text for a piece ``<...>``.
    """
    tokenizer = tiny_tokenizer()
    pieces = [piece for script in scripts.values() for piece in script]
    assert len(set(pieces)) == len(pieces)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in [*scripts, *pieces]])
    tokenizer.add_special_tokens({"eos_token": END})
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = {"start_anchor_pattern": ANCHOR, "fields": BUILT_IN["hermes"]["fields"]}
    follows = torch.zeros(len(tokenizer), len(tokenizer))
    for name, script in scripts.items():
        chain = tokenizer.convert_tokens_to_ids([name, *script, END])
        for token, following in pairwise(chain):
            follows[following, token] = 10.0
    size = -(-len(tokenizer) // 8) * 8
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=8,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weights in model.model.layers[0].mlp.parameters():
            weights.zero_()
        model.model.layers[0].self_attn.o_proj.weight.mul_(0.01)  # no layer may be without a part in the answer
        model.model.embed_tokens.weight.zero_()
        model.lm_head.weight.zero_()
        model.model.embed_tokens.weight[:, : len(tokenizer)] = torch.eye(len(tokenizer))
        model.lm_head.weight[:, : len(tokenizer)] = follows
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": tokenizer.eos_token_id}))
    return folder
