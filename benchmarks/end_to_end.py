"""What steering costs: whole replies of a small real model, prefill and time per token.

    python -m benchmarks.end_to_end --json results/end_to_end.json
    python -m benchmarks.end_to_end --grid --growth results/growth.png

Every contender runs `model.generate` (greedy, a fixed number of tokens) on the same prompt of an
exact length, 5 % of whose tokens are anchored in four runs. "prefill" is the time from the call to
the first token, "step" the time between later tokens. All contenders, dtypes and positions of one
prompt length are timed in turn, round after round; the first position has every contender, the
others those that Radar's bars are about. Unsteered contenders do not see anchors, so one
measurement of theirs serves every position. What a bias adds is less than the machine drifts within
a round: there a biased reply and one with nothing anchored follow each other, each first as often,
and the ratio is the median over these pairs, with a bootstrap interval.

`--grid` goes through batches of 1, 4 and 16 and prompts of 512 to 8,192 tokens on random weights of
Qwen2.5-0.5B's shape, in bfloat16, in twenty minutes on two cores with AMX and in more than an hour
without: fewer rounds where there are many tokens, and none where there are too many, which is said.
What is measured is written as it comes.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, peers
from benchmarks.bars import MOST_ADDED, Bar, Work, bars
from benchmarks.checks import Oracle, Trace, Verdict, judge, judge_anchoring, trace
from benchmarks.contenders import Case, Contender, Target, contenders, generate
from benchmarks.discussion import build_prompts, place_anchors, random_prompt
from benchmarks.models import QWEN, SHAPES, Loaded, load
from benchmarks.report import (
    console,
    plot_ratios,
    plot_steps,
    print_machine,
    print_rows,
    print_table,
    progress,
)
from benchmarks.rows import Label, Row, timed, untimed, write_json
from benchmarks.timing import (
    Measurement,
    TokenClock,
    interleave,
    median_interval,
    paired_ratios,
    summarise,
)

BENCHMARK = "end_to_end"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PHASES = ("prefill", "step")
CHECKED_STEPS = 8
EVERYWHERE = ("unsteered", "radar-unsteered", "radar-bias", "radar-spa")
# Who run side by side: what a bias adds is less than what a machine drifts within a round.
TWINS = ("radar-unsteered", "radar-bias")
# Prompts times tokens up to which every round is run; beyond, as many fewer, one at least.
ALL_ROUNDS_UP_TO = 2048


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        prompts: lengths in tokens.
        dtypes: "bf16", "fp32".
        positions: of the first anchor, as fractions of the prompt; the first has all contenders.
        tokens: new tokens a reply.
        repeats: rounds, where there are few tokens.
        model: a transformers model name or folder, one of `models.SHAPES`, or None for the embedded
            SmolLM2-135M-Instruct.
        only: providers to run; empty for all.
        batches: prompts at once.
        most_tokens: what prompts at once and their tokens may come to, multiplied.
        pairs: replies a round of each of `TWINS`, side by side, where all contenders run.
    """

    prompts: Sequence[int] = (512, 1024, 2048)
    dtypes: Sequence[str] = ("bf16", "fp32")
    positions: Sequence[float] = (0.5, 0.05, 0.9)
    tokens: int = 24
    repeats: int = 6
    model: str | None = None
    only: Sequence[str] = ()
    batches: Sequence[int] = (1,)
    most_tokens: int = 32768
    pairs: int = 4

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ValueError(f"tokens is {self.tokens}; expected at least 2, to time a step")
        if self.pairs < 0:
            raise ValueError(f"pairs is {self.pairs}; expected 0 or more")
        if self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats}; expected at least 1")
        if unknown := set(self.dtypes) - set(DTYPES):
            raise ValueError(f"dtypes has {sorted(unknown)}; expected some of {sorted(DTYPES)}")
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"batches is {self.batches}; expected numbers from 1 on")
        if not self.sizes:
            raise ValueError(
                f"most_tokens is {self.most_tokens}, but the smallest work has "
                f"{min(self.prompts) * min(self.batches)} tokens; expected at least that"
            )

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The prompts' lengths and how many are answered at once, without what is too large."""
        return [size for size in self._all_sizes() if size[0] * size[1] <= self.most_tokens]

    @property
    def too_large(self) -> list[tuple[int, int]]:
        """The lengths and batches that are skipped."""
        return [size for size in self._all_sizes() if size[0] * size[1] > self.most_tokens]

    def _all_sizes(self) -> list[tuple[int, int]]:
        return list(product(self.prompts, self.batches))

    def rounds(self, tokens: int, batch: int) -> int:
        """Return how many rounds prompts of a length are timed for."""
        fewer = round(self.repeats * ALL_ROUNDS_UP_TO / (tokens * batch))
        return min(self.repeats, max(fewer, 1))


# What `--grid` measures where nothing else is asked for.
GRID = Settings(
    prompts=(512, 1024, 2048, 4096, 8192),
    dtypes=("bf16",),
    positions=(0.5,),
    tokens=8,
    repeats=3,
    model=QWEN,
    batches=(1, 4, 16),
    most_tokens=8192,
    pairs=0,
)

# By work, dtype and provider; one that does not see anchors has one for every position.
SampleKey = tuple[str, str, str]
# By work, dtype and phase: the ratio of `TWINS` in each pair of replies.
Pairs = dict[tuple[str, str, str], list[float]]


Announce = Callable[[str], None]
Advance = Callable[[], None]
Keep = Callable[[Sequence[Row]], None]


@dataclass
class Plan:
    """The work that there is, and who does it.

    Args:
        settings: what to measure.
        providers: who competes, each after its twin.
        groups: for each length and batch its cases: every position and dtype.
        left_out: why contenders do not take part in some work, or in any: reason by provider.
    """

    settings: Settings
    providers: Mapping[str, Contender]
    groups: dict[tuple[int, int], list[Case]]
    left_out: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, providers: Mapping[str, Contender]) -> Plan:
        """Load the models and lay out the work."""
        models = {dtype: load(settings.model, DTYPES[dtype]) for dtype in settings.dtypes}
        groups = {size: _cases(settings, models, *size) for size in settings.sizes}
        plan = cls(settings, providers, groups)
        for case in (case for cases in groups.values() for case in cases):
            for name, contender in providers.items():
                reason = contender.cannot(case)
                if reason is not None and reason not in plan.left_out.setdefault(name, []):
                    plan.left_out[name].append(reason)
        return plan

    def names(self, case: Case) -> list[str]:
        """Return who does a piece of work."""
        return [
            name
            for name, contender in self.providers.items()
            if (case.everyone or name in EVERYWHERE) and contender.cannot(case) is None
        ]

    def replies(self, case: Case, name: str) -> int:
        """Return how many replies a round somebody gives."""
        return max(self.settings.pairs, 1) if case.everyone and name in TWINS else 1

    @property
    def steps(self) -> int:
        """How often `run` will call `advance` if every contender is right."""
        steps = 0
        for size, cases in self.groups.items():
            for case in cases:
                for name in self.names(case):
                    steps += 1
                    if case.everyone or _sees(self.providers[name]):
                        steps += self.settings.rounds(*size) * self.replies(case, name)
        return steps


@torch.inference_mode()
def run(
    plan: Plan,
    read_gb_s: float,
    announce: Announce = lambda text: None,
    advance: Advance = lambda: None,
    keep: Keep = lambda rows: None,
) -> tuple[list[Row], list[Work], Pairs]:
    """Check every contender, then time the ones that were right.

    Args:
        plan: what to measure, and who takes part.
        read_gb_s: measured read bandwidth, for the floors.
        announce: told what is being done.
        advance: called after every check and every reply; see `Plan.steps`.
        keep: given all rows so far whenever a length and batch is done.

    Returns:
        The rows, in the order of prompts, positions, dtypes and providers, the pieces of work, and
        the ratios of `TWINS` side by side.
    """
    settings, providers = plan.settings, plan.providers
    oracles: dict[str, Oracle] = {}
    rows: list[Row] = []
    works: list[Work] = []
    paired: Pairs = {}
    for (tokens, batch), cases in plan.groups.items():
        verdicts: dict[tuple[str, str, str], Verdict] = {}
        for case in cases:
            announce(f"checking {case.work} {case.dtype}")
            if case.dtype not in oracles:
                oracles[case.dtype] = Oracle.of(case.model)
            names = plan.names(case)
            judged = _check(case, {n: providers[n] for n in names}, oracles[case.dtype], advance)
            verdicts |= {(case.work, case.dtype, name): v for name, v in judged.items()}
        announce(f"timing {batch} prompts of {tokens} tokens")
        samples, found = _time(plan, cases, verdicts, settings.rounds(tokens, batch), advance)
        paired |= found
        for case in cases:
            for name in plan.names(case):
                verdict = verdicts[case.work, case.dtype, name]
                rows += _rows(case, name, providers[name], verdict, samples, read_gb_s, settings)
        works += _works(cases, settings)
        keep(rows)
    return rows, works, paired


def _cases(settings: Settings, models: Mapping[str, Loaded], tokens: int, batch: int) -> list[Case]:
    cases = []
    at_once = f" batch={batch}" if batch > 1 else ""
    for position in settings.positions:
        for dtype, (model, tokenizer, label) in models.items():
            prompt = (
                random_prompt(model.config.vocab_size, tokens, batch)
                if tokenizer is None
                else build_prompts(tokenizer, tokens, batch)
            )
            anchors = place_anchors(prompt, position)
            work = f"{label} prompt={tokens}{at_once} anchors@{position:.0%}"
            everyone = position == settings.positions[0]
            cases.append(Case(model, tokenizer, prompt, anchors, dtype, work, everyone))
    return cases


def _works(cases: Sequence[Case], settings: Settings) -> list[Work]:
    works: dict[str, Work] = {}
    for case in cases:
        prompt, share = case.prompt.tokens, case.share_after_first_anchor
        shaped = settings.model in SHAPES
        work = works.setdefault(case.work, Work(case.work, prompt, share, case.batch, shaped))
        rows = case.batch * (prompt + settings.tokens)
        work.second_branch[case.dtype] = rows * bytes_per_token(case.model)
    return list(works.values())


def _sees(contender: Contender) -> bool:
    return contender.target is None or contender.target.is_steered


def _check(
    case: Case, providers: Mapping[str, Contender], oracle: Oracle, advance: Advance
) -> dict[str, Verdict]:
    verdicts: dict[str, Verdict] = {}
    right: dict[str, Trace] = {}
    plain = trace(Contender(generate, Target()), case, CHECKED_STEPS)
    for name, contender in providers.items():
        try:
            if contender.target is None:
                verdicts[name] = judge_anchoring(contender, case, CHECKED_STEPS)
            else:
                found = trace(contender, case, CHECKED_STEPS)
                verdicts[name] = judge(contender, case, found, oracle, right, plain)
                if verdicts[name].right:
                    right[name] = found
        # A contender that raises is one with a wrong result: the others are still measured.
        except Exception as error:
            verdicts[name] = Verdict(False, f"{type(error).__name__}: {error}")
        advance()
    return verdicts


def _time(
    plan: Plan,
    cases: Sequence[Case],
    verdicts: Mapping[tuple[str, str, str], Verdict],
    rounds: int,
    advance: Advance,
) -> tuple[dict[SampleKey, dict[str, list[float]]], Pairs]:
    """Time everybody; return the samples and the ratios of `TWINS`."""
    turns: dict[tuple[SampleKey, int], Measurement] = {}
    twins: dict[tuple[str, str], tuple[SampleKey, SampleKey]] = {}
    pairs = range(plan.settings.pairs)
    for case in cases:
        right = [name for name in plan.names(case) if verdicts[case.work, case.dtype, name].right]
        keys = {name: _sample_key(case, name, plan.providers[name]) for name in right}
        for name, key in keys.items():
            if (key, 0) not in turns:
                measurement = _measurement(plan.providers[name], case, plan.settings.tokens)
                turns |= {(key, i): measurement for i in range(plan.replies(case, name))}
        if case.everyone and set(TWINS) <= keys.keys() and pairs:
            twins[case.work, case.dtype] = keys[TWINS[0]], keys[TWINS[1]]
    # Each twin goes first as often as the other.
    together = [
        [(key, i) for i in pairs for key in (both if i % 2 else reversed(both))]
        for both in twins.values()
    ]
    found = interleave(turns, rounds, advance, together=together)
    paired = {
        (work, dtype, phase): paired_ratios(
            [found[steered, i][phase] for i in pairs],
            [found[plain, i][phase] for i in pairs],
            rounds,
        )
        for (work, dtype), (plain, steered) in twins.items()
        for phase in PHASES
    }
    samples: dict[SampleKey, dict[str, list[float]]] = {}
    for (key, _), phases in found.items():
        for phase, seconds in phases.items():
            samples.setdefault(key, {}).setdefault(phase, []).extend(seconds)
    return samples, paired


def _sample_key(case: Case, name: str, contender: Contender) -> SampleKey:
    work = case.work if _sees(contender) else f"{case.prompt.tokens} {case.batch}"
    return work, case.dtype, name


def _measurement(contender: Contender, case: Case, tokens: int) -> Measurement:
    def measure() -> Mapping[str, list[float]]:
        clock = TokenClock()
        contender.generate(case, max_new_tokens=tokens, streamer=clock)
        return clock.phases

    return measure


def _rows(
    case: Case,
    name: str,
    contender: Contender,
    verdict: Verdict,
    samples: Mapping[SampleKey, Mapping[str, list[float]]],
    read_gb_s: float,
    settings: Settings,
) -> list[Row]:
    rows = []
    for phase in PHASES:
        label = Label(BENCHMARK, case.work, case.dtype, name, phase)
        if not verdict.right:
            rows.append(untimed(label, verdict.text))
            continue
        summary = summarise(samples[_sample_key(case, name, contender)][phase])
        floor = _step_floor_ms(case, contender, read_gb_s, settings.tokens)
        rows.append(timed(label, summary, floor if phase == "step" else None, verdict.text))
    return rows


def _step_floor_ms(case: Case, contender: Contender, read_gb_s: float, tokens: int) -> float:
    """Bytes one step must read, once each, over the read bandwidth.

    All weights but the input embedding (one row of it, unless it is tied to the output), and the
    keys and values half-way through the reply. Two branches share the weights and the keys and
    values before the first anchor.
    """
    embedding = case.model.get_input_embeddings().weight
    tied = embedding is case.model.get_output_embeddings().weight
    weights = sum(p.numel() for p in case.model.parameters()) - (0 if tied else embedding.numel())
    keys = case.prompt.tokens + tokens / 2
    if contender.target is None or contender.target.strength != 1.0:
        keys += case.prompt.tokens * case.share_after_first_anchor + tokens / 2
    read = weights * embedding.element_size() + case.batch * keys * bytes_per_token(case.model)
    return read / read_gb_s / 1e6


def bytes_per_token(model: Any) -> int:
    """Return what one token takes in a cache, keys and values of all layers."""
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * head
    return elements * model.get_input_embeddings().weight.element_size()


def _print_left_out(out: Any, plan: Plan) -> None:
    """Print, once each, who does not take part in what, and which work is skipped."""
    reasons = {name: [reason] for name, reason in peers.absent().items()} | plan.left_out
    for name, texts in reasons.items():
        out.print(f"{name} is left out: {'; '.join(texts)}", markup=False, highlight=False)
    skipped = [f"{batch} x {tokens}" for tokens, batch in plan.settings.too_large]
    if skipped:
        most = plan.settings.most_tokens
        out.print(f"skipped, more than {most} tokens together: {', '.join(skipped)}")


def _print_caches(out: Any, works: Sequence[Work]) -> None:
    out.print("\nwhat SPA's second branch adds to the cache:")
    for work in works:
        texts = (f"{size / 2**20:.0f} MiB in {dtype}" for dtype, size in work.second_branch.items())
        out.print(f"  {work.name}: {', '.join(texts)}", markup=False, highlight=False)


def _print_bars(out: Any, found: Sequence[Bar]) -> None:
    out.print(f"\nbars: {sum(bar.passed for bar in found)} of {len(found)} passed")
    rows = (
        (
            bar.row.work,
            bar.row.dtype,
            f"{bar.row.provider} {bar.row.phase}",
            bar.to,
            "not timed" if bar.value is None else f"{bar.value:.2f}x",
            f"{bar.limit:.2f}x",
            "pass" if bar.passed else "FAIL",
        )
        for bar in found
    )
    print_table(out, ("work", "dtype", "ratio of", "to", "measured", "at most", ""), rows)


def _print_twins(out: Any, paired: Pairs) -> None:
    """Print what a bias adds: for each piece of work, and over all of them, which has a bar."""
    if not paired:
        return
    out.print(f"\n{TWINS[1]} over {TWINS[0]} side by side, medians over pairs of replies:")
    rows = [(*key, *_interval(ratios), "", "") for key, ratios in paired.items()]
    for phase in PHASES:
        every = [ratio for key, ratios in paired.items() if key[2] == phase for ratio in ratios]
        verdict = "pass" if median_interval(every)[0] <= MOST_ADDED else "FAIL"
        rows.append(("all", "", phase, *_interval(every), f"{MOST_ADDED}x", verdict))
    print_table(out, ("work", "dtype", "phase", "pairs", "ratio", "95 %", "at most", ""), rows)


def _interval(ratios: Sequence[float]) -> tuple[str, str, str]:
    median, low, high = median_interval(ratios)
    return str(len(ratios)), f"{median:.3f}x", f"{low:.3f} to {high:.3f}"


def _parse(arguments: Sequence[str] | None) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.end_to_end", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios")
    parser.add_argument(
        "--growth",
        type=Path,
        metavar="FILE",
        help="draw tokens per second and overhead against the prompt and the batch",
    )
    parser.add_argument(
        "--grid", action="store_true", help=f"batches and long prompts on {GRID.model}'s weights"
    )
    parser.add_argument(
        "--model", help=f"a transformers model name or folder, or {' or '.join(SHAPES)}"
    )
    parser.add_argument("--batches", type=int, nargs="+", help="prompts at once")
    parser.add_argument("--prompts", type=int, nargs="+", help="tokens of each")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES))
    parser.add_argument("--positions", type=float, nargs="+", help="of the first anchor, 0 to 1")
    parser.add_argument("--tokens", type=int, help="a reply")
    parser.add_argument("--repeats", type=int, help="rounds, fewer where there are many tokens")
    parser.add_argument(
        "--most-tokens", type=int, help="skip work whose prompts have more tokens together"
    )
    parser.add_argument("--only", nargs="+", metavar="PROVIDER")
    parser.add_argument("--quick", action="store_true", help="one prompt, position and two rounds")
    parsed = parser.parse_args(arguments)
    asked = {
        name: value
        for name, value in vars(parsed).items()
        if name in Settings.__dataclass_fields__ and value is not None
    }
    settings = replace(GRID if parsed.grid else Settings(), **asked)
    if parsed.quick:
        settings = replace(
            settings,
            prompts=settings.prompts if "prompts" in asked else settings.prompts[:1],
            positions=settings.positions[:1],
            tokens=min(settings.tokens, 12),
            repeats=min(settings.repeats, 2),
            pairs=min(settings.pairs, 1),
        )
    return settings, parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line.

    Args:
        arguments: command-line arguments; the process's own when None.

    Returns:
        0, or 1 when a contender's result was wrong.
    """
    settings, parsed = _parse(arguments)
    # The released SPA package still uses a deprecated name at every step.
    warnings.filterwarnings("ignore", category=FutureWarning)
    out = console()
    providers = contenders()
    if unknown := set(settings.only) - set(providers):
        raise ValueError(f"--only has {sorted(unknown)}; expected some of {list(providers)}")
    if settings.only:
        providers = {name: providers[name] for name in providers if name in settings.only}
    described = machine.describe()
    plan = Plan.of(settings, providers)
    _print_left_out(out, plan)

    def keep(rows: Sequence[Row]) -> None:  # as they come: the rest may take an hour
        if parsed.json:
            write_json(parsed.json, described, rows)

    with progress(plan.steps) as (announce, advance):
        rows, works, paired = run(plan, described["read_gb_s"], announce, advance, keep)
    print_machine(out, described)
    print_rows(out, rows, "unsteered")
    _print_caches(out, works)
    _print_bars(out, bars(rows, works))
    _print_twins(out, paired)
    if parsed.plot:
        plot_ratios(parsed.plot, rows, "unsteered")
    if parsed.growth:
        plot_steps(parsed.growth, rows, works, "unsteered")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
