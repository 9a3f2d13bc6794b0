"""`kvlab k8s`: manifests, what is behind a Service, and the two commands that run inside a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlab.explained import errors_explained, finite

app = typer.Typer(no_args_is_help=True, help="Kubernetes: manifests, and what is behind a Service.")


@app.command()
def render(
    image: Annotated[str, typer.Option(help="image of the workers: it holds vLLM")],
    out: Annotated[Path, typer.Option(help="a folder, or one file that ends in .yaml")] = Path("k8s"),
    load_image: Annotated[str, typer.Option(help="image of the load, built from the Dockerfile")] = "kvlab:latest",
    profile: Annotated[str, typer.Option(help="a built-in profile, or the path of a TOML file")] = "gpu-8gb",
    namespace: str = "kvlab",
    name: Annotated[str, typer.Option(help="start of every object's name")] = "kvlab",
    replicas: Annotated[int, typer.Option(min=1, help="workers")] = 6,
    gpus: Annotated[int | None, typer.Option(min=0, help="of each worker; empty: as many as it has ranks")] = None,
    cpu: Annotated[str, typer.Option(help="requested by each worker")] = "4",
    memory: Annotated[str, typer.Option(help="requested by each worker, and its limit")] = "16Gi",
    storage_class: Annotated[str | None, typer.Option(help="of the cache volume; empty: the cluster's default")] = None,
    cache_size: str = "50Gi",
    cache_path: Annotated[str | None, typer.Option(help="a folder of each node in place of a volume claim")] = None,
    token_secret: Annotated[str | None, typer.Option(help="a Secret with the key HF_TOKEN, for gated models")] = None,
    pull_secret: Annotated[str | None, typer.Option(help="a Secret for the images' registry")] = None,
    router: Annotated[str, typer.Option(help="also a vllm-router with this policy")] = "",
) -> None:
    """Write manifests: workers, their Service, the load's Job and rights, and a router if asked for."""
    from kvlab import k8s_render
    from kvlab.config import build

    with errors_explained():
        given = {key: value for key, value in locals().items() if key in k8s_render.Options.model_fields}
        objects = k8s_render.render(build(k8s_render.Options, given, "The request for manifests"))
        for path in k8s_render.write(objects, out):
            typer.echo(path)


@app.command()
def pods(
    service: Annotated[str, typer.Argument(help="NAMESPACE/SERVICE")],
    context: Annotated[str | None, typer.Option(help="of the kubeconfig; empty: the current one")] = None,
) -> None:
    """List the ready pods behind a Service, as a measurement would find them."""
    from dataclasses import replace

    from kvlab import k8s, k8s_api

    with errors_explained():
        target = replace(k8s.parse_target(service), context=context)
        api = k8s_api.Api(context)
        found = api.service(target)
        k8s.check_service(found, target)
        workers = api.workers(target, found)
        k8s_api.refuse_none(workers, target)
        for worker in workers:
            restarts = "?" if worker.restarts is None else worker.restarts
            typer.echo(f"{worker.pod}  {worker.base_url}  restarts {restarts}  {worker.image or ''}".rstrip())


@app.command()
def fetch(
    job: Annotated[str, typer.Argument(help="NAMESPACE/JOB")],
    machine: Annotated[str, typer.Argument(help="the data folder that its arguments name")],
    context: Annotated[str | None, typer.Option(help="of the kubeconfig; empty: the current one")] = None,
) -> None:
    """Wait for a load's Job and fetch what it measured."""
    from kvlab import k8s, k8s_api, k8s_job

    with errors_explained():
        target = k8s.parse_target(job)
        k8s_job.fetch(target.namespace, target.service, machine, api=k8s_api.Api(context), told=typer.echo)


@app.command(context_settings={"ignore_unknown_options": True})
def hold(
    machine: Annotated[str, typer.Argument(help="the data folder that is offered")],
    command: Annotated[list[str], typer.Argument(help="-- and a command of kvlab")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="where the results are offered")] = 8080,
    hold_s: Annotated[
        float, typer.Option(min=0, callback=finite, help="seconds for which the results are offered")
    ] = 3600.0,
) -> None:
    """Inside a Job: run a command of kvlab, then offer what it measured until it is fetched."""
    from kvlab import k8s_job

    with errors_explained():
        raise typer.Exit(k8s_job.hold(machine, command, port=port, hold_s=hold_s))


@app.command()
def model(
    name: Annotated[str, typer.Argument(help="tiny, or geometry:NAME")],
    folder: Annotated[Path, typer.Argument(help="where its files go; left alone where they are")],
) -> None:
    """Inside a worker's pod: put a model that kvlab makes onto the cache volume."""
    from kvlab import k8s_job

    with errors_explained():
        k8s_job.put_model(name, folder)
        typer.echo(folder)
