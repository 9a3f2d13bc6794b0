"""`kvlab router`: the packages of the routers, each in an environment of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from kvlab.explained import errors_explained

app = typer.Typer(no_args_is_help=True, help="Routers in front of several workers: which are installed, and install.")


@app.command("list")
def list_() -> None:
    """Show the routers, whether they are installed, and their size."""
    from kvlab import router_packages as packages

    for name in packages.PRODUCTS:
        typer.echo(f"{name:<12} {packages.told(name)}")


@app.command()
def install(
    names: Annotated[list[str], typer.Argument(help="vllm-router, smg, dynamo; see kvlab router list")],
) -> None:
    """Install routers with pip, at their pinned versions."""
    from kvlab import router_packages as packages

    with errors_explained():
        for name in names:
            packages.place(name)  # a wrong name is an error before anything is downloaded
        for name in names:
            folder = packages.install(name)
            typer.echo(f"{name} {packages.version(name)} is in {folder}")
