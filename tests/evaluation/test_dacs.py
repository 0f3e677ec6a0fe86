"""The experiment on DACS: scripted agents, every arm, counted by hand."""

import asyncio
import json
import random
import re
from dataclasses import replace

import pytest

from radar_core.discussion.model import Answer
from radar_core.evaluation.command import Arguments, Loaded
from radar_core.evaluation.dacs import MODES, Dacs, build, play, summarise
from radar_core.evaluation.scenarios import SCENARIOS, Scenario, ScriptedAgent, Step
from radar_core.methods import AttentionBias
from radar_core.policies.dacs import Orchestrator
from tests.evaluation.conftest import unloaded


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
    assert [r["answers"] for r in list(made.measure(made.items()[1][1]))] == [
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

    list(Dacs(model, Words(), (TWO,), arms=("soft",)).measure(experiment().items()[0][1]))
    for request in seen:
        (anchor,) = request.anchors
        text = request.messages[anchor.message]["content"][anchor.start : anchor.end]
        assert text.startswith("## Agent ") and ("spelt" in text) != ("saaz" in text)


def test_a_model_that_fails_stops_the_experiment():
    async def model(request):
        raise OSError("no line")

    with pytest.raises(RuntimeError, match="got no decision: OSError: no line"):
        list(Dacs(model, Words(), (TWO,)).measure(experiment().items()[0][1]))


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


def test_trials_differ_in_the_order_of_asking_and_a_seed_gives_the_same_again():
    def asked(seed, trial):
        seen = []

        async def model(request):
            seen.append(request.messages[1]["content"].splitlines()[0])
            return Answer("none")

        made = Dacs(model, Words(), (SCENARIOS["festival_n10"],), ("focus",), trials=2, seed=seed)
        list(made.measure(made.items()[trial][1]))
        return seen

    assert asked(0, 0) == asked(0, 0)
    assert len({tuple(asked(seed, trial)) for seed in (0, 1) for trial in (0, 1)}) == 4


def test_urgent_ones_are_answered_first_and_nobody_is_interrupted():
    async def play_all():
        async def model(request):
            await asyncio.sleep(0)
            return Answer("none")

        made = Orchestrator(model, Words(), budget=4000)
        await play(SCENARIOS["festival_n10"], made, random.Random(0))
        return made.log.events

    events = asyncio.run(play_all())
    urgency = {e["request_id"]: e["urgency"] for e in events if e["event"] == "STEERING_REQUEST"}
    order = [urgency[e["request_id"]] for e in events if e["event"] == "STEERING_RESPONSE"]
    assert order == ["HIGH"] * 3 + ["MEDIUM"] * 6 + ["LOW"]
    assert not any(event["event"] == "INTERRUPT" for event in events)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_model_that_knows_the_focus_context_decides_every_scenario(name):
    """Every answer is in the context in focus, and the other lines do not give theirs away."""

    async def reads_the_focus(request):
        return Answer(re.search(r"Recent output:\n(.*)", request.messages[1]["content"])[1])

    made = Dacs(reads_the_focus, Words(), (SCENARIOS[name],), ("focus",))
    (row,) = made.measure(made.items()[0][1])
    assert (row["accuracy"], row["contamination_by_keywords"]) == (1, 0)
    assert row["decisions"] == sum(map(len, SCENARIOS[name].decisions.values()))


def test_plots_draw():
    from matplotlib.figure import Figure

    made = experiment()
    rows = [{"item": name} | row for name, item in made.items() for row in made.measure(item)]
    for plot in made.summarise(rows).plots:
        axes = Figure().add_subplot()
        plot.draw(axes)
        assert len(axes.get_legend().get_texts()) == len(MODES)


def arguments(smollm2, **options):
    return Arguments(lambda: Loaded(*smollm2, None), limit=1, options=options)


def test_it_is_built_from_the_command_lines_arguments(smollm2):
    made = build(arguments(smollm2, arms="focus,soft", trials="2", bias="1.5"))
    assert [name for name, _ in made.items()] == ["museum_n3/0", "museum_n3/1"]
    assert made.arms == ["focus", "soft"]
    assert made.method == AttentionBias(1.5, layers=tuple(range(20, 30)), queries="generated")
    json.dumps(made.settings)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"arms": "wide"}, "arms is 'wide'; expected some of focus"),
        ({"scenarios": "museum_n3, zoo"}, "scenarios is 'zoo'; expected some of"),
        ({"colour": "red"}, "no option colour"),
        ({"trials": "some"}, "trials is 'some'; expected a whole number"),
        ({"budget": "0"}, "budget is '0'; expected a whole number of at least 1"),
        ({"bias": "much"}, "bias is 'much'; expected a number"),
    ],
)
def test_unusable_options_are_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        build(Arguments(unloaded, options=options))


def test_the_real_model_is_steered_towards_the_focus(smollm2):
    """The soft arm reads what the flat one reads, and steering strongly it answers otherwise."""
    made = build(arguments(smollm2, arms="flat,soft", max_new_tokens="4", bias="30"))
    made = replace(made, scenarios=(TWO,))
    flat, soft = made.measure(made.items()[0][1])
    # The second context shows what the first answer was.
    assert flat["context_tokens"] == pytest.approx(soft["context_tokens"], abs=4)
    answers = [[answer["response"] for answer in row["answers"]] for row in (flat, soft)]
    assert len(answers[0]) == len(answers[1]) == 2 and all(answers[0])
    assert answers[0] != answers[1]
