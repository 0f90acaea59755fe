"""``GET /models``."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Request

from patches import OWN
from service.api.encodings.auto import in_listings
from service.api.http.routing import Route
from service.api.response_models.models import MemoryInfo, ModelInfo, ModelList, QuantizationInfo
from service.models.linear.layers import products_of
from service.models.linear.packing import has_packed_weights
from service.models.registry import ModelRegistry, ServedModel

router = APIRouter(tags=["methods"], route_class=Route)


@router.get("/models")
async def models(request: Request) -> ModelList:
    """The models in memory; the first is the default."""
    registry: ModelRegistry = request.app.state.models
    return ModelList(models=[await _info(served, request) for served in registry])


async def _info(served: ServedModel, request: Request) -> ModelInfo:
    model, models = served.patch.model, request.app.state.models
    names = {each.name for each in models}
    return ModelInfo(
        id=served.name,
        default=served is models.default,
        architecture=type(model).__name__,
        fingerprint=served.contents,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocab_size=served.vocab_size,
        trained_length=served.trained_length,
        window=served.patch.geometry.window,
        max_length=served.max_length,
        pe=served.patch.describe(OWN, served.trained_length),
        auto=await in_listings(served, request),
        variants={kind: name for kind, name in served.variants.items() if name in names},
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        engine=served.engine.choice.kind,
        engine_reason=served.engine.choice.reason,
        tensor_parallel=served.patch.ranks.size,
        attention=served.engine.choice.attention,
        cuda_graphs=served.engine.choice.graphs,
        recorded_steps=served.engine.choice.recorded,
        base=served.base,
        quantization=None if served.quantization is None else QuantizationInfo(**asdict(served.quantization)),
        packed_weights=has_packed_weights(model),
        products=products_of(model),
        memory=MemoryInfo(**asdict(served.memory)),
    )
