"""The command line: `flowtune run | validate | suggest | list | schema | engine | runs`.

Nothing heavy is imported before a command needs it: `--help` answers at once, and a mistake is told
before anything is started.

Exit codes: 0 done, 1 a run that failed, 2 a mistake to mend, 3 a run that another process has
taken over, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import os
import shlex
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from backends.errors import FlowtuneError, Problem, UserError

if TYPE_CHECKING:
    from prefect import State
    from pydantic import BaseModel
    from rich.console import Console

    from algorithms.experiment import Experiment
    from algorithms.sections import OneOf
    from algorithms.stages import StagedExperiment
    from flows.prefect_server import PendingServer
    from flows.terminal import Terminal

FAILED, MISTAKE, TAKEN_OVER, INTERRUPTED = 1, 2, 3, 130
DRY_STEPS = 3
DRY_EVALUATION_ROWS = 8
MOST_CAUSE_LINES = 6
WIDTH_OF_FILES = 160

app = typer.Typer(
    name="flowtune",
    help="Post-training pipelines for language models on Prefect.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Config = Annotated[Path, typer.Argument(help="The experiment, a YAML file.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a field: --set algorithm.params.max_steps=50. Repeatable."),
]


def main() -> None:
    """The entry point."""
    app()


# --- run


@app.command()
def run(
    config: Config,
    run_id: Annotated[
        str | None,
        typer.Option(help="Name the run; one that exists is continued, a finished one shown."),
    ] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help=f"Do {DRY_STEPS} steps, show one row, keep nothing."),
    ] = False,
) -> None:
    """Train as an experiment says, with Prefect watching."""
    from flows.prefect_server import as_typed
    from flows.terminal import Terminal

    with Terminal(_console()) as terminal:
        with _mistakes_told():
            terminal.phase("checking the experiment")
            experiment = _checked(config, overrides or [])
            run_id = run_id or f"{experiment.name}-{uuid.uuid4().hex[:8]}"
            finished = None if dry_run else _finished(experiment, run_id)
        again = [as_typed("flowtune"), "run", str(config)]
        again += [part for text in overrides or [] for part in ("--set", text)]
        again += ["--run-id", run_id]
        with _mistakes_told(terminal, "" if dry_run else shlex.join(again)):
            if dry_run:
                for stage in _stages(experiment):
                    _rehearse(stage, terminal)
            elif finished is None:
                _train(experiment, run_id, terminal, shlex.join(again))
            else:
                terminal.close()
                console = terminal.console
                console.print(f"run [bold]{run_id}[/] is finished already; this is its result")
                _closing(console, finished, {})


def _stages(experiment: Experiment | StagedExperiment) -> list[Experiment]:
    """What is trained, one after the other; the weights that a later stage starts from left out."""
    from algorithms.experiment import Experiment

    if isinstance(experiment, Experiment):
        return [experiment]
    return [experiment.experiment(index, None) for index in range(len(experiment.stages))]


def _finished(experiment: Experiment | StagedExperiment, run_id: str) -> dict[str, Any] | None:
    """The result of a run that is complete: there is nothing to start for it.

    Raises UserError if the run was started with another experiment.
    """
    from algorithms.opening import check_continues
    from backends.storage.run_store import RunStore

    store = RunStore(experiment.store, run_id)
    check_continues(store, experiment)
    result = store.read_result()
    return result if result is not None and result["status"] == "completed" else None


def _train(
    experiment: Experiment | StagedExperiment, run_id: str, terminal: Terminal, again: str
) -> None:
    from flows.prefect_server import begin_server, prefect_home
    from flows.terminal import new_log_file, quiet_logging

    pending = begin_server()
    log = new_log_file(prefect_home() / "flowtune-logs", experiment.name)
    quiet_logging(terminal.console, log)
    with _failure_told(terminal, again, log), contextlib.closing(pending):
        if pending.info.started:
            terminal.phase("starting a local Prefect server (half a minute, the first time)")
        else:
            terminal.phase("loading")
        result = asyncio.run(_flow(experiment, run_id, terminal, pending))
    server = pending.info
    assert isinstance(result, dict)  # a state is what a cancelled flow returns
    terminal.close()
    page = terminal.plan.flow_run_url if terminal.plan else None
    links = {"in Prefect": page or server.ui_url, "stop Prefect": server.stop_command}
    _closing(terminal.console, result, links)


async def _flow(
    experiment: Experiment | StagedExperiment,
    run_id: str,
    terminal: Terminal,
    pending: PendingServer,
) -> dict[str, Any] | State[Any]:
    """Run the train flow; the engine and a new server start in their processes as this imports."""
    from backends.embedded import started_early

    first = _stages(experiment)[0]
    module, name = ("flows.train", "train")
    if first is not experiment:
        module, name = ("flows.stages", "train_stages")
    async with started_early(first.backend.params, first.model_spec()):
        flow: Any = getattr(await asyncio.to_thread(import_module, module), name)
        await asyncio.to_thread(pending.wait)
        from prefect import tags
        from prefect.exceptions import CancelledRun, TerminationSignal

        from tasks.session import watch

        terminal.phase("opening the run")
        named = flow.with_options(flow_run_name=run_id)
        with watch(terminal), tags(*experiment.tags):
            try:
                result: dict[str, Any] | State[Any] = await named(experiment, run_id=run_id)
                return result
            except (CancelledRun, TerminationSignal):  # TerminationSignal: before the flow began
                raise KeyboardInterrupt from None


def _closing(console: Console, result: dict[str, Any], links: dict[str, str]) -> None:
    from flows.terminal import print_result

    artifacts = result.get("artifacts", {})
    names = ("adapter", "sampler", "state", "report")
    shown = {name: _near(artifacts[name]) for name in names if name in artifacts}
    early = {"ended early": result.get("ended_early") or ""}
    print_result(console, result, early | shown | links)


def _near(place: str) -> str:
    """A path as seen from the working directory; anything else as it is."""
    with contextlib.suppress(ValueError):
        return str(Path(place).relative_to(Path.cwd()))
    return place


@contextlib.contextmanager
def _failure_told(terminal: Terminal, again: str, log: Path | None) -> Iterator[None]:
    """Turn an error that nobody could mend beforehand into its cause and where to read more."""
    from backends.storage.lease import LeaseLost

    try:
        yield
    except UserError:
        raise
    except LeaseLost as error:
        terminal.close()
        _console(stderr=True).print(
            f"[bold red]taken over:[/] {_plain(str(error))}", soft_wrap=True
        )
        raise typer.Exit(TAKEN_OVER) from None
    except Exception as error:
        import logging

        terminal.close()
        console = _console(stderr=True)
        kind = "" if isinstance(error, FlowtuneError) else f"{type(error).__name__}: "
        cause = f"{kind}{error}".strip().splitlines()
        shown = cause if log is None else cause[:MOST_CAUSE_LINES]
        words = _plain("\n".join(shown))
        console.print(f"[bold red]the run failed:[/] {words}", soft_wrap=True)
        if log is not None:
            logging.getLogger("flowtune").info("the run failed", exc_info=error)
            _tell_how_to_continue(console, terminal, again)
            console.print(f"    the whole log: {log}", soft_wrap=True, markup=False)
        raise typer.Exit(FAILED) from None


def _tell_how_to_continue(console: Console, terminal: Terminal, again: str) -> None:
    if terminal.plan is None or not again:
        return
    kept = (
        f"the checkpoint after step {terminal.saved_step} is kept"
        if terminal.saved_step
        else "no checkpoint yet"
    )
    console.print(
        f"    {kept}; to go on: {_plain(again)}",
        soft_wrap=True,
        highlight=False,
    )


def _rehearse(experiment: Experiment, terminal: Terminal) -> None:
    """Three steps through every part but Prefect's server, in a folder that goes away again."""
    from flows.terminal import quiet_logging

    quiet_logging(terminal.console, None)
    terminal.phase("opening the run")
    with (
        _failure_told(terminal, "", None),
        tempfile.TemporaryDirectory(prefix="flowtune-dry-run-") as store,
    ):
        asyncio.run(_three_steps(_shortened(experiment, store), terminal))
    terminal.close()
    terminal.console.print(f"{DRY_STEPS} steps done; nothing was kept")


async def _three_steps(experiment: Experiment, terminal: Terminal) -> None:
    from algorithms.base import OwnLoop
    from algorithms.opening import open_live_run
    from backends.storage.run_store import RunStore
    from flows.terminal import print_example, print_transcript

    run = await open_live_run(experiment, RunStore(experiment.store, "dry-run"), None)
    try:
        run.callbacks.append(terminal)
        terminal.close()
        if not isinstance(run.algorithm, OwnLoop):  # another library builds those batches
            batch = await run.algorithm.build_batch(0)
            for transcript in batch.transcripts[:1]:
                print_transcript(terminal.console, transcript)
            if batch.data:
                print_example(terminal.console, *_first_row(batch, run.backend.get_tokenizer()))
        terminal.on_start(run.plan)
        await run.run_segment(run, 0, run.plan.total_steps)
        await run.settle()
    finally:
        await run.cancel()
        await run.backend.aclose()


def _shortened(experiment: Experiment, store: str) -> Experiment:
    params = experiment.algorithm.params
    few = {"max_steps": DRY_STEPS, "save_every": None, "save_at_fractions": None}
    algorithm = experiment.algorithm.model_copy(update={"params": params.model_copy(update=few)})
    evaluations = [
        spec.model_copy(
            update={"limit": min(spec.limit or DRY_EVALUATION_ROWS, DRY_EVALUATION_ROWS)}
        )
        for spec in experiment.evaluations
    ]
    return experiment.model_copy(
        update={"store": store, "algorithm": algorithm, "evaluations": evaluations}
    )


def _first_row(batch: Any, tokenizer: Any) -> tuple[list[tuple[str, bool]], int]:
    """The batch's first datum as spans of (text, has loss), and how many tokens have loss."""
    from algorithms.data.rendering import render_colored

    datum = batch.data[0]
    inputs = datum.model_input.to_ints()
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    name = "weights" if "weights" in datum.loss_fn_inputs else "advantages"
    weights = datum.loss_fn_inputs[name].to_numpy()
    if targets.ndim == 2:  # soft targets [N, K]: what was said, and at its end the likeliest
        last = int(targets[-1, weights[-1].argmax()])
        targets, weights = [*inputs[1:], last], weights.any(axis=1)
    tokens = [inputs[0], *map(int, targets)]
    mask = [False, *(bool(weight != 0) for weight in weights)]
    return render_colored(tokens, mask, tokenizer), sum(mask)


# --- the other commands


@app.command()
def validate(
    config: Config,
    overrides: Overrides = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it in one line, every default filled in.")
    ] = False,
    price: Annotated[
        float | None,
        typer.Option(
            "--price-per-million",
            min=0,
            help="What a million trained tokens cost; else FLOWTUNE_PRICES names a YAML of prices.",
        ),
    ] = None,
) -> None:
    """Find every mistake in an experiment, and estimate what it takes; nothing is started."""
    with _mistakes_told():
        experiment = _checked(config, overrides or [])
        if as_json:
            print(experiment.model_dump_json())
            return
        from algorithms.estimate import estimate
        from algorithms.experiment import Experiment
        from flows.figures import price_per_million, print_estimate, print_stages

        price = price_per_million(experiment.model.name, price)
        taken = [estimate(stage) for stage in _stages(experiment)]
    console = _console()
    console.print(f"[green]{experiment.name} is in order[/]")
    if isinstance(experiment, Experiment):
        print_estimate(console, taken[0], price)
    else:
        names = [stage.name for stage in experiment.stages]
        print_stages(console, dict(zip(names, taken, strict=True)), price)


@app.command()
def suggest(
    model: Annotated[str, typer.Argument(help="A model folder or hub name.")],
    rows: Annotated[
        int | None, typer.Option(min=1, help="How many rows you have, to fit the batch size.")
    ] = None,
) -> None:
    """Suggest a learning rate and a batch size to start a LoRA run from, and say by which rule."""
    from algorithms.suggestion import suggest as suggestion_for
    from flows.figures import print_suggestion

    with _mistakes_told():
        found = suggestion_for(model, rows)
    print_suggestion(_console(), model, found)


@app.command(name="list")
def list_kinds() -> None:
    """List what an experiment can name: algorithms, backends, data, transforms, verifiers, …"""
    from rich.table import Table

    from algorithms.registry import listings

    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    for head in ("", "kind", "what it is", "from"):
        table.add_column(head)
    group = ""
    for line in listings():
        first, group = ("" if line.group == group else line.group), line.group
        summary = f"[red]{_plain(line.error)}[/]" if line.error else _plain(line.summary)
        table.add_row(first, line.kind, summary, line.origin)
    _console().print(table)


@app.command()
def schema(
    kind: Annotated[
        str | None, typer.Argument(help="algorithm, data, transform, …; or stages")
    ] = None,
    name: Annotated[str | None, typer.Argument(help="Which one, as `flowtune list` says.")] = None,
) -> None:
    """Print the JSON schema of an experiment, of one in stages, or of the parameters of a kind."""
    with _mistakes_told():
        print(json.dumps(_schema(kind, name), indent=2))


@app.command()
def engine(
    base_model: Annotated[str, typer.Option(help="A model folder or hub name.")],
    store: Annotated[str, typer.Option(help="Where checkpoints are kept: a folder or s3://…")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    host: Annotated[str, typer.Option(help="Loopback unless you say otherwise.")] = "127.0.0.1",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="FLOWTUNE_ENGINE_API_KEY", help="Clients must bring it; begins with tml-."
        ),
    ] = None,
    session_timeout: Annotated[
        float,
        typer.Option(help="Seconds without a sign of life until a client's models are unloaded."),
    ] = 120.0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps; found by itself.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Serve a model to any client of the Tinker protocol."""
    import logging

    from backends.engine.server import EngineOptions, serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    chosen = {"device": device, "dtype": dtype, "threads": threads}
    compute = {name: value for name, value in chosen.items() if value is not None}
    options = EngineOptions(
        base_model,
        store,
        host,
        port,
        api_key,
        session_seconds=session_timeout,
        compute=compute,
    )
    with _mistakes_told():
        serve(options)


@app.command()
def runs(
    store: Annotated[str, typer.Argument(help="A folder, or s3://bucket/prefix.")] = "runs",
) -> None:
    """List the runs in a store, with status and score."""
    with _mistakes_told():
        from backends.storage.run_store import list_runs

        found = list_runs(store)
    from flows.terminal import runs_table

    console = _console()
    console.print(runs_table(found) if found else f"no runs in {_plain(store)}")


# --- shared


def _checked(config: Path, overrides: list[str]) -> Experiment | StagedExperiment:
    from algorithms.check import check_experiment
    from algorithms.stages import check_stages, has_stages

    check: Any = check_stages if has_stages(config, overrides) else check_experiment
    experiment: Experiment | StagedExperiment | None
    experiment, problems = check(config, overrides)
    if experiment is None or problems:
        raise UserError(*problems)
    return experiment


def _schema(kind: str | None, name: str | None) -> dict[str, Any]:
    from algorithms import experiment as document
    from algorithms.data.transforms import TransformField
    from algorithms.rewards.section import VerifierField
    from algorithms.rollouts.environment import EnvironmentField
    from algorithms.stages import StagedExperiment

    if kind is None:
        return document.Experiment.model_json_schema()
    if kind == "stages":
        if name is not None:
            raise UserError(Problem(kind, f"takes no name, such as {name!r}", "leave it out"))
        return StagedExperiment.model_json_schema()
    fields = {
        "algorithm": document.AlgorithmField,
        "backend": document.BackendField,
        "data": document.DataField,
        "transform": TransformField,
        "verifier": VerifierField,
        "environment": EnvironmentField,
        "callback": document.CallbackField,
    }
    field = fields.get(kind.removesuffix("s"))
    if field is None:
        known = [*fields, "stages"]
        raise UserError(Problem(kind, "is not a part of an experiment", _choose(kind, known)))
    one_of: OneOf = get_args(field)[1]
    members = one_of.members()
    if name not in members:
        what = f"there is no {kind} {name!r}" if name else "which one?"
        raise UserError(Problem(kind, what, _choose(name or "", members)))
    section = members[name]
    params = section.model_fields.get("params")
    model: type[BaseModel] = section if params is None else params.annotation  # type: ignore[assignment]
    return model.model_json_schema()


def _choose(name: str, known: Iterable[str]) -> str:
    listed = ", ".join(sorted(known))
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}? ({listed})" if near else f"choose from {listed}"


@contextlib.contextmanager
def _mistakes_told(terminal: Terminal | None = None, again: str = "") -> Iterator[None]:
    """Turn what a person can mend, and an interruption, into words and an exit code.

    With a terminal, its run may have been opened: then say how to continue it.
    """
    try:
        yield
        return
    except UserError as error:
        problems, code = error.problems, MISTAKE
    except (KeyboardInterrupt, asyncio.CancelledError):
        problems, code = (), INTERRUPTED
    from flows.terminal import print_problems

    if terminal is not None:
        terminal.close()
    console = _console(stderr=True)
    if problems:
        print_problems(console, problems, nothing_done=terminal is None)
    else:
        console.print("interrupted")
    if terminal is not None:
        _tell_how_to_continue(console, terminal, again)
    raise typer.Exit(code)


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH_OF_FILES
    return console


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    main()
