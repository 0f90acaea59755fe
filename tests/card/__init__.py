"""A card without a card: tensors that say they are on ``cuda:0``, and compute on the CPU."""

from tests.card.card import Card, CardTensor, Wait, WrongDevice, card, download, launch, of_host, upload
from tests.card.kernels import on_host
from tests.card.late import LateCard, LateUploads

__all__ = [
    "Card",
    "CardTensor",
    "LateCard",
    "LateUploads",
    "Wait",
    "WrongDevice",
    "card",
    "download",
    "launch",
    "of_host",
    "on_host",
    "upload",
]
