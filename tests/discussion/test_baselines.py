"""One agent, self-consistency, a chain and a debate."""

from __future__ import annotations

import asyncio

import pytest

from radar_core.discussion import (
    CallableModel,
    DebatePolicy,
    chain,
    debate,
    self_consistency,
    single_agent,
)
from radar_core.policies.policy import Turn
from radar_core.topology import Topology
from radar_core.transcript import Message, Transcript
from tests.discussion.agents import Recorder, agents


def parse(text):
    return text.split()[-1].strip(".") if "says" in text else None


class Drawing(Recorder):
    """Answers by the seed, as a sampled answer would."""

    def answer(self, request):
        return request.seed % 2 if request.temperature else "the same"


def test_a_single_agent_answers_once():
    model = Recorder()
    outcome = asyncio.run(single_agent(model).run("What now?"))
    assert len(model.requests) == outcome.calls == 1
    assert outcome.answer == "solver says 1."
    assert model.prompt("solver").count("What now?") == 1


def test_self_consistency_draws_by_the_seed_and_takes_the_majority():
    model = Drawing()
    outcome = asyncio.run(self_consistency(model, parse, samples=9).run("What now?"))
    seeds = [request.seed for request in model.requests]
    assert len(set(seeds)) == 9 and {request.temperature for request in model.requests} == {0.7}
    ones = sum(seed % 2 for seed in seeds)
    assert outcome.answer == ("1" if ones > 4 else "0")
    assert outcome.verdict.votes == {"1": ones, "0": 9 - ones}
    # Nobody hears anybody.
    assert len({str(r.messages).replace(r.speaker, "") for r in model.requests}) == 1
    again, other = Drawing(), Drawing()
    asyncio.run(self_consistency(again, parse, samples=9).run("What now?"))
    asyncio.run(self_consistency(other, parse, samples=9, seed=1).run("What now?"))
    assert [request.seed for request in again.requests] == seeds
    assert not set(seeds) & {request.seed for request in other.requests}


def test_samples_that_are_all_the_same_are_refused():
    with pytest.raises(ValueError, match="all samples would be the same"):
        self_consistency(Recorder(), parse, temperature=0)
    with pytest.raises(ValueError, match="samples must be"):
        self_consistency(Recorder(), parse, samples=0)


def test_in_a_chain_each_hears_those_before_it_and_the_last_word_counts():
    model = Recorder()
    outcome = asyncio.run(chain(agents("a", "b", "c"), model).run("What now?"))
    assert [request.speaker for request in model.requests] == ["a", "b", "c"]
    assert outcome.answer == "c says 1."
    for speaker, heard in (("a", ""), ("b", "a"), ("c", "ab")):
        prompt = model.prompt(speaker)
        assert [name for name in "abc" if f"{name} says" in prompt] == list(heard)


def test_debaters_answer_at_once_and_are_shown_the_others_last_answers():
    model = Recorder(delay={"agent1": 0.01, "agent2": 0.01, "agent3": 0.01})
    discussion = debate(model, parse, rounds=3, temperature=0.0)
    outcome = asyncio.run(discussion.run("What now?"))
    assert model.most_at_once == 3 and len(model.requests) == 9
    by_round = [model.requests[3 * round : 3 * round + 3] for round in range(3)]
    for number, requests in enumerate(by_round):
        for request in requests:
            roles = [message["role"] for message in request.messages]
            assert roles == ["system", "user", *["assistant", "user"] * number]
            own = [m["content"] for m in request.messages if m["role"] == "assistant"]
            assert own == [f"{request.speaker} says {n}." for n in range(1, number + 1)]
    last = by_round[2][1]
    assert last.speaker == "agent2"
    for place, round in ((3, 1), (5, 2)):
        shown = last.messages[place]["content"]
        assert f"agent1 says {round}." in shown and f"agent3 says {round}." in shown
        assert shown.count("says") == 2 and "agent2" not in shown
    assert outcome.answer == "3" and outcome.verdict.votes == {"3": 3}


def test_a_debater_reads_earlier_rounds_alone_and_only_those_it_hears():
    said = [Message("a", 0, "zero"), Message("b", 0, "nil"), Message("c", 0, "none")]
    now = Message("b", 1, "one")
    topology = Topology([("b", "a"), ("c", "b")], ["a", "b", "c"])
    turn = Turn("a", "task", "What now?", 1, Transcript([*said, now]), topology)
    context = asyncio.run(DebatePolicy("Again?").context(turn, None))
    assert [message["content"] for message in context.messages] == [
        "What now?",
        "zero",
        "Another agent answered:\nnil\n\nAgain?",
    ]


def test_a_debate_is_decided_by_majority_and_blank_answers_do_not_count():
    answers = iter(["says A", "says B", "hm", "says B", "hm", "hm"])
    model = CallableModel(lambda messages: next(answers))
    outcome = asyncio.run(debate(model, parse).run("What now?"))
    assert outcome.answer == "B" and outcome.verdict.unparsed == 2


def test_debaters_that_are_all_alike_are_told_apart_by_their_seeds():
    model = Drawing()
    asyncio.run(debate(model, parse, agents=5, rounds=1).run("What now?"))
    assert len({request.seed for request in model.requests}) == 5
    assert {request.temperature for request in model.requests} == {0.7}
    own = Drawing()
    asyncio.run(debate(own, parse, agents("x", "y")).run("What now?"))
    assert {request.temperature for request in own.requests} == {0.0}
