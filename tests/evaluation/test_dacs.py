"""The experiment on DACS: scripted agents, every arm, counted by hand."""

import asyncio

import pytest

from radar_core.discussion.model import Answer
from radar_core.evaluation.dacs import MODES, Dacs, summarise
from radar_core.evaluation.scenarios import SCENARIOS, Scenario, ScriptedAgent, Step


class Words:
    def encode(self, text):
        return text.split()


TWO = Scenario(
    "two",
    "two cooks",
    (
        ScriptedAgent(
            "baker",
            "Bake bread.",
            (Step("out of rye", "Only spelt is left.", "Which flour?", ("spelt",)),),
        ),
        ScriptedAgent(
            "brewer",
            "Make beer.",
            (Step("hops came", "The saaz smells best.", "Which hops?", ("saaz",)),),
        ),
    ),
)


async def repeats(request):
    """Answers with all that it was shown: right always, contaminated where it saw others'."""
    return Answer(request.messages[-1]["content"], 9, 9)


def experiment(**changes):
    return Dacs(repeats, Words(), (TWO,), trials=2, **changes)


def test_every_arm_is_measured_and_counted():
    made = experiment()
    rows = [{"item": name} | row for name, item in made.items() for row in made.measure(item)]
    assert len(rows) == 2 * len(MODES)
    for row in rows:
        assert (row["decisions"], row["accuracy"]) == (2, 1)
        # In focus an agent's output is not among the others' lines, in a flat context it is.
        assert row["contamination_by_keywords"] == (0 if row["arm"] == "focus" else 1)
        assert row["contamination_by_ids"] == 1
    sizes = {row["arm"]: row["context_tokens"] for row in rows}
    assert sizes["focus"] < sizes["flat"] == sizes["soft"] < sizes["fair_flat"]
    assert [r["answers"] for r in made.measure(made.items()[1][1])] == [
        r["answers"] for r in rows if r["item"] == "two/1"
    ]
    overall, by_size, against = summarise(rows).tables
    assert [row[0] for row in overall.rows] == list(MODES)
    assert overall.rows[0][3].startswith("1.000")
    assert {row[0] for row in by_size.rows} == {2}
    assert {row[0] for row in against.rows} == set(MODES) - {"flat"}


def test_soft_anchors_what_focus_shows():
    seen = []

    async def model(request):
        seen.append(request)
        return Answer("saaz", 1, 1)

    Dacs(model, Words(), (TWO,), arms=("soft",)).measure(experiment().items()[0][1])
    for request in seen:
        (anchor,) = request.anchors
        text = request.messages[anchor.message]["content"][anchor.start : anchor.end]
        assert text.startswith("## Agent ") and ("spelt" in text) != ("saaz" in text)


def test_a_model_that_fails_stops_the_experiment():
    async def model(request):
        raise OSError("no line")

    with pytest.raises(RuntimeError, match="got no decision: OSError: no line"):
        Dacs(model, Words(), (TWO,)).measure(experiment().items()[0][1])


def test_there_are_scenarios_of_each_size():
    sizes = sorted(len(scenario.agents) for scenario in SCENARIOS.values())
    assert len(sizes) >= 8 and set(sizes) == {3, 5, 10}
    assert all(name == scenario.name for name, scenario in SCENARIOS.items())


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Step("s", "o", "Is it spelt?", ("spelt",)), "none of .* is in the agent's context"),
        (Step("s", "spelt", "Is it spelt?", ("spelt",)), "the question contains its answer"),
        (Step("s", "Only saaz.", "Which?", ("saaz",)), "'brewer' says 'saaz' too"),
        (Step("s", "o", "Which?"), "a question without keywords"),
    ],
)
def test_unfair_scenarios_are_refused(step, words):
    with pytest.raises(ValueError, match=words):
        Scenario("x", "", (ScriptedAgent("baker", "Bake.", (step,)), TWO.agents[1]))


def test_the_real_model_steers_its_focus():
    from radar_core.discussion.steered_model import SteeredModel
    from radar_core.embedded import load_model, load_tokenizer
    from radar_core.methods import AttentionBias

    tokenizer = load_tokenizer()
    method = AttentionBias(2.0, queries="generated")
    model = SteeredModel(load_model(), tokenizer, method)
    made = Dacs(model, tokenizer, (TWO,), ("soft",), max_new_tokens=4, method=method)
    (row,) = made.measure(made.items()[0][1])
    assert row["decisions"] == 2 and all(answer["response"] for answer in row["answers"])
    assert asyncio.iscoroutinefunction(repeats)
