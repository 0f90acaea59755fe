"""``ropeway scale``: replicas on an existing Ray cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.serve import assignments
from service.cli.shared.commands import Commands
from service.cli.shared.options import AsJson
from service.cli.shared.terminal import fail, new_table, print_table, stderr, stdout
from service.evaluation.formatting import printable

if TYPE_CHECKING:
    from service.scale.private_names import ClusterClient
    from service.scale.status import Status

scale = Commands(help="Replicas on a Ray cluster: config, apply, status.", no_args_is_help=True)

Address = Annotated[
    str,
    typer.Option(metavar="URL", envvar=["RAY_DASHBOARD_ADDRESS", "RAY_ADDRESS"], help="Dashboard of the cluster."),
]
LOCAL = "http://127.0.0.1:8265"


@scale.command("config")
def config(
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of the replicas; repeatable."),
    ] = None,
    kuberay: Annotated[bool, typer.Option("--kuberay", help="Print a RayService for KubeRay instead.")] = False,
    image: Annotated[str | None, typer.Option(help="With --kuberay: image with the service and Ray.")] = None,
    memory: Annotated[str, typer.Option(help="With --kuberay: memory of each replica's pod.")] = "16Gi",
) -> None:
    """Print Serve's configuration for the settings, from flags, ROPEWAY_* and .env. Needs no Ray."""
    from service.cli.server import StartFailed, settings_with
    from service.scale.cluster import SECRET, as_yaml, rayservice, serve_config
    from service.scale.options import InvalidScale

    if kuberay != (image is not None):
        raise typer.BadParameter("--kuberay and --image belong together", param_hint="--image")
    try:
        settings = settings_with(**assignments(setting or []))
        if kuberay:
            settings = settings.model_copy(update={"host": "0.0.0.0"})
        printed = serve_config(settings)
    except (StartFailed, InvalidScale) as error:
        fail(str(error))
    left_out = [f"ROPEWAY_{name.upper()}" for name in SECRET if getattr(settings, name)]
    if left_out:
        stderr.print(f"not printed, for the environment of every node: {', '.join(left_out)}", soft_wrap=True)
    if image is not None:
        printed = rayservice(settings, printed, image, memory)
    typer.echo(as_yaml(printed), nl=False)


@scale.command("apply")
def apply(
    file: Annotated[typer.FileText, typer.Argument(metavar="FILE", help="Serve's configuration, or - for stdin.")],
    address: Address = LOCAL,
) -> None:
    """Deploy a configuration to a cluster, in the place of all that Serve runs there."""
    import yaml

    try:
        config = yaml.safe_load(file)
    except yaml.YAMLError as error:
        fail(f"{file.name}: {error}")
    if not isinstance(config, dict):
        fail(f"{file.name}: no configuration of Serve, as `ropeway scale config` prints it")
    with _cluster(address) as client:
        client.deploy(config)
    typer.echo("deployed: `ropeway scale status` shows the start of the replicas")


@scale.command("status")
def status(address: Address = LOCAL, as_json: AsJson = False) -> None:
    """State and load of the replicas on a cluster, as Ray has them: numbers are some seconds old."""
    from service.scale.status import NotDeployed
    from service.scale.status import status as status_of

    with _cluster(address) as client:
        try:
            found = status_of(client)
        except NotDeployed as error:
            fail(str(error))
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        _print_status(found)


@contextmanager
def _cluster(address: str) -> Iterator[ClusterClient]:
    """The cluster at ``address``; its refusals end the command with one line."""
    from service.scale.private_names import ClusterClient, ClusterUnusable, RayUnusable, require_ray

    if not address.startswith(("http://", "https://")):
        raise typer.BadParameter(f"the dashboard, as http://HOST:8265, not {address!r}", param_hint="--address")
    try:
        require_ray()
        yield ClusterClient(address)
    except (ClusterUnusable, RayUnusable) as error:
        fail(str(error))


def _print_status(found: Status) -> None:
    table = new_table("replica", "node", "pid", "state", "running", numbers=("pid", "running"))
    for replica in found.replicas:
        table.add_row(*(_shown(value) for value in asdict(replica).values()))
    print_table(table)
    stdout.print(f"application {found.state}: {len(found.replicas)} of {found.wanted} replicas")
    stdout.print(f"requests that wait for a replica: {_shown(found.queued)}")
    for node, state in found.proxies.items():
        stdout.print(f"proxy on {node}: {state}")
    if found.message:
        stdout.print(printable(found.message), markup=False)
    if found.unread:
        stderr.print(f"no metrics from {', '.join(found.unread)}: requests there are not counted", markup=False)


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
