"""The `kvlab` command: thin; every line of it calls a function that a notebook can call too."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from kvlab import k8s_cli
from kvlab.errors import ConfigError, KvlabError, NotebookError
from kvlab.explained import errors_explained

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Predict and measure an LLM server.",
)
app.add_typer(k8s_cli.app, name="k8s")

Profile = Annotated[str, typer.Option(help="auto, a built-in profile, or the path of a TOML file")]
Machine = Annotated[str, typer.Option(help="data folder; empty: named after this machine's hardware")]
BaseUrl = Annotated[str, typer.Option(help="measure this existing server; its key is read from KVLAB_API_KEY")]
Kubernetes = Annotated[str, typer.Option(help="NAMESPACE/SERVICE: measure the ready pods behind it, through it")]
InCluster = Annotated[str, typer.Option(help="image of kvlab: measure from inside that cluster, and fetch the results")]
Mode = Annotated[str, typer.Option(help="auto: measure what is missing; measure: all again; replay: start nothing")]
Param = Annotated[list[str], typer.Option("--param", "-p", help="a notebook parameter, such as CONCURRENCY=[1,8,32]")]
BUILD = Path("_build")


@app.command()
def check(profile: Profile = "auto", machine: Machine = "") -> None:
    """Show what this machine has, what would be measured, and how long it takes."""
    from kvlab import overview

    with errors_explained():
        typer.echo(overview.text(profile, machine))


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="a name, a folder or a config.json; empty: a table of models")] = "",
    kv_bytes: Annotated[float, typer.Option(help="bytes of the KV pool, such as 2.5e9")] = 2.0 * 2**30,
    block_size: Annotated[int, typer.Option(min=1, help="tokens in a block")] = 16,
    kv_dtype_bytes: Annotated[
        float | None, typer.Option(min=0.5, help="bytes of a KV element; fp8: 1; empty: the model's own")
    ] = None,
    input_tokens: Annotated[int, typer.Option(min=1)] = 512,
    output_tokens: Annotated[int, typer.Option(min=1)] = 128,
    tensor_parallel: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Compute the KV cache of a model: bytes per token, capacity, requests that fit."""
    from kvlab import overview

    with errors_explained():
        sizes = (kv_bytes, block_size, kv_dtype_bytes, input_tokens, output_tokens, tensor_parallel)
        typer.echo(overview.prediction(model, *sizes))


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
) -> None:
    """Measure sections, resuming what is there; executed notebooks land in _build/notebooks."""
    with errors_explained():
        if kubernetes or in_cluster:
            from kvlab import k8s_job

            base_url = k8s_job.address(kubernetes, base_url)
            if in_cluster:
                machine = k8s_job.from_inside(base_url, in_cluster, sections, profile, machine, param, typer.echo)
                mode = "replay"
        if together:
            _run_together(sections, profile, machine, mode, base_url, param)
        else:
            _run(sections, profile, machine, mode, base_url, param)


@app.command()
def report(
    mode: Mode = "auto",
    profile: Profile = "auto",
    machine: Machine = "",
    base_url: BaseUrl = "",
) -> None:
    """Run every notebook and render _build/report.html."""
    from kvlab import report, run

    with errors_explained():
        machine, timings, failures = _run(list(run.notebooks()), profile, machine, mode, base_url, [], go_on=True)
        began = time.monotonic()
        path = report.build(machine, BUILD / "report.html", timings=timings, failures=failures)
        typer.echo(f"  {'report':<16} {time.monotonic() - began:6.1f} s")
        typer.secho(f"The report is at {path.resolve().as_uri()}", fg="green")
        for section, why in failures.items():
            typer.secho(f"{section} failed: {why}", err=True, fg="red")
        if failures:
            raise typer.Exit(1)


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

    try:
        sides = comparison.open_side(a), comparison.open_side(b)
        compared = comparison.table(*sides, section)
        if form not in ("table", "csv", "json"):
            raise ConfigError(f"There is no format {form!r}.", next_step="use table, csv or json")
        said = {
            "table": lambda: comparison.text(*sides, compared, everything=everything) + "\n",
            "csv": lambda: compared.to_csv(index=False, lineterminator="\n"),
            "json": lambda: comparison.as_json(*sides, compared) + "\n",
        }[form]()
        if out is None:
            typer.echo(said, nl=False)
        else:
            store.write_text(out, said)
            typer.echo(comparison.summary(*sides, compared))
    except KvlabError as error:  # 1 would read as "something moved"
        typer.secho(str(error), err=True, fg="red")
        raise typer.Exit(2) from None
    raise typer.Exit(comparison.exit_code(compared))


@app.command()
def ps() -> None:
    """List servers that kvlab started and that still run."""
    from kvlab import processes

    with errors_explained():
        servers = processes.list_servers()
        for server in servers:
            typer.echo(processes.describe(server))
        if not servers:
            typer.echo("No server started by kvlab is running.")


@app.command()
def stop(
    ids: Annotated[list[str] | None, typer.Argument(help="ids from kvlab ps; none: all of them")] = None,
) -> None:
    """End servers that kvlab started, with everything below them."""
    from kvlab import processes

    with errors_explained():
        ended = processes.stop_servers(ids or None)
        for server in ended:
            typer.echo(f"stopped {processes.describe(server)}")
        if not ended:
            typer.echo("No server started by kvlab is running.")


def _everywhere(profile: str, lab) -> str:
    """The profile as it is found from the notebooks' folder too: its name, or the whole path of a file."""
    from kvlab.profile import built_in

    return lab.profile.name if profile == "auto" or profile in built_in() else str(Path(profile).expanduser().resolve())


def _run_together(sections, profile, machine, mode, base_url, param) -> None:
    """A process a section, all at once; they take turns at measuring. Raises NotebookError naming those that failed."""
    from kvlab import quiet, run

    names = [run.notebook_of(section).stem[3:] for section in sections]
    options = ["--profile", profile, "--mode", mode, *(f"--param={text}" for text in param)]
    options += ["--machine", machine] if machine else []
    options += ["--base-url", base_url] if base_url else []
    command = [sys.executable, "-m", "kvlab.cli", "measure"]
    environment = os.environ | {quiet.TURNS: "1"}
    started = {name: subprocess.Popen([*command, name, *options], env=environment) for name in names}
    try:
        failed = [name for name, process in started.items() if process.wait() != 0]
    except KeyboardInterrupt:  # each process has heard it too, and says what it keeps
        for process in started.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        raise
    if failed:
        raise NotebookError(
            f"{len(failed)} of {len(names)} sections failed: {', '.join(failed)}.",
            cause="each one's own message stands above",
            next_step="the same command resumes; without --together they run one after another",
        )


def _run(sections, profile, machine, mode, base_url, param, *, go_on: bool = False):
    """Executes the notebooks; returns the machine, seconds a section, and failures a section (only with `go_on`)."""
    from kvlab import batch, engine, measure, model_files, run, store

    if not sections:
        raise ConfigError("No notebooks were found from here.", next_step="run this inside the repository of kvlab")
    known = [run.notebook_of(section) for section in sections]
    # Opened here first: a wrong profile, mode or machine is one error before the first notebook, not one in each.
    if mode == "replay" and not machine and not base_url:
        machine = store.default_replay_machine()
    lab = measure.open_lab(Path(known[0]).stem[3:], profile_name=profile, machine=machine, mode=mode, base_url=base_url)
    common = {"PROFILE": _everywhere(profile, lab), "MACHINE": lab.machine, "MODE": mode, "BASE_URL": base_url}
    own = dict(run.parse_parameter(text) for text in param)
    if taken := sorted(set(own) & set(common)):
        options = ", ".join(f"--{name.lower().replace('_', '-')}" for name in taken)
        raise ConfigError(f"--param may not set {', '.join(taken)}.", next_step=f"use the option {options}")
    if mode != "replay" and not base_url:
        engine.check(lab.profile.server)  # bad input ends here, before the first notebook
        model_files.resolve_model(lab.profile.server)
        _ = lab.geometry
    given = common | own
    for path in known:
        run.check_parameters(path, given)
    typer.echo(f"machine {lab.machine}, profile {lab.profile.name}, mode {mode}")
    if mode == "replay":
        stored = ", ".join(name for name in store.machines() if name != measure.PUBLISHED)
        typer.echo(f"stored machines: {stored} (--machine, or MACHINE= with make, chooses)")

    def told(section: str, seconds: float | None) -> None:
        typer.echo(f"  {section:<16} " + ("failed" if seconds is None else f"{seconds:6.1f} s"))

    timings, failures = batch.execute(
        known,
        given,
        BUILD,
        lab.profile.model_dump_json() + json.dumps(own),
        go_on=go_on,
        told=told,
        progress=sys.stderr.isatty(),
    )
    return lab.machine, timings, failures


if __name__ == "__main__":
    app()
