"""The context builder: never over its budget, always the same, the request kept longest."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_core.policies.dacs.context import MODES, ContextBuilder
from radar_core.policies.dacs.registry import RegistryEntry, Status, Urgency
from radar_core.policies.dacs.requests import Exchange, FocusContext, SteeringRequest
from radar_core.policies.dacs.tokens import EstimatedTokenizer


class Bytes:
    """A token a byte: the strictest count."""

    def encode(self, text):
        return text.encode()


class Words:
    """A token a word: a cut inside a word changes nothing."""

    def encode(self, text):
        return text.split()


TOKENIZERS = st.sampled_from([Bytes(), Words(), EstimatedTokenizer(), EstimatedTokenizer(1)])
TEXTS = st.text(st.characters(codec="utf-8"), max_size=120)
SAID = TEXTS.filter(str.strip)
LINES = SAID.map(lambda text: " ".join(text.split())).filter(bool)
EXCHANGES = st.builds(Exchange, SAID, st.sampled_from(Urgency), TEXTS)


@st.composite
def situations(draw):
    count = draw(st.integers(1, 6))
    names = [f"a{number}" for number in range(count)]
    contexts = []
    for name in names:
        asks = name == "a0" or draw(st.booleans())
        question = draw(SAID)
        context = draw(TEXTS)
        urgency = draw(st.sampled_from(Urgency))
        request = SteeringRequest(name, question, context, urgency) if asks else None
        history = tuple(draw(st.lists(EXCHANGES, max_size=3)))
        contexts.append(FocusContext(name, draw(SAID), request, history, draw(TEXTS)))
    entries = [
        RegistryEntry(
            name,
            draw(LINES),
            draw(st.sampled_from(Status)),
            draw(LINES | st.just("")),
            draw(st.sampled_from(Urgency)),
        )
        for name in names
    ]
    return contexts, entries


@settings(max_examples=200, deadline=None)
@given(situations(), TOKENIZERS, st.integers(0, 2000), st.sampled_from(MODES))
def test_a_context_always_fits_and_is_always_the_same(situation, tokenizer, more, mode):
    contexts, entries = situation
    builder = ContextBuilder(tokenizer, 10**9)
    builder = ContextBuilder(tokenizer, builder.minimum_budget + more)
    built = builder.build(mode, "a0", contexts, entries)
    assert built.tokens == len(tokenizer.encode(built.text)) <= builder.budget
    assert built == builder.build(mode, "a0", contexts, entries)
    start, end = built.focus
    assert 0 <= start < end <= len(built.text)
    if not built.reductions:
        roomy = ContextBuilder(tokenizer, 10**9).build(mode, "a0", contexts, entries)
        assert built == roomy
    user = builder.registry(entries, "How is it going? " * 40)
    assert user.tokens == len(tokenizer.encode(user.text)) <= builder.budget


@settings(max_examples=100, deadline=None)
@given(situations(), st.integers(0, 1500))
def test_the_focus_is_whole_while_it_fits_alone(situation, more):
    contexts, entries = situation
    tokenizer = Bytes()
    roomy = ContextBuilder(tokenizer, 10**9)
    whole = roomy.build("focus", "a0", contexts, entries)
    focus = whole.text[slice(*whole.focus)]
    builder = ContextBuilder(tokenizer, roomy.minimum_budget + more)
    built = builder.build("focus", "a0", contexts, entries)
    if len(tokenizer.encode(focus)) <= builder.budget:
        assert built.text.startswith(focus) and built.focus == whole.focus
    else:
        assert (built.agents == 0 and "all agents" in built.reductions) or len(entries) == 1


def ask(agent="a0", question="Which port?", **more):
    return FocusContext(agent, "Set up the server.", SteeringRequest(agent, question, **more))


def test_lines_shrink_and_go_in_the_documented_order():
    entries = [
        RegistryEntry("low", "task l", urgency=Urgency.LOW, summary="s" * 40),
        RegistryEntry("medium", "task m", urgency=Urgency.MEDIUM, summary="s" * 40),
        RegistryEntry("high", "task h", urgency=Urgency.HIGH, summary="s" * 40),
        RegistryEntry("waits", "task w", Status.WAITING_STEERING, summary="s" * 40),
        RegistryEntry("done", "task d", Status.COMPLETE, summary="s" * 40),
    ]
    whole = ContextBuilder(Bytes(), 10**6).build("focus", "a0", [ask()], entries)
    assert whole.reductions == () and whole.agents == 5
    gone = []
    for budget in range(whole.tokens, ContextBuilder(Bytes(), 10**6).minimum_budget - 1, -1):
        text = ContextBuilder(Bytes(), budget).build("focus", "a0", [ask()], entries).text
        gone += [e.agent_id for e in entries if f"- {e.agent_id} |" not in text]
        gone = list(dict.fromkeys(gone))
    assert len(gone) >= 3 and gone == ["done", "low", "medium", "waits", "high"][: len(gone)]


def test_what_the_modes_show():
    contexts = [
        FocusContext("a0", "Bake.", SteeringRequest("a0", "Which flour?", "Rye is out.")),
        FocusContext("a1", "Brew.", SteeringRequest("a1", "Which hops?")),
        FocusContext("a2", "Rest."),
    ]
    entries = [RegistryEntry(c.agent_id, c.task) for c in contexts]
    built = {m: ContextBuilder(Words(), 500).build(m, "a0", contexts, entries) for m in MODES}
    assert "Which hops?" not in built["focus"].text and "task: Brew." in built["focus"].text
    assert built["flat"].text.count("Which flour?") == 1 and "Which hops?" in built["flat"].text
    assert built["fair_flat"].text.endswith("Which flour?")
    assert built["soft"].text == built["flat"].text
    start, end = built["soft"].focus
    assert built["soft"].text[start:end].startswith("## Agent a0\nTask: Bake.")
    assert built["soft"].text[start:end].endswith("Which flour?")
    assert built["focus"].text.count("Rye is out.") == 1


def test_contexts_grow_by_one_line_an_agent():
    def tokens(agents):
        entries = [RegistryEntry(f"a{i}", "task", summary="s" * 60) for i in range(agents)]
        return ContextBuilder(Bytes(), 10**6).build("focus", "a0", [ask()], entries).tokens

    sizes = [tokens(count) for count in (3, 4, 5, 10)]
    line = sizes[1] - sizes[0]
    assert sizes[2] - sizes[1] == line and sizes[3] - sizes[2] == 5 * line


def test_unusable_arguments():
    with pytest.raises(ValueError, match="budget is 10; expected a whole number of at least"):
        ContextBuilder(Words(), 10)
    builder = ContextBuilder(Words(), 500)
    with pytest.raises(ValueError, match="mode is 'wide'"):
        builder.build("wide", "a0", [ask()], [])
    with pytest.raises(ValueError, match="one focus context of 'a1', with a request"):
        builder.build("focus", "a1", [ask()], [])
    with pytest.raises(ValueError, match="without encode"):
        ContextBuilder(3, 500)
