"""``ropeway perplexity``: the one evaluation whose command uses its own route, not a job.

The answer comes in one stream, with the time that it took, and ``--help`` lists every option.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from service.cli.client import connected
from service.cli.files import check_outputs
from service.cli.measuring import AsCsv, AsJson, Files, LengthList, MaxTokens, Plots, body_of, deliver
from service.cli.options import Encodings, ModelName, Server
from service.cli.progress import progress

if TYPE_CHECKING:
    from service.client import PerplexityResult, Ropeway
    from service.client import Progress as Scored


def perplexity(  # noqa: PLR0913 - one argument per option
    files: Files = None,
    pe: Encodings = None,
    lengths_: LengthList = None,
    max_tokens: MaxTokens = None,
    protocol: Annotated[
        Literal["curve", "sliding", "disjoint", "tail", "rolling"] | None,
        typer.Option(help="The scored tokens and their context.", show_default="curve"),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="sliding, tail: tokens from window to window.",
            show_default="sliding 256, tail the longest length",
        ),
    ] = None,
    tail: Annotated[
        int | None, typer.Option(min=1, help="tail: tokens scored at the end of each window.", show_default="256")
    ] = None,
    bos: Annotated[
        Literal["auto", "always", "never"] | None,
        typer.Option(help="BOS at the start of every window.", show_default="auto"),
    ] = None,
    model: ModelName = None,
    plots: Plots = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    server: Server = None,
) -> None:
    check_outputs(plots, as_json=as_json, as_csv=as_csv)
    own = {"protocol": protocol, "stride": stride, "tail": tail, "bos": bos}
    names, body = body_of("perplexity", own, files or [], pe, lengths_, max_tokens, model, server)
    with connected(server, model) as client:
        result = measured(client, body)
    deliver(result, names, plots, as_json=as_json, as_csv=as_csv)


def measured(client: Ropeway, body: dict[str, Any]) -> PerplexityResult:
    """The answer to ``POST /perplexity``, with progress on stderr.

    Raises:
        RopewayError: when the server answers with an error.
    """
    with progress() as show:

        def update(scored: Scored) -> None:
            show(scored.tokens_done, scored.tokens_total, scored.label)

        return client.perplexity(**body, on_progress=update)
