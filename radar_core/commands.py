"""The commands of ``radar``: demo, inspect, doctor and eval."""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from radar_core.evaluation.command import app as evaluation
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
    from radar_core.agent_radar import Chosen
    from radar_core.demo import Demonstration
    from radar_core.doctor import Report
    from radar_core.relevance.score import ScoredSentence
    from radar_core.topology import Topology

__all__ = ["app"]

SHOWN_SENTENCES = 20
SHOWN_CHARACTERS = 300
# Scatter of the demo's timings beyond which its ratios say little.
BUSY = 1.3
_DIRECTION_MARKS = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}

app = typer.Typer(
    name="radar",
    help="Steer a language model's attention to what matters in a long multi-agent conversation.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: rich's takes "[default: ...]" in a text for markup
    pretty_exceptions_enable=False,
)
app.add_typer(evaluation, name="eval")


class OwnMessages(StrEnum):
    """What own and same-round messages count; see `radar_core.relevance.score.Decay`."""

    clamp = "clamp"
    literal = "literal"
    exclude = "exclude"


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"radar {version('radar-kernels')}")
        raise typer.Exit


@app.callback()
def radar(
    context: typer.Context,
    debug: Debug = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    context.obj = debug


@app.command()
def inspect(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="JSON lines, - for stdin: one message a line (sender, text and perhaps round; or "
            "role, name, content), or one conversation a line under messages. A round left out is "
            "counted: the sender's earlier messages, but no round before the latest one given. "
            "Other fields, such as turn, are ignored.",
        ),
    ],
    receiver: Annotated[str, typer.Option(metavar="NAME", help="Agent that reads.")],
    query: Annotated[str, typer.Option(metavar="TEXT", help="What it has to do.")],
    conversation: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Which conversation of the file: its id, or its place from 0 if it has none.",
        ),
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Who talks to whom: a line for each edge, 'a -> b', 'a <-> b' or a chain "
            '\'a -> b -> c\'; or a .json file with a list of pairs, [["a", "b"], ...]. Without '
            "it everybody is one hop apart.",
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="SCORE",
            help="Least score, -1 to 1.",
            show_default="0.65, or none with --top-k",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Choose the best N; without --threshold there is then no least score.",
        ),
    ] = None,
    spatial_decay: Annotated[
        float, typer.Option(metavar="FACTOR", help="Factor per hop, in (0, 1].")
    ] = 0.92,
    temporal_decay: Annotated[
        float, typer.Option(metavar="FACTOR", help="Factor per round, in (0, 1].")
    ] = 0.92,
    self_policy: Annotated[
        OwnMessages,
        typer.Option(
            metavar="POLICY",
            help="How own and same-round messages decay: clamp (not at all), literal (as the "
            "formula says, which raises their score) or exclude (never chosen).",
        ),
    ] = OwnMessages.clamp,
    anchor_query: Annotated[bool, typer.Option(help="Anchor the query too.")] = True,
    encoder: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name or folder of a sentence-transformers model.",
            show_default="the embedded all-MiniLM-L6-v2",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the page here.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show which sentences Radar would choose for an agent, and why."""
    with one_line_errors(context, debug):
        from radar_core.agent_radar import AgentRadar
        from radar_core.topology import Topology
        from radar_core.transcript import Transcript

        if file == Path("-"):
            file = Path("/dev/stdin")
        transcript = Transcript.from_jsonl(file, conversation)
        everybody = dict.fromkeys([*transcript.senders, receiver])
        graph = Topology.from_file(topology) if topology else Topology.complete(everybody)
        selector = AgentRadar(
            graph,
            encoder,
            spatial_decay=spatial_decay,
            temporal_decay=temporal_decay,
            threshold=threshold,
            top_k=top_k,
            anchor_query=anchor_query,
            self_policy=self_policy.value,
        )
        if topology:
            _check_known(transcript.senders, graph, file, topology)
        else:
            _say_what_was_meant(receiver, transcript.senders)
        for message in transcript:
            selector.observe(sender=message.sender, round=message.round, text=message.text)
        _check_writable(html)
        with quiet_libraries(), _status("loading the encoder and embedding the sentences"):
            chosen = selector.select(receiver=receiver, query=query)
        notes = _unheard(graph, transcript.senders, receiver)
        if html is not None:
            from radar_core.page import write_page

            name = file.name if conversation is None else f"{file.name}, {conversation}"
            write_page(html, transcript, graph, chosen, title=f"Radar: {name}", notes=notes)
        if as_json:
            print_json({**_selection(chosen, graph), "notes": notes})
        else:
            _print_selection(chosen, graph, notes)
        _say_where(html)


@app.command()
def demo(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name or folder of a transformers model.",
            show_default="the embedded SmolLM2-135M-Instruct",
        ),
    ] = None,
    device: Device = "cpu",
    dtype: Weights = DType.auto,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Sample the discussion with this seed; the replies are greedy.",
            show_default="none, a greedy discussion",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Length limit of each reply.")
    ] = 48,
    html: Annotated[Path, typer.Option(metavar="FILE", help="Write the page here.")] = Path(
        "radar-demo.html"
    ),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Hold a small discussion, then answer with and without steering."""
    with one_line_errors(context, debug):
        _check_writable(html)
        with quiet_libraries():
            found = _demonstrate(model, device, dtype, seed, max_new_tokens)
            from radar_core.page import write_page

            write_page(
                html,
                found.transcript,
                found.topology,
                found.chosen,
                title="Radar demo",
                notes=[*_findings(found), _FAIR_COSTS],
                replies=_page_replies(found),
            )
        if as_json:
            print_json(_demonstration(found))
        else:
            _print_demonstration(found)
        _say_where(html)


@app.command()
def doctor(context: typer.Context, as_json: Json = False, debug: Debug = False) -> None:
    """Show versions, devices, and the backend of each operator here."""
    with one_line_errors(context, debug):
        from radar_core.doctor import examine

        with quiet_libraries(), _status("asking every operator"):
            report = examine()
        if as_json:
            print_json(report.as_dict())
        else:
            _print_report(report)


# -- what the commands share -----------------------------------------------------------------------


@contextmanager
def _status(what: str) -> Iterator[None]:
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def _check_writable(html: Path | None) -> None:
    """Fail before the work, not after it, where the page has no folder to go to."""
    if html is not None and not html.absolute().parent.is_dir():
        raise ValueError(f"--html: no folder {html.absolute().parent}; create it first")


def _say_where(html: Path | None) -> None:
    if html is not None:
        typer.echo(f"Page: {html}", err=True)


def _plain(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """One line of a conversation's text that cannot control the terminal."""
    line = " ".join(text.split())
    line = "".join(
        "�"
        if unicodedata.category(character) in {"Cc", "Cs"} or ord(character) in _DIRECTION_MARKS
        else character
        for character in line
    )
    return line if len(line) <= most else line[: most - 1] + "…"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Any:
    """A table whose columns align right where their name starts with '>'."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        right = name.startswith(">")
        table.add_column(
            name.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _sentence_rows(sentences: Iterable[ScoredSentence], hops: dict[str, int]) -> list[list[str]]:
    return [
        [
            _plain(item.text),
            _plain(item.sender, 40),
            str(item.round),
            str(hops[item.sender]),
            f"{item.cosine:.3f}",
            f"{item.spatial:.3f}",
            f"{item.temporal:.3f}",
            f"{item.score:.3f}",
        ]
        for item in sentences
    ]


SENTENCE_COLUMNS = (
    "sentence", "sender", ">round", ">hops", ">cosine", ">spatial", ">temporal", ">score",
)  # fmt: skip


def _unheard(graph: Topology, senders: Sequence[str], receiver: str) -> list[str]:
    """Say who is silent and whose messages go nowhere: a name may have been mistyped."""
    notes = []
    if silent := [agent for agent in graph.agents if agent not in senders]:
        names = [repr(agent) + _meant(agent, senders) for agent in silent]
        notes.append(f"not heard in this conversation: {', '.join(names)}.")
    hops = graph.hops_to(receiver)
    if lost := [repr(name) for name in senders if hops[name] < 0]:
        notes.append(
            f"nothing can be chosen of what does not reach {receiver!r} in this topology, the "
            f"messages of {', '.join(lost)}; an edge goes from who speaks to who reads."
        )
    return notes


def _say_what_was_meant(receiver: str, senders: Sequence[str]) -> None:
    """Warn, before anything else is printed, of a receiver that is nearly one of the senders."""
    if receiver not in senders and (meant := _meant(receiver, senders)):
        typer.echo(f"radar: nothing in this conversation is by {receiver!r}{meant}", err=True)


def _check_known(senders: Sequence[str], graph: Topology, file: Path, topology: Path) -> None:
    missing = [sender for sender in senders if sender not in graph.agents]
    if missing:
        names = ", ".join(repr(name) + _meant(name, graph.agents) for name in missing)
        raise ValueError(
            f"{topology} does not know {names}, who speak in {file}; name them in an edge, or "
            "alone on a line if they talk to nobody"
        )


def _meant(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _print_selection(chosen: Chosen, graph: Topology, notes: Sequence[str]) -> None:
    console = new_console()
    hops = graph.hops_to(chosen.receiver)
    if chosen.sentences:
        shown = chosen.sentences[:SHOWN_SENTENCES]
        console.print(_table("Chosen sentences", SENTENCE_COLUMNS, _sentence_rows(shown, hops)))
        if (more := len(chosen) - len(shown)) > 0:
            console.print(f"... and {more} more; --json and --html hold all of them.")
    elif chosen.nearest:
        rows = _sentence_rows(chosen.nearest, hops)
        rows = [
            [*row, f"{item.lacked:.3f}"] for row, item in zip(rows, chosen.nearest, strict=True)
        ]
        title = "Nothing was chosen; the nearest sentences and the score that each lacked"
        console.print(_table(title, (*SENTENCE_COLUMNS, ">lacked"), rows))
    console.print(_plain(chosen.explanation))
    console.print(
        f"{_plain(chosen.receiver)} reads in round {chosen.round}; "
        "score = cosine x spatial x temporal."
    )
    if chosen.sentences and chosen.query_anchored:
        console.print("The query is anchored too.")
    if not chosen.sentences and chosen.nearest and chosen.reachable:
        enough = math.floor(100 * chosen.nearest[0].score) / 100
        console.print(f"To choose some all the same: --top-k 3, or --threshold {enough:.2f}.")
    for note in notes:
        console.print(f"Note: {_plain(note)}")


def _selection(chosen: Chosen, graph: Topology) -> dict[str, Any]:
    hops = graph.hops_to(chosen.receiver)

    def listed(sentences: Iterable[ScoredSentence]) -> list[dict[str, Any]]:
        # The selector is dense here, so a similarity is a cosine.
        return [
            {
                **{
                    name.replace("similarity", "cosine"): value
                    for name, value in item._asdict().items()
                },
                "hops": hops[item.sender],
            }
            for item in sentences
        ]

    return {
        "receiver": chosen.receiver,
        "query": chosen.query,
        "round": chosen.round,
        "threshold": chosen.threshold,
        "top_k": chosen.top_k,
        "query_anchored": chosen.query_anchored,
        "explanation": chosen.explanation,
        "candidates": len(chosen.candidates),
        "chosen": listed(chosen.sentences),
        "nearest": listed(chosen.nearest),
    }


# -- demo ------------------------------------------------------------------------------------------


def _demonstrate(
    model: str | None, device: str, dtype: DType, seed: int | None, max_new_tokens: int
) -> Demonstration:
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    target = chosen_device(device)
    from radar_core import demo, embedded

    with _progress(demo.STEPS + 2) as announce:
        announce("loading the sentence encoder")
        encoder = embedded.load_encoder()
        announce("loading the model")
        weights = chosen_dtype(dtype, target)
        language_model, tokenizer = embedded.load(
            model, dtype=weights, device=target, announce=lambda text: typer.echo(text, err=True)
        )
        return demo.run(
            language_model,
            tokenizer,
            encoder,
            seed=seed,
            max_new_tokens=max_new_tokens,
            announce=announce,
        )


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """Yield what announces each step: a bar on a terminal, a line elsewhere."""
    if not sys.stderr.isatty():
        done = 0

        def line(step: str) -> None:
            nonlocal done
            done += 1
            typer.echo(f"[{done}/{steps}] {step}", err=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (BarColumn(), MofNCompleteColumn(), Elapsed(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=steps, completed=-1)

        def advance(step: str) -> None:
            progress.update(task, advance=1, description=step)

        yield advance


_FAIR_COSTS = (
    "A time below that of the unsteered model is not steering's doing: on a CPU, what is steered "
    "runs on Radar's own operators. What steering itself adds shows beside radar-unsteered, the "
    "same with nothing anchored, in the table of `make benchmark`."
)


def _findings(found: Demonstration) -> list[str]:
    """What a reader has to know before the figures, the failures included."""
    notes = []
    if found.stated_by is None:
        notes.append(
            "The figure that the question asks for was given to the host alone, and the model "
            "never passed it on: no reply can be right except by chance."
        )
    else:
        notes.append(
            f"The figure that the question asks for was given to the host alone; "
            f"{found.stated_by.sender} stated it in round {found.stated_by.round}."
        )
    if found.by_rank:
        notes.append(
            f"No sentence scores {_default_threshold():g}, the paper's threshold, so the "
            f"{len(found.chosen)} best are anchored instead."
        )
    if found.scatter > BUSY:
        notes.append(
            f"The machine was busy: the same step took up to {found.scatter:.1f} times as long "
            "from one time to the next, so the times below say little."
        )
    notes.append(
        f"The speaker's prompt has {found.prompt_tokens} tokens, of which {found.anchor_tokens} "
        f"are anchored: the chosen sentences{' and the question' * found.chosen.query_anchored}."
    )
    return notes


def _default_threshold() -> float:
    from radar_core.agent_radar import DEFAULT_THRESHOLD

    return DEFAULT_THRESHOLD


def _page_replies(found: Demonstration) -> list[Any]:
    from radar_core.demo import ANSWER, ANSWER_STEM
    from radar_core.page import PageReply

    return [
        PageReply(
            outcome.name,
            outcome.reply,
            {
                "States the right figure": "yes" if outcome.correct else "no",
                f"Probability of “{ANSWER.strip()}” after “{ANSWER_STEM}”": (
                    f"{outcome.probability:.1%}"
                ),
                "Attention on the anchors": f"{outcome.mass:.1%}",
                "Time to the first token": f"{outcome.prefill_ratio:.2f}× unsteered",
                "Time per further token": f"{outcome.token_ratio:.2f}× unsteered",
            },
        )
        for outcome in found.outcomes
    ]


def _print_demonstration(found: Demonstration) -> None:
    from radar_core.demo import ANSWER, ANSWER_STEM

    console = new_console()
    messages = [
        [_plain(message.sender), str(message.round), _plain(message.text)]
        for message in found.transcript
    ]
    console.print(_table("The discussion", ("sender", ">round", "message"), messages))
    console.print(f"The speaker is asked: {found.chosen.query}\n")
    hops = found.topology.hops_to(found.chosen.receiver)
    rows = _sentence_rows(found.chosen.sentences or found.chosen.nearest, hops)
    console.print(_table("Chosen sentences", SENTENCE_COLUMNS, rows))
    for note in _findings(found):
        console.print(note)
    replies = [
        [outcome.name, "yes" if outcome.correct else "no", _plain(outcome.reply)]
        for outcome in found.outcomes
    ]
    console.print()
    console.print(_table("The speaker's replies", ("method", "right", "reply"), replies))
    figures = [
        [
            outcome.name,
            f"{outcome.probability:.1%}",
            f"{outcome.mass:.1%}",
            f"{outcome.prefill_ratio:.2f}x",
            f"{outcome.token_ratio:.2f}x",
        ]
        for outcome in found.outcomes
    ]
    columns = ("method", ">P(right answer)", ">attention", ">prefill", ">per token")
    console.print(_table("What steering does and costs", columns, figures))
    base = found.outcomes[0]
    console.print(_FAIR_COSTS)
    console.print(
        f"P(right answer): of “{ANSWER.strip()}” after “{ANSWER_STEM}”. attention: share of the "
        "last prompt token's attention that the anchors get, mean over layers and heads (SPA works "
        "on the output and leaves it). prefill and per token: time over the unsteered model's, "
        f"here {base.prefill_ms:.0f} ms and {base.token_ms:.0f} ms; medians of interleaved runs."
    )


def _demonstration(found: Demonstration) -> dict[str, Any]:
    return {
        "messages": [dataclasses.asdict(message) for message in found.transcript],
        "stated_by": None if found.stated_by is None else dataclasses.asdict(found.stated_by),
        "selection": _selection(found.chosen, found.topology),
        "by_rank": found.by_rank,
        "prompt_tokens": found.prompt_tokens,
        "anchor_tokens": found.anchor_tokens,
        "outcomes": [dataclasses.asdict(outcome) for outcome in found.outcomes],
        "scatter": found.scatter,
    }


# -- doctor ----------------------------------------------------------------------------------------


def _print_report(report: Report) -> None:
    console = new_console()
    versions = [[name, version or "not installed"] for name, version in report.versions.items()]
    console.print(_table("Versions", ("package", "version"), versions))
    machine = [*report.machine.items(), *report.devices.items()]
    console.print(_table("Machine and devices", ("what", "found"), machine))
    operators = []
    for item in report.operators:
        runs = item.runs or "nothing"
        operators.append([item.operator, item.device, runs, item.problem or ""])
        operators += [["", "", f"not {name}", reason] for name, reason in item.others.items()]
    columns = ("operator", "device", "runs on", "why not")
    console.print(_table("Operators", columns, operators))
    console.print(_table("Embedded parts", ("part", "where"), report.embedded.items()))
    settings = [[name, value or "unset"] for name, value in report.settings.items()]
    console.print(_table("Settings", ("environment variable", "value"), settings))
