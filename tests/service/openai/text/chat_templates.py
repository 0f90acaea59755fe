"""Rules of well-known chat templates: which texts each of them writes, and when."""

from __future__ import annotations

_MISTRAL = """
{%- if messages[0].role == "system" %}{%- set system, turns = messages[0].content, messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for m in turns if not (m.role == "tool" or m.tool_calls is defined) %}
{%- if (m.role == "user") != (ns.index % 2 == 0) %}{{- raise_exception("roles must alternate") }}{%- endif %}
{%- set ns.index = ns.index + 1 %}
{%- endfor %}
{%- for m in turns %}
{%- if m.role == "user" and loop.last and system is defined %}{{- "[INST] " + system + "\n\n" + m.content + "[/INST]" }}
{%- elif m.role == "user" %}{{- "[INST] " + m.content + "[/INST]" }}
{%- elif m.tool_calls is defined %}{{- "[TOOL_CALLS]" }}{{- m.tool_calls | tojson }}
{%- elif m.role == "assistant" %}{{- " " + m.content | trim }}
{%- elif m.role == "tool" %}{{- '[TOOL_RESULTS] {"content": ' + m.content | string + "}" }}
{%- else %}{{- raise_exception("only user and assistant roles") }}{%- endif %}
{%- endfor %}"""
"""7B v0.3: the system's text is in the last turn, and only if that is the user's."""

_NEMO = _MISTRAL.replace('"[INST] "', '"[INST]"').replace('" " + m.content | trim', "m.content").replace("S] {", "S]{")

_LLAMA_3 = """
{%- set system = messages[0].content | trim if messages[0].role == "system" else "" %}
{%- set turns = messages[1:] if messages[0].role == "system" else messages %}
<|system|>Knowledge: 2023\n{{ system }}
{%- for m in turns %}
{%- if m.tool_calls %}<|assistant|>{{ m.tool_calls[0].function | tojson }}
{%- elif m.role in ("tool", "ipython") %}<|ipython|>{{ m.content | tojson if m.content is iterable else m.content }}
{%- else %}<|{{ m.role }}|>{{ m.content | trim }}{%- endif %}
{%- endfor %}"""

_QWEN_2_5 = """
{%- if messages[0].role == "system" %}<|im_start|>system\n{{ messages[0].content }}
{%- else %}You are Qwen.{%- endif %}
{%- for m in messages %}
{%- if m.role == "user" or (m.role == "system" and not loop.first) or (m.role == "assistant" and not m.tool_calls) %}
<|im_start|>{{ m.role + "\n" + m.content }}
{%- elif m.role == "assistant" %}{{ m.content }}<tool_call>{{ m.tool_calls | tojson }}</tool_call>
{%- elif m.role == "tool" %}<tool_response>{{ m.content }}</tool_response>{%- endif %}
{%- endfor %}"""

_QWEN_3 = """
{%- if messages[0].role == "system" %}<|im_start|>system\n{{ messages[0].content }}{%- endif %}
{%- for m in messages %}
{%- if m.role == "user" or (m.role == "system" and not loop.first) %}<|im_start|>{{ m.role + "\n" + m.content }}
{%- elif m.role == "assistant" %}<|im_start|>assistant\n{{ m.content.split("</think>")[-1].lstrip("\n") }}
{{- m.tool_calls | tojson if m.tool_calls }}
{%- elif m.role == "tool" %}<tool_response>{{ m.content }}</tool_response>{%- endif %}
{%- endfor %}"""

_GEMMA_3 = """
{%- set lead = messages[0].content + "\n\n" if messages[0].role == "system" else "" %}
{%- for m in (messages[1:] if messages[0].role == "system" else messages) %}
{%- if (m.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{%- endif %}
<start_of_turn>{{ "model" if m.role == "assistant" else m.role }}\n{{ lead if loop.first }}{{ m.content | trim }}
{%- endfor %}"""

_R1_DISTILL = """
{%- set ns = namespace(system="") %}
{%- for m in messages if m.role == "system" %}{%- set ns.system = m.content %}{%- endfor %}
{{- ns.system }}
{%- for m in messages %}
{%- if m.role == "user" %}<|User|>{{ m.content }}
{%- elif m.role == "assistant" and m.tool_calls %}{{ m.tool_calls | tojson }}
{%- elif m.role == "assistant" %}<|Assistant|>{{ m.content.split("</think>")[-1] }}
{%- elif m.role == "tool" %}<|tool|>{{ m.content }}{%- endif %}
{%- endfor %}"""

_GPT_OSS = """
{%- set has_lead = messages[0].role in ("developer", "system") %}
{%- set call = namespace(name=none) %}
<|start|>system<|message|>Reasoning: {{ reasoning_effort or "medium" }}
{%- if has_lead %}<|start|>developer<|message|>{{ messages[0].content }}{%- endif %}
{%- for m in (messages[1:] if has_lead else messages) %}
{%- if m.tool_calls %}{%- set call.name = m.tool_calls[0].function.name %}<|call|>{{ call.name }}
{%- elif m.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}
{%- elif m.role == "tool" %}
{%- if call.name is none %}{{ raise_exception("no call") }}{%- endif %}{{ call.name }}{{ m.content | tojson }}
{%- elif m.role == "user" %}<|start|>user<|message|>{{ m.content }}{%- endif %}
{%- endfor %}"""

_COMMAND_R = """
{%- set system = messages[0].content if messages[0].role == "system" else "You are Command-R." %}
<|SYSTEM|>{{ system }}
{%- for m in (messages[1:] if messages[0].role == "system" else messages) %}
{%- set content = m.content %}
{%- if m.role == "user" %}<|USER|>{{ content.strip() }}
{%- elif m.role == "assistant" %}<|CHATBOT|>{{ content.strip() }}{{ m.tool_calls | tojson if m.tool_calls }}
{%- elif m.role == "tool" %}<results>{{ content }}</results>{%- endif %}
{%- endfor %}"""

_ANY = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{{ m.tool_calls if m.tool_calls }}\n{% endfor %}"

_JSON = """
{%- for m in messages %}
{%- if m.role != "tool" %}{{ m.content }}
{%- elif m.content[0] == "{" and m.content[-1] == "}" %}{{ m.content | tojson }}{%- endif %}
{%- endfor %}"""

_SHORT = _JSON.replace('[0] == "{" and m.content[-1] == "}"', " | length == 15").replace(" | tojson", "")
_SHORT = _SHORT.replace('!= "tool" %}{{ m.content', '!= "tool" %}{{ m.content | upper')

RULES = {
    "Mistral v0.3": _MISTRAL,
    "Mistral Nemo": _NEMO,
    "Llama 3": _LLAMA_3,
    "Qwen 2.5": _QWEN_2_5,
    "Qwen 3": _QWEN_3,
    "Gemma 3": _GEMMA_3,
    "DeepSeek R1 distilled": _R1_DISTILL,
    "gpt-oss": _GPT_OSS,
    "Command R": _COMMAND_R,
    "results of tools by their form": _JSON,
    "results of tools by their length, others in capitals": _SHORT,
    "upper case": _ANY.replace("trim", "upper"),
    "one capital": _ANY.replace("trim", "capitalize"),
    "the last message": "{{ messages[-1].content }}",
}

FIRST_LEAD = (
    '{% for m in messages %}{% if m.role == "user" or (m.role == "assistant" and not m.tool_calls) %}[{{ m.role }}]'
    "{{ m.content | trim | tojson }}{% elif m.role == 'assistant' %}{{ m.tool_calls[0].function.name }}"
    "{% elif m.role == 'system' and loop.first %}[S]{{ m.content }}{% endif %}{% endfor %}"
)
"""A template in the manner of Hermes. It has no rule for developers and tools, and one for a first system."""
