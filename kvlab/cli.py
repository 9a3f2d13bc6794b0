"""The `kvlab` command: thin; every line of it calls a function that a notebook can call too."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from kvlab import __version__, k8s_cli, router_cli
from kvlab.errors import ConfigError
from kvlab.explained import errors_explained, finite, print_anything
from kvlab.invocation import as_typed

app = typer.Typer(
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Predict and measure an LLM server.",
)
app.add_typer(k8s_cli.app, name="k8s")
app.add_typer(router_cli.app, name="router")

Profile = Annotated[str, typer.Option(help="auto, a built-in profile, or the path of a TOML file")]
Machine = Annotated[str, typer.Option(help="data folder; empty: named after this machine's hardware")]
BaseUrl = Annotated[str, typer.Option(help="measure this existing server; its key is read from KVLAB_API_KEY")]
Kubernetes = Annotated[str, typer.Option(help="NAMESPACE/SERVICE: measure the ready pods behind it, through it")]
InCluster = Annotated[str, typer.Option(help="image of kvlab: measure from inside that cluster, and fetch the results")]
Mode = Annotated[str, typer.Option(help="auto: measure what is missing; measure: all again; replay: start nothing")]
Param = Annotated[list[str], typer.Option("--param", "-p", help="a notebook parameter, such as 'CONCURRENCY=[1,8,32]'")]
AllowEmpty = Annotated[bool, typer.Option(help="with --mode replay: show a machine on which nothing was measured")]
Execute = Annotated[bool, typer.Option(help="execute notebooks again of which nothing has changed")]
BUILD = Path("_build")


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", help="show the version and end", is_eager=True)] = False,
) -> None:
    print_anything()
    if version:
        typer.echo(f"kvlab {__version__}")
        raise typer.Exit()


@app.command()
def check(profile: Profile = "auto", machine: Machine = "") -> None:
    """Show what this machine has, what would be measured, and how long it takes."""
    from kvlab import overview

    with errors_explained():
        text, problems = overview.text(profile, machine)
        typer.echo(as_typed(text))
        if problems:
            raise typer.Exit(2)


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="a name, a folder or a config.json; empty: a table of models")] = "",
    kv_bytes: Annotated[str, typer.Option(help="size of the KV pool: 2.5e9, 2.5GB or 2.5GiB")] = "2GiB",
    block_size: Annotated[int, typer.Option(min=1, help="tokens in a block")] = 16,
    kv_dtype_bytes: Annotated[
        float | None,
        typer.Option(
            min=0.5, max=16, callback=finite, help="bytes of a KV element; empty: as vLLM's --dtype auto chooses"
        ),
    ] = None,
    input_tokens: Annotated[int, typer.Option(min=1)] = 512,
    output_tokens: Annotated[int, typer.Option(min=1)] = 128,
    tensor_parallel: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Compute the KV cache of a model: bytes per token, capacity, requests that fit."""
    from kvlab import overview

    with errors_explained():
        sizes = (block_size, kv_dtype_bytes, input_tokens, output_tokens, tensor_parallel)
        typer.echo(overview.prediction(model, overview.size_bytes(kv_bytes), *sizes))


@app.command()
def measure(
    sections: Annotated[list[str], typer.Argument(help="sections, such as load; see kvlab check")],
    profile: Profile = "auto",
    machine: Machine = "",
    mode: Mode = "auto",
    base_url: BaseUrl = "",
    kubernetes: Kubernetes = "",
    in_cluster: InCluster = "",
    param: Param = [],  # noqa: B006  typer wants a list
    together: Annotated[
        bool,
        typer.Option(
            help="start the servers of all sections side by side; their loads take turns (a GPU's start takes minutes)"
        ),
    ] = False,
    allow_empty: AllowEmpty = False,
    execute: Execute = False,
) -> None:
    """Measure sections, resuming what is there; executed notebooks land in _build/notebooks."""
    with errors_explained():
        if kubernetes or in_cluster:
            from kvlab import k8s_job

            base_url = k8s_job.address(kubernetes, base_url)
            if in_cluster:
                machine = k8s_job.from_inside(base_url, in_cluster, sections, profile, machine, param, typer.echo)
                mode = "replay"
        from kvlab import sections as sections_module

        asked = sections_module.Asked(profile, machine, mode, base_url, param, allow_empty, execute)
        if together:
            sections_module.together(sections, asked)
        else:
            typer.echo(sections_module.results(sections_module.execute(sections, asked)))


@app.command()
def report(
    mode: Mode = "auto",
    profile: Profile = "auto",
    machine: Machine = "",
    base_url: BaseUrl = "",
    allow_empty: AllowEmpty = False,
    execute: Execute = False,
) -> None:
    """Run every notebook and render _build/report.html."""
    from kvlab import progress, report, run, sections

    with errors_explained():
        run.require_notebooks()
        asked = sections.Asked(profile, machine, mode, base_url, (), allow_empty, execute)
        done = sections.execute(list(run.notebooks()), asked, go_on=True)
        failures, began = done.failures, time.monotonic()
        with progress.line(lambda: "rendering the report"):
            english, *others = report.build_all(
                done.machine, BUILD / "report.html", timings=done.timings, failures=failures
            )
        typer.echo(f"  {'report':<16} {time.monotonic() - began:6.1f} s")
        also = ", ".join(path.name for path in others)
        typer.secho(f"The report is at {english.resolve().as_uri()} (beside it: {also})", fg="green")
        for section, why in failures.items():
            typer.secho(as_typed(f"{section} failed: {why}"), err=True, fg="red")
        if failures:
            raise typer.Exit(1)


@app.command()
def site(machine: Machine = "") -> None:
    """Write the report as a small static site into _build/site, from stored claims and figures; runs nothing."""
    from kvlab import site, store

    with errors_explained():
        path = site.build(machine or store.default_replay_machine(), BUILD / "site")
        typer.secho(f"The site is at {path.resolve().as_uri()}", fg="green")


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="a machine, a folder with claims.csv, or one run: machine/section/run")],
    b: Annotated[str, typer.Argument(help="the other one")],
    section: Annotated[str, typer.Option(help="only this section")] = "",
    everything: Annotated[bool, typer.Option("--all", help="show what did not move too")] = False,
    form: Annotated[str, typer.Option("--format", help="table, csv or json")] = "table",
    out: Annotated[Path | None, typer.Option(help="write to this file instead of the screen")] = None,
) -> None:
    """Show which numbers of two machines or runs moved beyond the noise.

    Exit code: 0 nothing moved, 1 something did, 2 an error, 3 nothing can be told (no interval and no noise floor).
    """
    from kvlab import compare as comparison
    from kvlab import store

    with errors_explained(failed=2):  # 1 would read as "something moved"
        sides = comparison.open_side(a), comparison.open_side(b)
        compared = comparison.table(*sides, section)
        if form not in ("table", "csv", "json"):
            raise ConfigError(f"There is no format {form!r}.", next_step="use table, csv or json")
        said = {
            "table": lambda: comparison.text(*sides, compared, everything=everything, width=_width(out)) + "\n",
            "csv": lambda: compared.to_csv(index=False, lineterminator="\n"),
            "json": lambda: comparison.as_json(*sides, compared) + "\n",
        }[form]()
        if out is None:
            typer.echo(said, nl=False)
        else:
            store.write_text(out, said)
            typer.echo(f"{comparison.summary(*sides, compared)}\nWritten to {out}")
    raise typer.Exit(comparison.exit_code(compared))


def _width(out: Path | None) -> int | None:
    """Columns of the terminal; null for a file or a pipe, which take any width."""
    if out is not None or not (sys.stdout.isatty() or "COLUMNS" in os.environ):
        return None
    return shutil.get_terminal_size().columns


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="a result of vllm bench serve --save-detailed, guidellm or aiperf")],
    machine: Annotated[str, typer.Option(help="data folder that gets the runs; name the machine that was measured")],
    section: Annotated[str, typer.Option(help="the section they belong to")] = "load",
) -> None:
    """Store the measurements of another tool as runs, with claims; what its file does not hold is null."""
    from kvlab import interchange

    with errors_explained():
        for run in interchange.import_file(file, machine, section):
            typer.echo(f"{machine}/{section}/{run.id}: {run.manifest['summary']['n']} requests")
            for note in run.manifest["certificate"]["problems"]:
                typer.echo(f"  {note}")


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="the run's folder, machine/section/run, or its id")],
    to: Annotated[str, typer.Option(help="vllm-bench: the JSON of vllm bench serve --save-detailed")] = "vllm-bench",
    out: Annotated[Path | None, typer.Option(help="file; empty: standard output")] = None,
) -> None:
    """Write a run in the format of another tool."""
    from kvlab import interchange, store

    with errors_explained():
        if to != "vllm-bench":
            raise ConfigError(f"There is no format {to!r}.", next_step="use --to vllm-bench")
        said = json.dumps(interchange.to_vllm_bench(interchange.find(run))) + "\n"
        if out is None:
            typer.echo(said, nl=False)
        else:
            store.write_text(out, said)


@app.command()
def ps() -> None:
    """List servers that kvlab started and that still run, and what is being measured."""
    from kvlab import processes, quiet

    with errors_explained():
        servers = processes.list_servers()
        if what := quiet.measuring():
            typer.echo(f"measuring  {what}")
        for server in servers:
            typer.echo(processes.describe(server))
        if not servers:
            typer.echo("No server started by kvlab is running.")


@app.command()
def stop(
    ids: Annotated[
        list[str] | None, typer.Argument(help="ids from kvlab ps; none: those of this project folder")
    ] = None,
    everywhere: Annotated[bool, typer.Option("--all", help="those started from other folders too")] = False,
) -> None:
    """End servers that kvlab started from this project folder, or those named, with everything below them."""
    from kvlab import processes

    with errors_explained():
        wanted, others = processes.choose(ids or [], everywhere)
        for server in wanted:
            typer.echo(f"ends     {processes.describe(server)}")
        for server in wanted:
            processes.end_tree(server.id)
            typer.echo(f"stopped  {server.id}")
        for server in others:
            typer.echo(f"stays    {processes.describe(server)}")
        if others:
            typer.echo(
                as_typed("Next: kvlab stop ID ends one that was started elsewhere, kvlab stop --all all of them")
            )
        elif not wanted:
            typer.echo("No server started by kvlab is running.")


if __name__ == "__main__":
    app()
