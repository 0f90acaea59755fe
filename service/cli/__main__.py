"""``python -m service.cli``: the same as the console script, for a checkout or a subprocess."""

from service.cli import app

app(prog_name="ropeway")
