"""The shell: ``ropeway serve``, ``generate``, one command per evaluation, ``jobs``, ``report`` and listings."""

from __future__ import annotations

import typer

from service.cli import evaluations
from service.cli.demo import demo
from service.cli.generate import generate
from service.cli.jobs import jobs, report
from service.cli.keys import keys
from service.cli.listings import methods, models
from service.cli.perplexity import perplexity
from service.cli.serve import serve

app = typer.Typer(
    name="ropeway",
    help="One loaded language model, a positional encoding per request.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (serve, generate, perplexity):
    app.command()(command)
evaluations.add_to(app)
app.add_typer(jobs, name="jobs")
for listing in (report, methods, models, keys, demo):
    app.command()(listing)
