"""The page of exports, generated from the targets: every method on every system."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from patches import METHODS, examples, parse, to_shorthand
from service.docs.methods import markdown_table
from service.export.target import Expression, Target
from service.export.targets import TARGETS, NotExpressible, Source, export
from service.figures.encodings.samples import GEOMETRY, GROUPS, TIMES_LONGER, TRAINED, Sample, samples

PAGE = "export.md"
EXAMPLE = examples()[1]
ROPE_PARAMETERS = {"rope_type": "default", "rope_theta": GEOMETRY.rope_theta}
SOURCE = Source(GEOMETRY, ROPE_PARAMETERS, "llama")


def files() -> Iterator[tuple[str, str]]:
    """(path, text) of the page."""
    yield PAGE, export_page()


def export_page() -> str:
    """The systems, what each can express, and an example of each."""
    versions = [[f"`{t.name}`", f"[{t.version}]({t.documentation})", t.apply] for t in TARGETS.values()]
    systems = markdown_table(["system", "version", "where the result goes"], versions)
    rows = [_row(drawn) for group in GROUPS for drawn in samples() if drawn.group == group]
    methods = markdown_table(["kind", "method", *TARGETS], rows)
    blocks = [_introduction(), systems, _legend(), methods, "## Differences", _differences()]
    return "\n\n".join([*blocks, "## Examples", *_examples()]) + "\n"


def _introduction() -> str:
    short = to_shorthand(EXAMPLE)
    return f"""# Export

<!-- Written by `ropeway methods --docs docs`. A test compares. -->

An encoding that suits a model here can serve it elsewhere. These three give the same:

```sh
ropeway export {short} --model MODEL --to vllm --length 131072
curl localhost:8000/export --json '{{"pe": "{short}", "target": "vllm", "length": 131072}}'
python -c 'from service.client import Ropeway; print(Ropeway().export("{short}", "vllm", length=131072).usage)'
```

The default length is the one that the parameters reach: the factor times the trained length, or Self-Extend's groups.
An encoding that depends on the length needs one, and so does one whose parameters name none. ReRoPE is such a one.
No system has ReRoPE, so the answer is a refusal. Its closest encoding is for the trained length, or for the `length`.
`ropeway recommend --to vllm` compares the encodings that a system can express, on your text.
`--json` prints the whole answer. A checkpoint's own scaling is replaced: factors are relative to its trained length.
Option names are those of the versions below, whose sources were read."""


def _legend() -> str:
    return f"""## Methods and systems

- **exact:** the same numbers for every request.
- **close:** with a difference that the answer names; the list is below.
- **own:** the checkpoint was trained with it, so it needs no option.
- **→ `...`:** refused with 400. The answer has the reason, and this closest encoding in `closest`.
- **refused:** as before, and nothing that the model was trained for is close.

Each method has the parameters of its picture in [Methods](methods.md), on a model of {TRAINED} trained tokens, for
{TIMES_LONGER * TRAINED}. Other parameters may change the answer. transformers, vLLM and SGLang read a divisor per pair
(LongRoPE's lists). Every fixed schedule is therefore exact there. Two kinds of models have separate code, which takes
less. For gpt-oss, vLLM reads YaRN or a base alone. So do vLLM and SGLang for latent attention (DeepSeek). llama.cpp
takes a base alone there.

A checkpoint's own encoding may depend on the length, as LongRoPE's lists do. Every system reads them in its own way, so
the answer names the differences there too. TGI passes over a linear scaling, and vLLM over LongRoPE's
`attention_factor`. An export has such parts in another form, or is refused. A model whose configuration has
`position_encoding` is refused, as the demo model with ALiBi is. Only Ropeway reads that entry, and other systems would
rotate. An own encoding in `dual_chunk_attention_config` (Qwen2.5-1M) is refused, since no system has an option for it.
So are other encodings beside that entry for vLLM and SGLang, which read it first."""


def _row(drawn: Sample) -> list[str]:
    return [drawn.group, f"[`{drawn.name}`](methods.md#{drawn.name})", *(_cell(drawn, t) for t in TARGETS.values())]


def _exported(drawn: Sample, target: Target) -> Expression | NotExpressible:
    geometry, own = drawn.geometry, ROPE_PARAMETERS if drawn.geometry.rotates else {}
    if geometry.family in METHODS:  # the table or formula that the model was trained with
        geometry = replace(geometry, native=parse({"method": geometry.family}))
    source = Source(geometry, own, "llama")
    try:
        return export(parse(drawn.fields), source, target, drawn.length)
    except NotExpressible as error:
        return error


def _cell(drawn: Sample, target: Target) -> str:
    expression = _exported(drawn, target)
    if isinstance(expression, NotExpressible):
        return "refused" if expression.closest is None else f"→ `{expression.closest}`"
    if expression == target.unchanged(drawn.length):
        return "own"
    return "close" if expression.differences else "exact"


def _differences() -> str:
    found: dict[str, dict[str, None]] = {}
    for drawn in samples():
        for target in TARGETS.values():
            for difference in getattr(_exported(drawn, target), "differences", ()):
                found.setdefault(difference, {})[target.name] = None
    lines = {difference: [name for name in TARGETS if name in names] for difference, names in found.items()}
    return "\n".join(f"- {', '.join(names)}: {difference}" for difference, names in lines.items())


def _examples() -> Iterator[str]:
    length = round(EXAMPLE["factor"] * TRAINED)
    yield f"`{to_shorthand(EXAMPLE)}` on a model of {TRAINED} trained tokens, for {length:,}."
    for target in TARGETS.values():
        expression = export(parse(EXAMPLE), SOURCE, target, length)
        yield f"### {target.name}"
        if expression.config and not any(json.dumps(expression.config) in text for text in expression.arguments):
            yield f"```text\n{json.dumps(expression.config, indent=2)}\n```"
        yield f"```text\n{target.usage('MODEL', expression)}\n```"
