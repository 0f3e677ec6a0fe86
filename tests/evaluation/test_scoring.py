"""What is scored from a shared prefix equals what an uncached pass gives, for every arm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from radar_core.evaluation.arms import Arm, arms
from radar_core.evaluation.scoring import Scored, Scorer
from radar_core.hooks.cache import cache_name
from radar_core.methods import SPA, AttentionBias, Method, NoSteering
from radar_core.steered import Steered, attention_mass
from tests.models.tiny import biased_logits, eager_twin, hidden_logits, prompts, tiny_model

PROMPT = prompts([31], [[9, 10, 11, 17, 25]])
IDS, MASK, ANCHORS = PROMPT["input_ids"], PROMPT["attention_mask"], PROMPT["anchors"]
QUESTION = ANCHORS | (torch.arange(31) >= 26)[None] & (torch.arange(31) < 29)[None]
ANSWERS = [[5, 61, 7, 33], [12], [90, 2]]
FAMILIES = ("Llama", "Qwen2", "Mistral", "Gemma2")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@torch.no_grad()
def uncached(
    model: Any, method: Method, anchors: Tensor, answer: list[int], ids: Tensor = IDS
) -> list[float]:
    """Score an answer by one pass over prompt and answer, under the method, without a cache."""
    whole = torch.cat([ids, torch.tensor([answer])], dim=1)
    with method.applied_to(model, anchors=anchors):
        model(ids, use_cache=False)  # tells what of the whole is the prompt
        logits = model(whole, use_cache=False).logits[0]
    chances = logits[ids.shape[1] - 1 : -1].float().log_softmax(-1)
    return chances[range(len(answer)), answer].tolist()


def every_arm(model: Any) -> list[Arm]:
    return arms(model, "all", question=True)


def one_arm_of_each_kind(model: Any) -> list[Arm]:
    kinds: dict[object, Arm] = {}
    for arm in every_arm(model):
        method = arm.method
        queries, layers = getattr(method, "queries", ""), str(getattr(method, "layers", ""))
        kinds.setdefault((type(method), queries, layers, getattr(method, "branch", "")), arm)
    return list(kinds.values())


def anchored(arm: Arm) -> Tensor:
    return QUESTION if arm.question else ANCHORS


def test_every_arm_equals_an_uncached_pass(model: Any):
    scorer = Scorer(model, IDS)
    plain = type(model).__name__.startswith("Llama")
    for arm in every_arm(model) if plain else one_arm_of_each_kind(model):
        found = scorer.score(arm.method, anchored(arm), ANSWERS)
        for answer, chances in zip(ANSWERS, found.log_probabilities, strict=True):
            expected = uncached(model, arm.method, anchored(arm), answer)
            assert chances == pytest.approx(expected, abs=1e-5), arm.label


def test_the_arms_are_told_apart():
    model = tiny_model("Llama")
    scorer = Scorer(model, IDS)
    totals = {
        arm.label: sum(scorer.score(arm.method, anchored(arm), ANSWERS[:1]).log_probabilities[0])
        for arm in every_arm(model)
        if not arm.appended
    }
    plain = sum(scorer.score(NoSteering(), None, ANSWERS[:1]).log_probabilities[0])
    same = [label for label, total in totals.items() if abs(total - plain) < 1e-4]
    assert not same
    assert len({round(total, 4) for total in totals.values()}) > 0.9 * len(totals)


@torch.no_grad()
def test_the_unsteered_arm_is_the_model_itself(model: Any):
    whole = torch.cat([IDS, torch.tensor([ANSWERS[0]])], dim=1)
    chances = model(whole).logits[0, 30:-1].float().log_softmax(-1)
    expected = chances[range(4), ANSWERS[0]].tolist()
    for anchors in (None, ANCHORS, torch.zeros_like(ANCHORS)):
        found = Scorer(model, IDS).score(
            SPA(1.4) if anchors is None else NoSteering(), anchors, ANSWERS[:1]
        )
        assert found.log_probabilities[0] == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
def by_step(answer: list[int], logits_of: Callable[[Tensor], Tensor]) -> list[float]:
    """Score an answer token by token with the last position's logits of an independent oracle."""
    chances = []
    for place, token in enumerate(answer):
        seen = torch.cat([IDS, torch.tensor([answer[:place]], dtype=torch.long)], dim=1)
        chances.append(float(logits_of(seen)[0].log_softmax(-1)[token]))
    return chances


def test_spa_and_biases_equal_independent_oracles():
    model = tiny_model("Llama")
    scorer, twin = Scorer(model, IDS), eager_twin(model)

    def blended(seen: Tensor) -> Tensor:
        plain = hidden_logits(model, seen, MASK, torch.zeros_like(ANCHORS))
        return 1.4 * plain - 0.4 * hidden_logits(model, seen, MASK, ANCHORS)

    found = scorer.score(SPA(1.4), ANCHORS, ANSWERS[:1])
    assert found.log_probabilities[0] == pytest.approx(by_step(ANSWERS[0], blended), abs=1e-4)
    for first_query, queries in ((0, "all"), (30, "generated")):
        bias = {1: torch.full((6,), 2.0), 2: torch.full((6,), 2.0)}

        def biased(
            seen: Tensor, bias: dict[int, Tensor] = bias, first_query: int = first_query
        ) -> Tensor:
            return biased_logits(twin, seen, MASK, ANCHORS, bias, first_query)

        method = AttentionBias(2.0, layers=[1, 2], queries=queries)
        found = scorer.score(method, ANCHORS, ANSWERS[:1])
        assert found.log_probabilities[0] == pytest.approx(by_step(ANSWERS[0], biased), abs=1e-4)


def test_the_mass_is_that_of_the_last_prompt_token(model: Any):
    scorer = Scorer(model, IDS)
    for method in (NoSteering(), SPA(1.4), AttentionBias(2.0, queries="generated")):
        expected = float(attention_mass(model, IDS, ANCHORS, method).mean())
        assert scorer.score(method, ANCHORS, ANSWERS).mass == pytest.approx(expected, abs=1e-5)
    assert scorer.score(NoSteering(), None, ANSWERS).mass is None


def test_a_reply_is_what_generate_gives(model: Any):
    scorer = Scorer(model, IDS)
    for method in (SPA(1.4), AttentionBias(2.0, layers=[2], queries="generated")):
        out = Steered(model, None, method).generate(
            IDS, attention_mask=MASK, anchors=ANCHORS, max_new_tokens=6, do_sample=False
        )
        reply = scorer.score(method, ANCHORS, ANSWERS, reply_tokens=6).reply
        assert list(reply) == out[0, 31:].tolist()


def test_a_reply_ends_at_an_end_token():
    model = tiny_model("Llama")
    scorer = Scorer(model, IDS)
    reply = scorer.score(NoSteering(), None, ANSWERS, reply_tokens=6).reply
    for ends in (reply[2], [reply[2], 96]):
        model.generation_config.eos_token_id = ends
        again = scorer.score(NoSteering(), None, ANSWERS, reply_tokens=6).reply
        assert again == reply[: reply.index(reply[2]) + 1]


def test_no_arm_changes_what_another_finds(model: Any):
    chosen = one_arm_of_each_kind(model)

    def found(scorer: Scorer, arm: Arm) -> Scored:
        return scorer.score(arm.method, anchored(arm), ANSWERS, reply_tokens=2)

    shared = Scorer(model, IDS)
    forward = [found(shared, arm) for arm in chosen]
    backward = [found(shared, arm) for arm in reversed(chosen)][::-1]
    alone = [found(Scorer(model, IDS), arm) for arm in chosen]
    for one, other, third in zip(forward, backward, alone, strict=True):
        assert one.reply == other.reply == third.reply
        for first, second, last in zip(
            one.log_probabilities, other.log_probabilities, third.log_probabilities, strict=True
        ):
            assert first == pytest.approx(second, abs=1e-6)
            assert first == pytest.approx(last, abs=1e-6)


def test_a_prompt_that_begins_like_another_goes_on_from_it(model: Any):
    other = torch.cat([IDS[:, :20], IDS[:, 5:9], IDS[:, 20:]], dim=1)
    first = Scorer(model, IDS)
    nothing = torch.zeros(1, other.shape[1], dtype=torch.bool)
    for ids in (other, IDS[:, :12], IDS.flip(1)):
        found = Scorer(model, ids, first).score(NoSteering(), None, ANSWERS)
        for answer, chances in zip(ANSWERS, found.log_probabilities, strict=True):
            expected = uncached(model, NoSteering(), nothing[:, : ids.shape[1]], answer, ids)
            assert chances == pytest.approx(expected, abs=1e-5)


def test_what_a_selector_has_read_is_gone_on_from():
    model = tiny_model("Llama")
    counter = Counter(model)
    cache = model(IDS[:, :20], use_cache=True)[cache_name(model)]
    counter.taken()
    scorer = Scorer(model, IDS, cache=cache)
    assert counter.taken() == 30 - 20
    for method in (NoSteering(), AttentionBias(2.0), AttentionBias(2.0, queries="generated")):
        found = scorer.score(method, ANCHORS, ANSWERS)
        expected = Scorer(model, IDS).score(method, ANCHORS, ANSWERS)
        for chances, others in zip(
            found.log_probabilities, expected.log_probabilities, strict=True
        ):
            assert chances == pytest.approx(others, abs=1e-5)


class Counter:
    """Counts the tokens that a model runs on, over all rows."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.tokens += args[0].numel()

    def taken(self) -> int:
        tokens, self.tokens = self.tokens, 0
        return tokens


def test_the_prompt_runs_once_for_all_that_steer_the_answer_alone():
    model = tiny_model("Llama")
    counter = Counter(model)
    scorer = Scorer(model, IDS)
    assert counter.taken() == 30
    for method in (
        NoSteering(),
        AttentionBias(2.0, queries="generated"),
        AttentionBias(1.0, layers=[2]),  # the last layer's keys come before it
    ):
        scorer.score(method, ANCHORS, [[5, 61, 7, 33]])
        assert counter.taken() == 1 + 3, method
    scorer.score(SPA(1.5, branch="direct"), ANCHORS, [[5, 61, 7, 33]])
    assert counter.taken() == 2 * (1 + 3)
    scorer.score(AttentionBias(2.0), ANCHORS, [[5, 61, 7, 33]])
    assert counter.taken() == 31 - 9 + 3, "what comes before the first anchor is shared"
    scorer.score(SPA(1.2), ANCHORS, [[5, 61, 7, 33]])
    assert counter.taken() == 2 * (31 - 9 + 3)
    for strength in (1.4, 2.0):
        scorer.score(SPA(strength), ANCHORS, [[5, 61, 7, 33]])
        assert counter.taken() == 2 * (1 + 3), "strengths share what their branches hold"
    Scorer(model, torch.cat([IDS[:, :20], IDS[:, 5:]], dim=1), scorer)
    assert counter.taken() == 46 - 1 - 20


def test_a_rotation_that_depends_on_the_length_shares_nothing():
    from tests.models.tiny import FAMILIES as SHAPES

    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    shape = SHAPES["Llama"] | {"max_position_embeddings": 16, "rope_parameters": rope}
    model = tiny_model("Llama", shape=shape)
    counter = Counter(model)
    scorer = Scorer(model, IDS)
    assert counter.taken() == 0
    method = AttentionBias(2.0, queries="generated")
    found = scorer.score(method, ANCHORS, [[5]])
    assert counter.taken() == 31
    with torch.no_grad(), method.applied_to(model, anchors=ANCHORS):
        expected = model(IDS).logits[0, -1].log_softmax(-1)[5]
    assert found.log_probabilities[0] == pytest.approx([float(expected)], abs=1e-5)


def test_what_cannot_be_scored_is_refused():
    model = tiny_model("Llama")
    with pytest.raises(ValueError, match=r"input_ids has shape \[1, 1\]"):
        Scorer(model, IDS[:, :1])
    with pytest.raises(ValueError, match="an answer has no token"):
        Scorer(model, IDS).score(NoSteering(), None, [[5], []])
    with pytest.raises(ValueError, match="anchors every token"):
        Scorer(model, IDS).score(SPA(1.4), torch.ones_like(ANCHORS), [[5]])
