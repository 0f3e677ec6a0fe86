"""The demo holds its discussion, measures what it says it measures, and admits failures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from radar_core import commands, demo, embedded
from radar_core.demo import Demonstration, answer_probability, states_figure
from radar_core.methods import SPA, AttentionBias
from tests.core.test_cli import Words
from tests.models.tiny import babbler


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return embedded.load_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return babbler(len(tokenizer), 8192)


@pytest.fixture(scope="module")
def babbled(model: Any, tokenizer: Any) -> tuple[Demonstration, list[str]]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "MESSAGE_TOKENS", 8)
        patch.setattr(demo, "TIMED_TOKENS", 3)
        patch.setattr(demo, "REPEATS", 2)
        found = demo.run(model, tokenizer, Words(), max_new_tokens=4, announce=said.append)
    return found, said


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("It costs 900 dollars.", True),
        ("$900", True),
        ("900.", True),
        ("It costs 1,900 dollars.", False),
        ("It costs 9,000 or 9001.", False),
        ("nine hundred", False),
        ("", False),
    ],
)
def test_the_figure_is_found_whole(text: str, stated: bool):
    assert states_figure(text) is stated


def test_thousands_may_be_set_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "FIGURE", "4250")
    assert all(map(states_figure, ["4,250", "4.250", "4 250", "4'250", "4250 dollars"]))
    assert not any(map(states_figure, ["14,250", "4,2500", "42,50"]))


def test_every_agent_speaks_in_every_round_and_every_step_is_announced(babbled):
    found, said = babbled
    speakers = [name for layer in demo.LAYERS[:-1] for name in layer]
    expected = [(name, round) for round in (1, 2) for name in speakers]
    assert [(message.sender, message.round) for message in found.transcript] == expected
    assert len(said) == demo.STEPS - demo.REPEATS + 2
    assert len(set(said)) == len(said)


def test_a_model_that_babbles_is_reported_as_it_is(babbled):
    found, _ = babbled
    assert found.stated_by is None and not any(outcome.correct for outcome in found.outcomes)
    assert "never passed it on" in commands._findings(found)[0]
    assert found.chosen.sentences, "the best few are taken where nothing passes"
    assert 0 < found.anchor_tokens < found.prompt_tokens
    assert found.outcomes[0].prefill_ratio == found.outcomes[0].token_ratio == 1
    for outcome in found.outcomes:
        assert 0 <= outcome.probability <= 1 and 0 < outcome.mass < 1
        assert outcome.prefill_ms > 0 and outcome.token_ms > 0
    unsteered, spa, bias = found.outcomes
    assert spa.mass == pytest.approx(unsteered.mass, abs=1e-5) and bias.mass > unsteered.mass
    assert len({outcome.probability for outcome in found.outcomes}) == 3


def test_the_model_is_left_as_it_was(babbled, model: Any):
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks and not model._forward_hooks


class TestAnswerProbability:
    STEM, ANSWER = "Renting the hall costs", " 900 dollars"

    @pytest.fixture
    def call(self, model: Any, tokenizer: Any) -> tuple[Any, ...]:
        ids = tokenizer("The hall costs 900 dollars, they say.", return_tensors="pt").input_ids
        anchors = torch.zeros_like(ids, dtype=torch.bool)
        anchors[0, 2:6] = True
        return model, tokenizer, ids, anchors

    def forced(self, tokenizer: Any, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        stem, answer = (
            tokenizer(part, add_special_tokens=False).input_ids for part in (self.STEM, self.ANSWER)
        )
        return torch.cat([ids, torch.tensor([stem + answer])], dim=1), len(answer)

    @torch.no_grad()
    def product(self, whole: torch.Tensor, count: int, logits_of: Any) -> float:
        """One pass for each token of the answer, each over what comes before it."""
        total = 1.0
        for place in range(whole.shape[1] - count, whole.shape[1]):
            logits = logits_of(whole[:, :place])[0, -1]
            total *= float(logits.softmax(-1)[whole[0, place]])
        return total

    def test_unsteered_it_is_the_product_of_the_tokens_chances(self, call: tuple[Any, ...]):
        model, tokenizer, ids, _ = call
        whole, count = self.forced(tokenizer, ids)
        expected = self.product(whole, count, lambda seen: model(seen).logits)
        got = answer_probability(*call, SPA(1.0), self.STEM, self.ANSWER)
        assert got == pytest.approx(expected, rel=1e-4, abs=0)

    @pytest.mark.parametrize("strength", [0.0, 1.4, 2.5])
    def test_under_spa_it_is_that_of_the_blended_logits(
        self, call: tuple[Any, ...], strength: float
    ):
        model, tokenizer, ids, anchors = call
        whole, count = self.forced(tokenizer, ids)

        def blended(seen: torch.Tensor) -> torch.Tensor:
            visible = torch.ones_like(seen)
            visible[:, : ids.shape[1]][anchors] = 0
            places = torch.arange(seen.shape[1])[None]
            hidden = model(seen, attention_mask=visible, position_ids=places).logits
            return strength * model(seen).logits + (1 - strength) * hidden

        expected = self.product(whole, count, blended)
        got = answer_probability(*call, SPA(strength), self.STEM, self.ANSWER)
        assert got == pytest.approx(expected, rel=1e-3, abs=0)

    def test_a_bias_on_the_answers_queries_changes_it(self, call: tuple[Any, ...]):
        plain = answer_probability(*call, SPA(1.0), self.STEM, self.ANSWER)
        steered = AttentionBias(2.0, queries="generated")
        assert answer_probability(*call, steered, self.STEM, self.ANSWER) != plain

    def test_a_token_that_reaches_across_the_stem_belongs_to_the_answer(
        self, call: tuple[Any, ...]
    ):
        tokens = call[1]("The hall", add_special_tokens=False).input_ids
        assert len(tokens) == 2, "this test needs ' hall' to be one token"
        across = answer_probability(*call, SPA(1.0), "The hal", "l")
        assert across == pytest.approx(
            answer_probability(*call, SPA(1.0), "The", " hall"), rel=1e-5, abs=0
        )


def test_the_command_prints_and_writes_what_was_found(
    babbled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = dataclasses.replace(babbled[0], stated_by=babbled[0].transcript.messages[1])
    asked: list[object] = []

    def demonstrate(*arguments: object) -> Demonstration:
        asked.extend(arguments)
        return found

    monkeypatch.setattr(commands, "_demonstrate", demonstrate)
    page = tmp_path / "page.html"
    arguments = ["demo", "--html", str(page), "--seed", "3", "--dtype", "float32"]
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exit_code == 0, result.output
    assert asked == [None, "cpu", commands.DType.float32, 3, 48]
    for outcome in found.outcomes:
        assert outcome.name in result.stdout
        assert f"{outcome.token_ratio:.2f}x" in result.stdout
        assert outcome.name in page.read_text(encoding="utf-8")
    assert "host stated it in round 1" in result.stdout
    result = CliRunner().invoke(commands.app, [*arguments, "--json"])
    printed = json.loads(result.stdout)
    assert [row["name"] for row in printed["outcomes"]] == [row.name for row in found.outcomes]
    assert printed["stated_by"]["sender"] == "host"
    assert len(printed["messages"]) == 10 and printed["selection"]["chosen"]


def test_an_impossible_length_is_refused_before_anything_runs(model: Any, tokenizer: Any):
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        demo.run(model, tokenizer, Words(), max_new_tokens=0)
