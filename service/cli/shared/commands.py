"""Commands whose options take effect, or are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption


class OneValue(TyperCommand):
    """A command that refuses a second value of an option that takes one. The parser would drop the first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises:
        typer.BadParameter: naming the option.
        """
        rest = super().parse_args(ctx, list(args))  # --help ends here
        if not ctx.resilient_parsing:  # a shell that completes a word
            *_, order = self.make_parser(ctx).parse_args(args=list(args))
            for option, times in Counter(each for each in order if isinstance(each, TyperOption)).items():
                if times > 1 and not option.multiple and not option.is_flag:
                    raise twice(max(option.opts, key=len))
        return rest


def twice(option: str) -> typer.BadParameter:
    """The refusal of a second value."""
    return typer.BadParameter("is given more than once, and takes one value", param_hint=option)


class Commands(typer.Typer):
    """Commands that are ``OneValue``."""

    def command(self, *args: Any, **options: Any) -> Callable[..., Any]:
        """As in the base class."""
        return super().command(*args, cls=OneValue, **options)
