"""The demo model under the families of positional encoding that no Llama has, as an ordinary transformers model.

It is a Llama without rotation and with one other part, chosen by ``config.position_family``. It is written to be read,
without a line of ``patches``, and the patched model must compute the same. Scores are explicit, so distances count
columns; padding is on the left. ``patches/model/architectures/ropeway_demo.py`` finds the parts by their attributes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, initialization
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel, LlamaPreTrainedModel

CLIP = 16
"""Distance from which on all keys share one vector (Shaw et al., arXiv:1803.02155, section 4.1)."""
BUCKETS, MAX_DISTANCE = 32, 128
"""Of T5 (arXiv:1910.10683, section 2.1)."""

FAMILIES: dict[str, str] = {
    "sinusoidal": "sines and cosines of the position, added to its tokens (arXiv:1706.03762, section 3.5)",
    "learned": "one learned vector per position, added to its tokens (arXiv:1705.03122)",
    "t5": "a learned bias per head and bucket of distances, shared by all layers (arXiv:1910.10683)",
    "shaw": f"learned vectors per layer for the distances 0 to {CLIP}, beside the keys (arXiv:1803.02155)",
    "transformer_xl": "sinusoids of the distance, projected per layer, beside the keys (arXiv:1901.02860)",
}
"""``position_family`` -> what the model has instead of a rotary embedding."""


class RopewayDemoConfig(LlamaConfig):
    """A Llama's configuration and the family of its positions."""

    model_type = "ropeway_demo"
    position_family: str = "learned"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.position_family not in FAMILIES:
            raise ValueError(f"position_family: {self.position_family!r} is not one of {', '.join(FAMILIES)}")
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]


class Sinusoid(nn.Module):
    """Row p holds sin and cos of p x 10000^(-2i/width), alternating, as in the paper. No parameters."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weights", sinusoid(rows, width), persistent=False)

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        weights: torch.Tensor = self.get_buffer("weights")
        longest = int(position_ids.max()) + 1
        if longest > weights.shape[0]:
            weights = sinusoid(longest, weights.shape[1]).to(weights)
        return weights[position_ids]


def sinusoid(rows: int, width: int) -> torch.Tensor:
    """float32 [rows, width]."""
    inv_freq = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10_000.0) / width))
    angles = torch.arange(rows).float()[:, None] * inv_freq
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


class ShawKeys(nn.Module):
    """q . a[min(distance, CLIP)]. Without the paper's term for values, which adds nothing there (table 3)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.relative_keys = nn.Embedding(CLIP + 1, config.head_dim)

    def forward(self, query: torch.Tensor, key: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        by_row = query @ self.relative_keys.weight.T
        return by_row.gather(-1, distance.clamp(max=CLIP).expand(*query.shape[:3], -1))


class TransformerXLTerms(nn.Module):
    """u . k + (q + v) . W R[distance] of section 3.3; without the memory of hidden states of section 3.2.

    Names and the order of R, all sines before all cosines, are those of the released code.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, self.width = config.num_attention_heads, config.hidden_size
        self.r_net = nn.Linear(self.width, heads * config.head_dim, bias=False)
        self.r_w_bias = nn.Parameter(torch.zeros(heads, config.head_dim))
        self.r_r_bias = nn.Parameter(torch.zeros(heads, config.head_dim))

    def forward(self, query: torch.Tensor, key: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        waves = sinusoid(key.shape[2], self.width).to(query.device)
        waves = torch.cat((waves[:, 0::2], waves[:, 1::2]), dim=-1)
        projected = self.r_net(waves.to(self.r_net.weight.dtype)).unflatten(-1, self.r_w_bias.shape).transpose(0, 1)
        by_distance = (query + self.r_r_bias[:, None]) @ projected.transpose(-1, -2)
        content = self.r_w_bias[:, None] @ key.transpose(-1, -2)
        return torch.add(content, by_distance.gather(-1, distance.expand(*query.shape[:3], -1)))


RELATIVE: dict[str, type[ShawKeys | TransformerXLTerms]] = {"shaw": ShawKeys, "transformer_xl": TransformerXLTerms}


class RopewayDemoAttention(LlamaAttention):
    """Llama's attention without its rotation."""

    def __init__(self, config: RopewayDemoConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        relative = RELATIVE.get(config.position_family)
        self.relative = None if relative is None else relative(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        projections: tuple[nn.Module, ...] = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for projection in projections
        )
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(output.flatten(2)), weights


def eager_attention_forward(  # noqa: PLR0913  transformers' signature
    module: RopewayDemoAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    relative_attention_bias: nn.Embedding | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [rows, tokens, heads, dim] and weights [rows, heads, tokens, seen], from explicit scores."""
    key, value = (states.repeat_interleave(module.num_key_value_groups, 1) for states in (key, value))
    seen = torch.arange(key.shape[2], device=query.device)
    distance = (seen[-query.shape[2] :, None] - seen).clamp(min=0)
    scores = query @ key.transpose(-1, -2)
    if module.relative is not None:
        scores = scores + module.relative(query, key, distance)
    scores = scores * scaling
    if relative_attention_bias is not None:
        scores = scores + relative_attention_bias(buckets(distance)).permute(2, 0, 1)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def buckets(distance: torch.Tensor) -> torch.Tensor:
    """T5's causal bucket of every distance: half of them for one distance each, then logarithmically wider ones."""
    exact = BUCKETS // 2
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(MAX_DISTANCE / exact) * (BUCKETS - exact)
    return torch.where(distance < exact, distance, (exact + far.long()).clamp(max=BUCKETS - 1))


class RopewayDemoPreTrainedModel(LlamaPreTrainedModel):
    """Defaults of transformers for every part of the model."""

    config_class = RopewayDemoConfig
    _supports_sdpa = False  # scores need more than an additive mask
    _supports_flash_attn = False
    _supports_flex_attn = False

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if isinstance(module, Sinusoid):
            weights = module.get_buffer("weights")
            initialization.copy_(weights, sinusoid(*weights.shape))
        elif isinstance(module, TransformerXLTerms):
            for bias in (module.r_w_bias, module.r_r_bias):
                initialization.normal_(bias, std=self.config.initializer_range)


class RopewayDemoModel(RopewayDemoPreTrainedModel, LlamaModel):
    def __init__(self, config: RopewayDemoConfig) -> None:
        super().__init__(config)
        self.rotary_emb = NoRotation()  # type: ignore[assignment]
        for index, layer in enumerate(self.layers):
            layer.self_attn = RopewayDemoAttention(config, index)
        self.embed_positions: nn.Module | None = None
        self.relative_attention_bias: nn.Embedding | None = None
        self.embed_scale = 1.0
        if config.position_family == "sinusoidal":
            self.embed_positions = Sinusoid(config.max_position_embeddings, config.hidden_size)
            self.embed_scale = math.sqrt(config.hidden_size)  # section 3.4: else the waves drown the tokens
        elif config.position_family == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        elif config.position_family == "t5":
            self.relative_attention_bias = nn.Embedding(BUCKETS, config.num_attention_heads)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        cache = kwargs.pop("past_key_values", cache)  # its name before transformers 5.24
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids) * self.embed_scale
        if self.embed_positions is not None:
            if position_ids is None:
                seen = 0 if cache is None else cache.get_seq_length()
                position_ids = torch.arange(seen, seen + inputs_embeds.shape[1], device=inputs_embeds.device)[None]
            inputs_embeds = inputs_embeds + self.embed_positions(position_ids).to(inputs_embeds.dtype)
        return super().forward(
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            relative_attention_bias=self.relative_attention_bias,
            **kwargs,
        )


class NoRotation(nn.Module):
    """In the place of Llama's rotary module."""

    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> None:
        return None


class RopewayDemoForCausalLM(RopewayDemoPreTrainedModel, LlamaForCausalLM):
    def __init__(self, config: RopewayDemoConfig) -> None:
        super().__init__(config)
        self.model = RopewayDemoModel(config)
        self.post_init()  # type: ignore[no-untyped-call]


def register() -> None:
    """Let transformers' Auto classes load what was saved from here. Safe to repeat."""
    AutoConfig.register(RopewayDemoConfig.model_type, RopewayDemoConfig, exist_ok=True)
    AutoModelForCausalLM.register(RopewayDemoConfig, RopewayDemoForCausalLM, exist_ok=True)
