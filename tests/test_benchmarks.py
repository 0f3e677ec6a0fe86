"""The benchmarks: what they write, what they check, and that a wrong result is never timed."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import end_to_end, kernels, machine, models, peers, relevance, sampling, tasks
from benchmarks.bars import Work, bars
from benchmarks.checks import Oracle, judge, judge_anchoring, trace
from benchmarks.contenders import Case, Contender, Target, contenders, generate, radar_pasta
from benchmarks.discussion import (
    Prompt,
    anchored_texts,
    build_prompt,
    build_prompts,
    discussion,
    place_anchors,
)
from benchmarks.rows import Label, Row, ratio, timed, untimed, write_json
from benchmarks.timing import (
    Summary,
    TokenClock,
    interleave,
    median_interval,
    paired_ratios,
    summarise,
)

FIELDS = (
    "benchmark",
    "work",
    "dtype",
    "provider",
    "phase",
    "median_ms",
    "p20_ms",
    "p80_ms",
    "floor_ms",
    "checked",
)


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the read bandwidth on little memory: these tests need no true number."""
    monkeypatch.setattr(machine, "read_bytes_beyond_cache", lambda: 1 << 22)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer random model and a tokenizer trained on a discussion."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>"],
        show_progress=False,
    )
    pieces.train_from_iterator([discussion(200, seed=9)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, bos_token="<s>")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,
            initializer_range=0.3,
            tie_word_embeddings=True,
        )
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(tiny: Path, **changes: Any) -> end_to_end.Settings:
    small = end_to_end.Settings(
        prompts=(64,), dtypes=("fp32",), positions=(0.5,), tokens=4, repeats=2, model=str(tiny)
    )
    return replace(small, **changes)


def make_case(tiny: Path, dtype: str = "fp32", tokens: int = 96) -> Case:
    model, tokenizer, _ = models.load(str(tiny), end_to_end.DTYPES[dtype])
    prompt = build_prompt(tokenizer, tokens)
    return Case(model, tokenizer, prompt, place_anchors(prompt, 0.5), dtype, "tiny")


def make_row(provider: str, median: float | None, **changes: Any) -> Row:
    label = Label("end_to_end", "w", "bf16", provider, "step")
    row = (
        untimed(label, "wrong")
        if median is None
        else timed(label, Summary(median, median, median), None, "right")
    )
    return replace(row, **changes)


def test_row_has_exactly_the_fields_of_the_schema(tmp_path: Path) -> None:
    assert tuple(field.name for field in fields(Row)) == FIELDS
    path = tmp_path / "new" / "rows.json"
    write_json(path, {"cores": 2}, [make_row("radar-spa", 3.0)])
    assert json.loads(path.read_text()) == {
        "machine": {"cores": 2},
        "rows": [
            {
                "benchmark": "end_to_end",
                "work": "w",
                "dtype": "bf16",
                "provider": "radar-spa",
                "phase": "step",
                "median_ms": 3.0,
                "p20_ms": 3.0,
                "p80_ms": 3.0,
                "floor_ms": None,
                "checked": "right",
            }
        ],
    }


def test_ratio_is_taken_within_the_same_work_dtype_and_phase() -> None:
    spa = make_row("radar-spa", 3.0)
    others = [
        make_row("unsteered", 1.0, work="other"),
        make_row("unsteered", 1.0, dtype="fp32"),
        make_row("unsteered", 1.0, phase="prefill"),
    ]
    assert ratio(others, spa, "unsteered") is None
    assert ratio([*others, make_row("unsteered", 4.0)], spa, "unsteered") == 0.75
    assert ratio([make_row("unsteered", None)], spa, "unsteered") is None


def test_summary_is_median_and_percentiles_in_milliseconds() -> None:
    assert summarise([0.003, 0.001, 0.002, 0.010, 0.004, 0.006]) == pytest.approx((3.5, 2.0, 6.0))
    with pytest.raises(ValueError, match="seconds is empty"):
        summarise([])


def test_interleaving_runs_everyone_once_a_round_after_changing_neighbours() -> None:
    order: list[str] = []

    def measure(name: str) -> Any:
        def once() -> dict[str, list[float]]:
            order.append(name)
            return {"step": [float(len(order))], "prefill": [0.0]}

        return once

    advanced: list[int] = []
    rounds = 30
    samples = interleave({n: measure(n) for n in "abc"}, rounds, lambda: advanced.append(1))
    turns = ["".join(order[i : i + 3]) for i in range(0, 3 * rounds, 3)]
    assert all(sorted(turn) == list("abc") for turn in turns)
    before_a = {one for turn in turns for one, then in pairwise(turn) if then == "a"}
    assert before_a == {"b", "c"}
    assert samples["a"]["step"] == [i + 1.0 for i, name in enumerate(order) if name == "a"]
    assert samples["a"]["prefill"] == [0.0] * rounds
    assert len(advanced) == 3 * rounds
    assert interleave({"a": measure("a")}, 1, warm_up=2)["a"]["step"] == [3.0 * rounds + 3]
    order.clear()
    interleave({n: measure(n) for n in "abcd"}, rounds, together=["db"])
    turns = ["".join(order[i : i + 4]) for i in range(0, 4 * rounds, 4)]
    assert all("db" in turn and sorted(turn) == list("abcd") for turn in turns)
    assert {turn.index("db") for turn in turns} == {0, 1, 2}


def test_paired_ratios_do_not_feel_drift() -> None:
    pace = np.random.default_rng(0).uniform(1.0, 3.0, (2, 25))  # of each pair of runs
    steps = np.array([0.9, 1.0, 1.4])  # of a run
    plain = np.multiply.outer(pace, steps)
    slower = 1.02 * plain
    slower[:, :5] *= 1.5  # disturbed
    flat = [[list(one.ravel()) for one in samples] for samples in (slower, plain)]
    ratios = paired_ratios(*flat, runs=25)
    assert len(ratios) == 50
    assert median_interval(ratios) == pytest.approx((1.02, 1.02, 1.02))


def test_the_interval_of_a_median_covers_it() -> None:
    values = np.random.default_rng(1).normal(1.0, 0.1, (200, 60))
    found = [median_interval(list(one), draws=300) for one in values]
    assert 0.90 <= np.mean([low <= 1.0 <= high for _, low, high in found]) <= 0.99
    assert found[0][0] == np.median(values[0])


def test_token_clock_separates_prefill_from_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.5, 13.0, 13.25, 13.75])
    monkeypatch.setattr("benchmarks.timing.time.perf_counter", lambda: next(now))
    clock = TokenClock()
    for value in ("prompt", "first", "second", "third"):
        clock.put(value)
    assert clock.phases == {"prefill": [3.0], "step": [0.25, 0.5]}


def test_read_bandwidth_is_measured_on_more_than_every_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(machine, "_largest_cache_bytes", lambda: 480 << 20)
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 1 << 20)
    assert machine.read_bytes_beyond_cache() == 2 << 30
    monkeypatch.setattr(machine, "_largest_cache_bytes", lambda: 1 << 30)
    assert machine.read_bytes_beyond_cache() == 4 << 30
    assert machine.read_bandwidth(1 << 22, repeats=1) > 0.01


@pytest.mark.parametrize("tokens", [64, 100, 512])
def test_prompt_has_exactly_the_tokens_asked_for(tiny: Path, tokens: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = "<s>{{ messages[0]['content'] }} answer:"
    prompt = build_prompt(tokenizer, tokens)
    assert prompt.tokens == tokens
    assert prompt.text.startswith("<s>Discussion") and prompt.text.endswith(" answer:")
    assert torch.equal(prompt.input_ids, build_prompt(tokenizer, tokens).input_ids)
    again = tokenizer(prompt.text, add_special_tokens=False).input_ids
    assert again == prompt.input_ids[0].tolist()
    with pytest.raises(ValueError, match="tokens is 12"):
        build_prompt(tokenizer, 12)


@pytest.mark.parametrize("position", [0.05, 0.5, 0.9])
def test_anchors_are_five_percent_in_four_runs_from_the_position(position: float) -> None:
    prompt = Prompt("", torch.arange(1024)[None], (24, 1018))
    anchors = place_anchors(prompt, position)[0]
    starts = (anchors & ~anchors.roll(1)).nonzero()[:, 0].tolist()
    assert int(anchors.sum()) == 51 and len(starts) == 4
    assert starts[0] == round(position * 1024)
    assert int(anchors.nonzero()[-1]) < 1018
    with pytest.raises(ValueError, match=r"position is 0\.99"):
        place_anchors(prompt, 0.99)


def test_bars_hold_the_ratios_against_the_limits() -> None:
    rows = [
        make_row("unsteered", 10.0),
        make_row("radar-unsteered", 8.0),
        make_row("radar-bias", 8.1),
        make_row("radar-seka", 10.3),
        make_row("radar-spa", 7.5),
        make_row("pastalib", 20.0),
        make_row("radar-pasta", 9.9),
        make_row("unsteered", 100.0, phase="prefill"),
        make_row("radar-spa", 170.0, phase="prefill"),
    ]

    def found(tokens: int, batch: int = 1, **more: Any) -> list[tuple[str, str, str, float, bool]]:
        return [
            (b.row.provider, b.row.phase, b.to, round(b.limit, 3), b.passed)
            for b in bars(rows, [Work("w", tokens, 0.5, batch, **more)])
        ]

    assert found(1024) == [
        ("radar-bias", "step", "unsteered", 1.0, True),
        ("radar-seka", "step", "unsteered", 1.02, False),
        ("radar-spa", "step", "unsteered", 0.8, True),
        ("radar-spa", "prefill", "unsteered", 1.65, False),
    ]
    assert ("radar-spa", "step", "unsteered", 0.7, False) in found(2048)
    assert ("radar-spa", "step", "unsteered", 0.9, True) in found(2048, random_weights=True)
    assert ("radar-bias", "step", "unsteered", 0.8, False) in found(2048)
    assert ("radar-pasta", "step", "pastalib", 0.5, True) in found(2048)
    assert found(1024, batch=4) == [
        ("radar-bias", "step", "unsteered", 1.05, True),
        ("radar-seka", "step", "unsteered", 1.02, False),
    ]
    rows[4] = make_row("radar-spa", None)
    assert ("radar-spa", "step", "unsteered", 0.8, False) in found(1024)


def test_command_line_run_writes_the_schema(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, image = tmp_path / "rows.json", tmp_path / "ratios.png"
    arguments = ["--quick", "--prompts", "64", "--tokens", "4", "--repeats", "1"]
    outputs = ["--model", str(tiny), "--json", str(path), "--plot", str(image)]
    assert end_to_end.main([*arguments, *outputs]) == 0
    document = json.loads(path.read_text())
    assert {"torch", "transformers", "cores", "read_gb_s"} <= set(document["machine"])
    assert all(tuple(row) == FIELDS for row in document["rows"])
    assert all(0 < r["p20_ms"] <= r["median_ms"] <= r["p80_ms"] for r in document["rows"])
    measured = {(row["dtype"], row["provider"], row["phase"]) for row in document["rows"]}
    assert {
        (dtype, provider, phase)
        for dtype in ("bf16", "fp32")
        for provider in ("unsteered", "radar-unsteered", "radar-spa", "radar-bias")
        for phase in ("prefill", "step")
    } <= measured
    assert {row["work"] for row in document["rows"]} == {"tiny prompt=64 anchors@50%"}
    assert all((row["floor_ms"] is None) == (row["phase"] == "prefill") for row in document["rows"])
    assert image.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "bars: " in printed and "| radar-spa" in printed


def test_batches_of_a_shape_with_random_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, image = tmp_path / "rows.json", tmp_path / "growth.png"
    shape = f"{models.QWEN}-2-layers"
    sizes = ["--prompts", "64", "96", "--batches", "1", "3", "--tokens", "3", "--repeats", "1"]
    outputs = ["--model", shape, "--json", str(path), "--growth", str(image)]
    assert end_to_end.main(["--positions", "0.5", *sizes, *outputs]) == 0
    rows = [Row(**row) for row in json.loads(path.read_text())["rows"]]
    works = [f"{shape} prompt={n}{at}" for n in (64, 96) for at in ("", " batch=3")]
    assert list(dict.fromkeys(row.work for row in rows)) == [f"{w} anchors@50%" for w in works]
    absent = {"anchoring", "pastalib", "radar-pasta"}  # they need a text, or a Llama
    assert {row.provider for row in rows} == set(contenders()) - absent
    floors = {row.work: row.floor_ms for row in rows if row.provider == "unsteered"}
    assert all(row.median_ms for row in rows) and image.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    # 3 prompts of 64 tokens and 3 of the reply, 2 layers x 2 heads x 64, keys and values, 4 bytes.
    assert f"batch=3 anchors@50%: {3 * 67 * 2 * 2 * 2 * 64 * 2 / 2**20:.0f} MiB in bf16" in printed
    assert len(floors) == 4


def test_rounds_get_fewer_and_work_is_skipped_where_there_are_many_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    grid = end_to_end.GRID
    assert [grid.rounds(tokens, 1) for tokens in grid.prompts] == [3, 3, 3, 2, 1]
    assert end_to_end.Settings(repeats=1).rounds(8192, 4) == 1
    assert max(tokens * batch for tokens, batch in grid.sizes) <= grid.most_tokens
    assert {batch for _, batch in grid.sizes} == {1, 4, 16} and (8192, 1) in grid.sizes
    with pytest.raises(ValueError, match="most_tokens is 9, but the smallest work has 512"):
        end_to_end.Settings(most_tokens=9)
    image = tmp_path / "growth.png"
    small = ["--prompts", "64", "96", "--batches", "1", "2", "--tokens", "2", "--repeats", "1"]
    more = ["--model", f"{models.QWEN}-2-layers", "--only", "unsteered", "radar-seka"]
    outputs = ["--most-tokens", "128", "--growth", str(image)]
    assert end_to_end.main(["--grid", *small, *more, *outputs]) == 0
    printed = capsys.readouterr().out
    assert "skipped, more than 128 tokens together: 2 x 96" in printed
    assert "fp32" not in printed and image.read_bytes().startswith(b"\x89PNG")


def test_who_is_left_out_is_said_once(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompts", "64", "--positions", "0.5", "--batches", "1", "2", "--tokens", "2"]
    more = ["--model", f"{models.QWEN}-2-layers", "--dtypes", "fp32", "--repeats", "1"]
    assert end_to_end.main([*sizes, *more]) == 0
    printed = capsys.readouterr().out
    for name in ("anchoring", "pastalib"):
        lines = [line for line in printed.splitlines() if line.startswith(f"{name} is left out: ")]
        assert len(lines) == 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 2])
def test_pasta_is_the_packages(tiny: Path, dtype: str, rows: int) -> None:
    """Ours against the oracle, and against the package where it is installed."""
    model, tokenizer, _ = models.load(str(tiny), end_to_end.DTYPES[dtype])
    prompts = build_prompts(tokenizer, 96, rows)
    case = Case(model, tokenizer, prompts, place_anchors(prompts, 0.5), dtype, "tiny")
    found, oracle = contenders(), Oracle.of(case.model)
    target = Target(bias=-math.log(peers.ALPHA), few_heads=True)
    ours = Contender(radar_pasta(target), target)
    with torch.inference_mode():
        plain = trace(Contender(generate, Target()), case, 6)
        for contender in [ours, *(found[n] for n in ("pastalib",) if n in found)]:
            verdict = judge(contender, case, trace(contender, case, 6), oracle, {}, plain)
            assert verdict.right, verdict.text
        idle = Contender(generate, target)
        assert not judge(idle, case, trace(idle, case, 6), oracle, {}, plain).right
    assert model.config._attn_implementation == "sdpa"


def test_each_prompt_of_a_batch_is_another_and_the_last_is_checked(tiny: Path) -> None:
    model, tokenizer, _ = models.load(str(tiny), torch.float32)
    prompts = build_prompts(tokenizer, 64, 3)
    assert len({tuple(row) for row in prompts.input_ids.tolist()}) == 3
    anchors = place_anchors(prompts, 0.5)
    case = Case(model, tokenizer, prompts, anchors, "fp32", "tiny")
    alone = replace(case, prompt=build_prompt(tokenizer, 64, seed=2), anchors=anchors[-1:])
    together, single = (trace(contenders()["radar-spa"], c, 4) for c in (case, alone))
    assert torch.equal(together.tokens, single.tokens)
    torch.testing.assert_close(together.scores, single.scores, atol=1e-4, rtol=0)


def test_wrong_contender_is_reported_and_not_timed(tiny: Path) -> None:
    calls: list[int] = []

    def shifted(case: Case, **options: Any) -> Any:
        calls.append(options["max_new_tokens"])
        return generate(replace(case, prompt=build_prompt(case.tokenizer, 64, seed=1)), **options)

    def broken(case: Case, **options: Any) -> Any:
        raise RuntimeError("no such kernel")

    providers = {
        "unsteered": Contender(generate, Target()),
        "shifted": Contender(shifted, Target()),
        "broken": Contender(broken, Target()),
    }
    rows, _, _ = end_to_end.run(end_to_end.Plan.of(settings(tiny), providers), read_gb_s=10.0)
    by_provider = {row.provider: row for row in rows}
    assert by_provider["unsteered"].median_ms is not None
    for name in ("shifted", "broken"):
        assert by_provider[name].failed and by_provider[name].median_ms is None
    assert "no such kernel" in by_provider["broken"].checked
    assert calls == [end_to_end.CHECKED_STEPS]


def test_all_positions_are_reported_and_unsteered_is_measured_once(tiny: Path) -> None:
    runs: list[int] = []

    def counted(case: Case, **options: Any) -> Any:
        if options.get("streamer"):
            runs.append(1)
        return generate(case, **options)

    providers = contenders() | {"unsteered": Contender(counted, Target())}
    wanted = {n: providers[n] for n in ("unsteered", "transformers-cfg", "radar-spa")}
    chosen = settings(tiny, positions=(0.5, 0.25))
    advanced: list[int] = []
    plan = end_to_end.Plan.of(chosen, wanted)
    kept: list[int] = []
    rows, works, _ = end_to_end.run(
        plan, 10.0, advance=lambda: advanced.append(1), keep=lambda rows: kept.append(len(rows))
    )
    assert kept == [len(rows)]
    assert len(runs) == chosen.repeats
    assert len(advanced) == plan.steps
    assert [work.share_after_first_anchor for work in works] == [0.5, 0.75]
    providers_at = {
        work.name: [r.provider for r in rows if r.work == work.name and r.phase == "step"]
        for work in works
    }
    assert providers_at == {
        "tiny prompt=64 anchors@50%": ["unsteered", "transformers-cfg", "radar-spa"],
        "tiny prompt=64 anchors@25%": ["unsteered", "radar-spa"],
    }


def test_a_bias_and_its_twin_answer_side_by_side(tiny: Path) -> None:
    order: list[str] = []

    def noting(name: str, contender: Contender) -> Contender:
        def noted(case: Case, **options: Any) -> Any:
            if options.get("streamer"):
                order.append(name)
            return contender.generate(case, **options)

        return replace(contender, generate=noted)

    providers = contenders()
    wanted = {n: noting(n, providers[n]) for n in ("unsteered", "radar-unsteered", "radar-bias")}
    plan = end_to_end.Plan.of(settings(tiny, positions=(0.5, 0.25), pairs=2), wanted)
    advanced: list[int] = []
    _, _, paired = end_to_end.run(plan, read_gb_s=10.0, advance=lambda: advanced.append(1))
    assert len(advanced) == plan.steps
    assert paired.keys() == {
        ("tiny prompt=64 anchors@50%", "fp32", phase) for phase in ("prefill", "step")
    }
    assert all(len(ratios) == 2 * plan.settings.repeats for ratios in paired.values())
    assert all(0.2 < median_interval(ratios)[0] < 5 for ratios in paired.values())
    line = " ".join(order)
    turn = "radar-bias radar-unsteered radar-unsteered radar-bias"
    assert line.count(turn) == plan.settings.repeats
    assert order.count("radar-bias") == 3 * plan.settings.repeats  # once more, anchored elsewhere


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_steering_that_does_nothing_is_found_out(tiny: Path, dtype: str) -> None:
    case = make_case(tiny, dtype)
    oracle = Oracle.of(case.model)
    # The weak ones are within what bfloat16 rounds: only their direction gives them away.
    weak = (Target(strength=1.02), Target(bias=0.05), Target(edits_keys=True))
    for target in (Target(strength=1.4), Target(bias=2.0), *weak):
        idle = Contender(generate, target)
        with torch.inference_mode():
            found = trace(idle, case, 6)
            verdict = judge(idle, case, found, oracle, {}, found)
        assert not verdict.right, verdict.text


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_steering_that_is_right_passes(tiny: Path, dtype: str) -> None:
    case = make_case(tiny, dtype)
    oracle = Oracle.of(case.model)
    with torch.inference_mode():
        plain = trace(Contender(generate, Target()), case, 6)
        for name in ("radar-bias", "radar-spa", "radar-seka", "transformers-cfg"):
            contender = contenders()[name]
            verdict = judge(contender, case, trace(contender, case, 6), oracle, {}, plain)
            assert verdict.right, f"{name}: {verdict.text}"


def test_a_twin_with_other_tokens_is_found_out(tiny: Path) -> None:
    case = make_case(tiny)
    contender = Contender(generate, Target(), twin="elder")
    with torch.inference_mode():
        found = trace(contender, case, 6)
        oracle = Oracle.of(case.model)
        assert judge(contender, case, found, oracle, {"elder": found}, found).right
        other = replace(found, tokens=found.tokens.roll(1))
        verdict = judge(contender, case, found, oracle, {"elder": other}, found)
    assert not verdict.right and "NOT the same tokens as elder" in verdict.text


def test_anchored_text_is_what_the_runs_say(tiny: Path) -> None:
    case = make_case(tiny)
    texts = anchored_texts(case.tokenizer, case.prompt, case.anchors)
    assert len(texts) == 4
    assert all(text in case.prompt.text for text in texts)
    assert sum(len(case.tokenizer(t).input_ids) for t in texts) == int(case.anchors.sum())


def test_released_package_must_run_two_forwards_a_token(tiny: Path) -> None:
    found = contenders()
    # The peer is an optional install; without it the benchmark says so and goes on.
    one_branch = Contender(generate)
    if "anchoring" in found:
        case = make_case(tiny)
        with torch.inference_mode():
            assert judge_anchoring(found["anchoring"], case, 4).right
            assert not judge_anchoring(one_branch, case, 4).right


def test_settings_refuse_what_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match="tokens is 1"):
        end_to_end.Settings(tokens=1)
    with pytest.raises(ValueError, match="repeats is 0"):
        end_to_end.Settings(repeats=0)
    with pytest.raises(ValueError, match="fp8"):
        end_to_end.Settings(dtypes=("fp8",))
    with pytest.raises(ValueError, match="nobody"):
        end_to_end.main(["--only", "nobody"])


def numbers(value: float) -> tasks.Contender:
    return tasks.Contender(
        lambda copy: torch.full((3,), value), tasks.close_to(torch.ones(3).double(), 1e-3)
    )


def test_a_wrong_operator_is_reported_and_not_timed() -> None:
    called: list[int] = []

    def slow(copy: int) -> list[float]:
        called.append(copy)
        return [0.002]

    found = {
        "right": numbers(1.0),
        "clocked": replace(numbers(1.0), clock=slow),
        "wrong": replace(numbers(1.01), clock=slow),
        "nan": numbers(float("nan")),
    }
    task = tasks.Task("op", "3", "fp32", found, copies=2, floor_bytes=10**7)
    rows = {row.provider: row for row in tasks.run([lambda: task], rounds=2, read_gb_s=10.0)}
    assert rows["wrong"].failed and rows["nan"].failed and not rows["right"].failed
    assert rows["wrong"].median_ms is None and rows["clocked"].median_ms == 2.0
    assert called == [0, 1] * 3  # a warm-up and two rounds through both copies, of one contender
    assert rows["right"].floor_ms == pytest.approx(1.0)


def test_a_floor_is_of_the_bandwidth_at_that_time() -> None:
    task = tasks.Task("op", "3", "fp32", {"right": numbers(1.0)}, floor_bytes=10**7)
    speeds = iter([1.0, 5.0, 10.0, 20.0])  # a warm-up and three rounds
    (row,) = tasks.run([lambda: task], rounds=3, read_gb_s=lambda: next(speeds))
    assert row.floor_ms == pytest.approx(1.0)


def test_operator_bars_compare_rows_of_the_same_work() -> None:
    def row(provider: str, median: float, **changes: Any) -> Row:
        label = Label("op", "a=1", "fp32", provider)
        return replace(timed(label, Summary(median, median, median), 0.5, "right"), **changes)

    rows = [
        row("radar-cpp", 1.0),
        row("torch", 2.0),
        row("radar-cpp", 9.0, work="a=12"),
        row("radar-cpp", 9.0, dtype="bf16"),
        row("radar-cpp", 9.0, benchmark="other"),
    ]
    bars = [
        tasks.Bar("op", "a=1", ("fp32",), "radar-cpp", "torch", 0.6),
        tasks.Bar("op", "a=1", ("fp32",), "radar-cpp", tasks.FLOOR, 1.5, 1.1),
    ]
    met = [(one.row.work, one.value, one.passed) for one in tasks.hold(bars, rows)]
    assert met == [
        ("a=1", 0.5, True),
        ("a=12", None, False),
        ("a=1", 2.0, False),
        ("a=12", 18.0, False),
    ]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_wrong_draws_are_found_out(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sampling.draws

    def draws(work: sampling.Work) -> dict[str, Any]:
        if not work.draws:
            return real(work) | {"twice": lambda full, masked: 2 * full.float()}
        flat = real(replace(work, top_k=None, top_p=None))
        wrong = {"greedy": lambda full, masked: (1.4 * full - 0.4 * masked).argmax(-1)}
        return real(work) | wrong | ({"untruncated": flat["torch"]} if work.top_p else {})

    monkeypatch.setattr(sampling, "draws", draws)
    for work in (
        sampling.Work(2, 3000, 50, 0.95),
        sampling.Work(2, 3000, None, 0.95),
        sampling.Work(2, 3000),
        sampling.Work(2, 3000, draws=False),
    ):
        for row in tasks.run([lambda work=work: sampling.task(work, dtype)], 1, 10.0):
            assert row.failed == (row.provider in {"twice", "greedy", "untruncated"}), row


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_wrong_selection_is_found_out(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = relevance.contenders

    def contenders(work: relevance.Discussion) -> dict[str, Any]:
        query, place, score = real(work)["radar-reference"]()
        kept = torch.arange(len(score)) != score.argmax()
        wrong = {
            "one missing": (query[kept], place[kept], score[kept]),
            "one score": (query, place, score + 0.01 * ~kept),
            "twice": tuple(torch.cat([one, one[:1]]) for one in (query, place, score)),
            "not a number": (query, place, score.masked_fill(~kept, float("nan"))),
        }
        return real(work) | {name: lambda one=one: one for name, one in wrong.items()}

    monkeypatch.setattr(relevance, "contenders", contenders)
    rows = tasks.run([lambda: relevance.task(relevance.Shape(3000, 24, 3), dtype)], 1, 10.0)
    assert {row.provider for row in rows if row.failed} == {
        "one missing",
        "one score",
        "twice",
        "not a number",
    }
    assert {row.provider for row in rows if not row.failed} == {
        "radar-cpp",
        "radar-reference",
        "torch",
        "cos-sim",
    }


def test_every_operator_is_measured_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = tmp_path / "kernels.json", tmp_path / "plots"
    outputs = ["--json", str(path), "--plots", str(folder)]
    assert kernels.main(["--quick", "--rounds", "1", *outputs]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert all(tuple(row) == FIELDS and row["median_ms"] for row in rows)
    measured = {(row["benchmark"], row["dtype"], row["provider"]) for row in rows}
    for bar in kernels.bars(kernels.SUITES):
        for dtype in bar.dtypes:
            assert (bar.benchmark, dtype, bar.provider) in measured
            assert bar.to == tasks.FLOOR or (bar.benchmark, dtype, bar.to) in measured
    images = list(folder.glob("*.png"))
    assert len(images) == sum(len(s.growth("bf16", True)) for s in kernels.SUITES.values())
    assert all(image.read_bytes().startswith(b"\x89PNG") for image in images)
    assert "bars: " in capsys.readouterr().out
