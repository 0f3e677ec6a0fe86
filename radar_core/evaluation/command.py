"""``radar eval``: experiments by name, run on data files and reported from what they wrote."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from radar_core.evaluation import report as reports
from radar_core.evaluation import runs
from radar_core.terminal import (
    Debug,
    Device,
    DType,
    Json,
    Weights,
    chosen_device,
    chosen_dtype,
    new_console,
    one_line_errors,
    print_json,
    quiet_libraries,
)

if TYPE_CHECKING:
    from radar_core.evaluation.experiment import Experiment, Summary

__all__ = ["EXPERIMENTS", "Arguments", "Loaded", "app"]

# By name: the module, which has `build(arguments) -> Experiment` and may have
# `summarise(rows, seed) -> Summary`, and the question that it answers.
EXPERIMENTS = {
    "evidence": (
        "radar_core.evaluation.evidence",
        "Does steering move the model towards the evidence?",
    ),
    "selection": ("radar_core.evaluation.selection", "Does the selector find the evidence?"),
    "discussion": ("radar_core.evaluation.discussions", "Do the policies help a discussion?"),
    "dacs": ("radar_core.evaluation.dacs", "Does DACS keep an orchestrator's context in focus?"),
}
SMOLLM2 = "smollm2"
RESULTS = Path("results")
INTERRUPTED = 130
# Of a table of arms, where the output is no terminal.
WIDTH = 160

app = typer.Typer(
    help="Run an experiment on data and report it with intervals; what is interrupted goes on.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Loaded(NamedTuple):
    """What takes long to load.

    Args:
        model: a transformers causal language model in evaluation mode.
        tokenizer: its tokenizer.
        encoder: the sentence encoder.
    """

    model: Any
    tokenizer: Any
    encoder: Any


@dataclass(frozen=True)
class Arguments:
    """What an experiment is built from.

    An experiment looks at its data and options before it takes the model, so that a mistake in them
    is told at once.

    Args:
        load: loads the model, its tokenizer and the encoder; called once, when one is first taken.
        data: the data files.
        limit: measure at most this many items of each file; None for all.
        seed: of everything that is drawn.
        options: the experiment's own options, by name.
    """

    load: Callable[[], Loaded]
    data: Sequence[Path] = ()
    limit: int | None = None
    seed: int = 0
    options: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def loaded(self) -> Loaded:
        """The model and what belongs to it."""
        return self.load()

    def options_over(self, defaults: Mapping[str, str]) -> dict[str, str]:
        """Return the options, those that were not given as they are by default.

        Args:
            defaults: every option that the experiment knows.

        Raises:
            ValueError: an option was given that it does not know.
        """
        if unknown := self.options.keys() - defaults.keys():
            known = ", ".join(f"{name}={value}" for name, value in defaults.items())
            raise ValueError(
                f"--set: no option {', '.join(sorted(unknown))}; expected one of these, here with "
                f"their defaults: {known or 'none, this experiment has no options'}"
            )
        return {**defaults, **self.options}


def _register(name: str, question: str) -> None:
    @app.command(name, help=question)
    def run(
        context: typer.Context,
        data: Annotated[
            list[Path] | None,
            typer.Option(metavar="FILE", help="Data, JSON lines; several are measured together."),
        ] = None,
        model: Annotated[
            str,
            typer.Option(
                metavar="NAME",
                help="smollm2 (the embedded one), a folder, a name on the hub or a .gguf file.",
            ),
        ] = SMOLLM2,
        dtype: Weights = DType.auto,
        device: Device = "cpu",
        limit: Annotated[
            int | None,
            typer.Option(
                metavar="N", min=1, help="The first N items of each file.", show_default="all"
            ),
        ] = None,
        seed: Annotated[int, typer.Option(metavar="N", help="Of everything that is drawn.")] = 0,
        out: Annotated[
            Path | None,
            typer.Option(
                metavar="DIR",
                help="Folder of the run; one that holds an unfinished run goes on.",
                show_default="a folder in results/ named after all that the results depend on",
            ),
        ] = None,
        settings: Annotated[
            list[str] | None,
            typer.Option(
                "--set",
                metavar="NAME=VALUE",
                help="An option of this experiment; an unknown name lists all there are.",
            ),
        ] = None,
        fresh: Annotated[
            bool, typer.Option("--fresh", help="Throw away what the folder holds of a run.")
        ] = False,
        as_json: Json = False,
        debug: Debug = False,
    ) -> None:
        with one_line_errors(context, debug):
            files, options = _checked_files(data or []), _options(settings or [])
            with quiet_libraries():
                experiment, header = _built(name, files, model, dtype, device, limit, seed, options)
                folder = out or RESULTS / f"{name}-{_slug(header.model['name'])}-{header.digest}"
                typer.echo(f"Run: {folder}", err=True)
                outcome = runs.execute(experiment, folder, header, fresh=fresh)
                if outcome.rows:
                    items = len({row["item"] for row in outcome.rows})
                    summary = experiment.summarise(outcome.rows)
                    _report(summary, header, items, folder, as_json)
        if outcome.interrupted:
            typer.echo(
                f"Stopped after {outcome.done} of {outcome.total} items, which are kept. To go "
                f"on: {_command(context)}",
                err=True,
            )
            raise typer.Exit(INTERRUPTED)


for _name, (_, _question) in EXPERIMENTS.items():
    _register(_name, _question)


@app.command("report")
def report(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Report a run again from its rows, finished or not."""
    with one_line_errors(context, debug):
        header, rows, items = runs.read(folder)
        if not rows:
            raise ValueError(f"no item of the run in {folder} is done yet")
        _report(_summary_again(header, rows, folder), header, items, folder, as_json)


# -- steps -----------------------------------------------------------------------------------------


def _built(
    name: str,
    files: Sequence[Path],
    model_name: str,
    dtype: DType,
    device: str,
    limit: int | None,
    seed: int,
    options: Mapping[str, str],
) -> tuple[Experiment, runs.Header]:
    """Build an experiment, and load what it needs."""
    module = _module(name)
    target = chosen_device(device)
    from radar_core import embedded

    def announce(text: str) -> None:
        typer.echo(text, err=True)

    def load() -> Loaded:
        model, tokenizer = embedded.load(
            None if model_name == SMOLLM2 else model_name,
            dtype=chosen_dtype(dtype, target),
            device=target,
            announce=announce,
        )
        return Loaded(model, tokenizer, embedded.load_encoder(device=target))

    arguments = Arguments(load, files, limit, seed, options)
    experiment = module.build(arguments)
    model = arguments.loaded.model
    header = runs.Header(
        experiment.name,
        experiment.settings,
        {
            "name": _short_name(model_name),
            "fingerprint": _fingerprint(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": target.type,
            "encoder": embedded.ENCODER_NAME,
        },
        seed,
        _digests(files),
        runs.versions(),
        runs.machine(),
    )
    return experiment, header


def _module(name: str) -> Any:
    """Import an experiment's module.

    Raises:
        ValueError: this installation does not have it.
        ImportError: it needs a package that is not installed.
    """
    path = EXPERIMENTS[name][0]
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name == path:
            raise ValueError(
                f"the experiment {name!r} is not part of this installation: there is no {path}"
            ) from None
        raise ImportError(
            f"the experiment {name!r} needs the package {error.name}; "
            'run: pip install "radar-kernels[eval]"'
        ) from None


def _summary_again(header: runs.Header, rows: Sequence[Mapping[str, Any]], folder: Path) -> Summary:
    """Summarise rows without the model; where an experiment cannot, read what it said last."""
    if header.name not in EXPERIMENTS:
        raise ValueError(
            f"{folder} is a run of {header.name!r}; this version knows {', '.join(EXPERIMENTS)}"
        )
    summarise = getattr(_module(header.name), "summarise", None)
    if summarise is None:
        typer.echo(f"As it was when the run last ended, from {reports.SUMMARY}:", err=True)
        return reports.load(folder)
    if "seed" in inspect.signature(summarise).parameters:
        return summarise(rows, seed=header.seed)
    return summarise(rows)


def _report(summary: Summary, header: runs.Header, items: int, folder: Path, as_json: bool) -> None:
    written = reports.write(folder, summary, header, items)
    if as_json:
        print_json(reports.as_dict(summary, header, items))
    else:
        reports.print_summary(new_console(WIDTH), summary, items)
    typer.echo(f"Written: {', '.join(map(str, written))}", err=True)


# -- what was typed --------------------------------------------------------------------------------


def _checked_files(files: Sequence[Path]) -> list[Path]:
    for path in files:
        if not path.is_file():
            raise ValueError(f"--data: no file {path}")
    return list(files)


def _options(pairs: Sequence[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"--set is {pair!r}; expected NAME=VALUE, such as top_k=5")
        if name.strip() in options:
            raise ValueError(f"--set gives {name.strip()!r} twice")
        options[name.strip()] = value.strip()
    return options


def _command(context: typer.Context) -> str:
    """Return the command as it was typed, less what would throw away its results."""
    words = context.command_path.split()
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if option.name in ("fresh", "debug") or value in (None, option.default, [], ()):
            continue
        if value is True:
            words.append(option.opts[0])
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [option.opts[0], str(one)]
    return shlex.join(words)


def _short_name(model: str) -> str:
    """Return what a report calls a model: no folder of this machine, but for the last."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    if path.is_dir():
        return "/".join(path.resolve().parts[-2:])
    return model


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.").lower()


def _digests(files: Sequence[Path]) -> dict[str, str]:
    names = Counter(path.name for path in files)
    return {
        path.name if names[path.name] == 1 else str(path): runs.file_digest(path) for path in files
    }


def _fingerprint(model: Any) -> str:
    """Return what tells models apart that go by the same name: a digest of some of each weight."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        some = weight.flatten()[:64].float().cpu()
        digest.update(name.encode() + some.numpy().tobytes())
    return digest.hexdigest()[:16]
