"""A card without a card: tensors that say they are on ``cuda:0``, and compute on the CPU."""

from tests.card.card import Card, Wait, WrongDevice, card, launch
from tests.card.kernels import on_host
from tests.card.late import LateCard, LateUploads
from tests.card.tensors import CardTensor, download, of_host, upload

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
