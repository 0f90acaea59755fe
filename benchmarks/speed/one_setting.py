"""One encoding at one length with plain transformers: the script that is run again for every setting.

``python -m benchmarks.speed.one_setting MODEL ENCODING_JSON LENGTH FILE...`` prints the perplexity of the files' first
LENGTH tokens, as JSON.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.models import native


def main(folder: str, encoding: str, length: int, files: list[str]) -> float:
    """exp of the mean NLL over all files' scored tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = native(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), json.loads(encoding))
    assert model is not None
    total, count = 0.0, 0
    for file in files:
        text = Path(file).read_text(encoding="utf-8")[: 8 * length]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[tokenizer.bos_token_id, *ids][:length]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, :-1]
        nll = F.cross_entropy(logits.double(), ids[0, 1:], reduction="sum")
        total, count = total + float(nll), count + ids.shape[1] - 1
    return math.exp(total / count)


if __name__ == "__main__":
    torch.set_num_threads(2)
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])))
