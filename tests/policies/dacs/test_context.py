"""Contexts are deterministic, always fit, and leave the least important out first."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from radar_core.policies.dacs import (
    ContextBuilder,
    EstimatedTokenizer,
    Exchange,
    FocusContext,
    RegistryEntry,
    Status,
    SteeringRequest,
    Urgency,
)
from radar_core.policies.dacs.context import MODES
from radar_core.policies.dacs.tokens import TokenCounter
from tests.policies.dacs.support import Characters, Parity, Words

TOKENIZERS = [Words(), Characters(), Parity(), EstimatedTokenizer(4)]

WORDS = ["red", "box", "mail", "40", "street,", "is;", "über", "🙂"]
words = st.lists(st.sampled_from(WORDS), max_size=40)
odd = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"]), max_size=80)
texts = words.map(" ".join) | odd.map(lambda text: " ".join(text.split()))
spoken = texts.map(lambda text: f"Which {text}?")
exchanges = st.builds(Exchange, spoken, st.sampled_from(Urgency), texts)


@st.composite
def teams(draw):
    """The registry entries and focus contexts of some agents, of which the first asks."""
    names = [f"agent-{number}" for number in range(draw(st.integers(1, 7)))]
    entries, contexts = [], []
    for name in names:
        task = f"Sort {draw(texts)}"
        entries.append(
            RegistryEntry(
                name,
                task,
                draw(st.sampled_from(Status)),
                draw(texts),
                draw(st.sampled_from(Urgency)),
            )
        )
        asks = name == names[0] or draw(st.booleans())
        urgency = draw(st.sampled_from(Urgency))
        request = SteeringRequest(name, draw(spoken), draw(texts), urgency) if asks else None
        history = tuple(draw(st.lists(exchanges, max_size=4)))
        contexts.append(FocusContext(name, task, request, history, draw(texts)))
    place = draw(st.integers(0, len(names) - 1))  # the one that asks may stand anywhere
    order = [*range(1, place + 1), 0, *range(place + 1, len(names))]
    return [entries[i] for i in order], [contexts[i] for i in order]


tokenizers = st.sampled_from(TOKENIZERS)
spare = st.integers(0, 400)
modes = st.sampled_from(MODES)


def builder_of(tokenizer, spare, history=10):
    least = ContextBuilder(tokenizer, 10**6).minimum_budget
    return ContextBuilder(tokenizer, least + spare, history)


def alone(context, history=10):
    """F(a_i) as it is written in focus, whole."""
    return (
        ContextBuilder(Words(), 10**6, history)
        .build("focus", "agent-0", [context], ())
        .text[: -len("\n\n## Other agents: none")]
    )


def own(contexts):
    return next(context for context in contexts if context.agent_id == "agent-0")


@settings(deadline=None, max_examples=75)
@given(teams(), tokenizers, spare, modes)
def test_a_context_fits_and_is_the_same_again(team, tokenizer, spare, mode):
    entries, contexts = team
    builder = builder_of(tokenizer, spare)
    built = builder.build(mode, "agent-0", contexts, entries)
    assert built.tokens == len(tokenizer.encode(built.text)) <= builder.budget
    assert built == builder.build(mode, "agent-0", contexts, entries)
    assert built == builder_of(tokenizer, spare).build(mode, "agent-0", contexts, entries)
    start, end = built.focus
    assert 0 <= start < end <= len(built.text)


@settings(deadline=None, max_examples=50)
@given(teams(), tokenizers, spare, texts)
def test_a_message_of_the_user_fits(team, tokenizer, spare, message):
    entries, _ = team
    builder = builder_of(tokenizer, spare)
    built = builder.registry(entries, f"Hello {message}")
    assert built.tokens == len(tokenizer.encode(built.text)) <= builder.budget
    if not built.reductions:
        assert built.agents == len(entries)
    if "end of the message" not in built.reductions:
        assert built.text.endswith(f"Hello {message}".strip())


@settings(deadline=None, max_examples=75)
@given(teams(), st.sampled_from([Words(), Characters(), EstimatedTokenizer(4)]), spare)
def test_the_focus_context_is_never_cut_while_it_fits(team, tokenizer, spare):
    entries, contexts = team
    builder = builder_of(tokenizer, spare)
    whole = alone(own(contexts))
    built = builder.build("focus", "agent-0", contexts, entries)
    shown = built.text[slice(*built.focus)]
    if len(tokenizer.encode(whole)) <= builder.budget:
        assert shown == whole
        assert not any("of the" in step or "oldest" in step for step in built.reductions)
    else:
        assert shown != whole and built.agents == 0
        assert built.text == shown


@settings(deadline=None, max_examples=100)
@given(teams(), tokenizers, spare)
def test_protected_lines_are_kept_longest(team, tokenizer, spare):
    entries, contexts = team
    built = builder_of(tokenizer, spare).build("focus", "agent-0", contexts, entries)
    others = [entry for entry in entries if entry.agent_id != "agent-0"]
    lines = dict(re.findall(r"^- (agent-\d)(.*)$", built.text[built.focus[1] :], re.M))
    assert len(lines) == built.agents

    def kind(entry):
        if entry.status.ended:
            return 0
        if entry.urgency is Urgency.HIGH:
            return 4
        return 3 if entry.status is Status.WAITING_STEERING else 1 + entry.urgency.rank

    dropped = [kind(entry) for entry in others if entry.agent_id not in lines]
    kept = [kind(entry) for entry in others if entry.agent_id in lines]
    if dropped and kept:
        assert max(dropped) <= min(kept)
    for entry in others:
        line = lines.get(entry.agent_id, "")
        if kind(entry) >= 3 and any(lines.get(o.agent_id) and kind(o) < 3 for o in others):
            assert entry.task in line and f"{entry.status} {entry.urgency}" in line


def entry(name, status="RUNNING", urgency="LOW", summary="halfway there"):
    return RegistryEntry(name, f"Sort {name}'s mail", Status(status), summary, Urgency(urgency))


ENTRIES = [
    entry("ann"),
    entry("done", "COMPLETE"),
    entry("low"),
    entry("middle", urgency="MEDIUM"),
    entry("waits", "WAITING_STEERING"),
    entry("high", urgency="HIGH"),
    entry("lower"),
]
REQUEST = SteeringRequest("ann", "Which box is next?", "Box 3 is full.", Urgency.HIGH)
CONTEXT = FocusContext(
    "ann",
    "Sort ann's mail",
    REQUEST,
    (Exchange("Which street?", Urgency.LOW, "Elm Street."),),
)
FOCUS_TEXT = """\
## In focus: agent ann
Task: Sort ann's mail
Steering so far:
1. Asked [LOW]: Which street?
   Told: Elm Street.
Recent output:
Box 3 is full.
Open request [HIGH]: Which box is next?"""


def test_the_text_of_a_focus_context():
    built = ContextBuilder(Words(), 10**4).build("focus", "ann", [CONTEXT], ENTRIES[:4])
    assert built.text == (
        FOCUS_TEXT + "\n\n## Other agents\n"
        "- done | COMPLETE\n"
        "- low | RUNNING LOW | task: Sort low's mail | last: halfway there\n"
        "- middle | RUNNING MEDIUM | task: Sort middle's mail | last: halfway there"
    )
    assert built.text[slice(*built.focus)] == FOCUS_TEXT
    assert (built.agents, built.history_turns, built.reductions) == (3, 1, ())


def test_what_an_agent_found_out_is_shown_once():
    context = FocusContext("ann", "Sort", REQUEST, output="Box 3 is full.")
    built = ContextBuilder(Words(), 10**4).build("focus", "ann", [context], ())
    assert built.text.count("Box 3 is full.") == 1


def test_the_ladder_of_the_other_agents_step_by_step():
    """Every budget from plenty to nothing: what is shown only shrinks, in the documented order."""
    counter = TokenCounter(Words())
    plenty = ContextBuilder(Words(), 10**4).build("focus", "ann", [CONTEXT], ENTRIES).tokens
    shown = []
    for budget in range(plenty, counter.count(FOCUS_TEXT) - 1, -1):
        builder = ContextBuilder(Words(), 10**4)
        builder.budget = budget  # some are below the least that is allowed
        built = builder.build("focus", "ann", [CONTEXT], ENTRIES)
        assert built.text.startswith(FOCUS_TEXT)
        section = built.text[len(FOCUS_TEXT) :].strip()
        if not shown or shown[-1] != section:
            shown.append(section)
    names = [re.findall(r"^- (\w+)", section, re.M) for section in shown]
    everybody = ["done", "low", "middle", "waits", "high", "lower"]
    assert names == [
        everybody,
        everybody,
        # Dropping "done" alone saves less than it takes to say that 5 of 6 are shown.
        ["low", "middle", "waits", "high"],
        ["middle", "waits", "high"],
        ["waits", "high"],
        ["waits", "high"],
        ["high"],
        [],
        [],
    ]
    assert "- low | task: Sort low's mail\n" in shown[1]
    assert "- middle | RUNNING | task: Sort middle's mail\n" in shown[1]
    protected = "- high | RUNNING HIGH | task: Sort high's mail | last: halfway there"
    assert all(protected in section for section in shown[:5])
    assert "- waits | WAITING_STEERING LOW | task: Sort waits's mail | last" in shown[4]
    assert shown[5].endswith("- high | RUNNING | task: Sort high's mail")
    assert shown[3].startswith("## Other agents (3 of 6 shown)")
    assert shown[7:] == ["## Other agents (none of 6 shown)", ""]


def test_reductions_say_what_was_left_out():
    builder = ContextBuilder(Words(), 10**4)
    builder.budget = TokenCounter(Words()).count(FOCUS_TEXT)
    assert builder.build("focus", "ann", [CONTEXT], ENTRIES).reductions[-1] == "all agents"
    builder.budget -= 1
    cut = builder.build("focus", "ann", [CONTEXT], ENTRIES)
    assert cut.reductions == ("all agents", "oldest steering history")
    assert cut.history_turns == 0 and "Steering so far" not in cut.text


def test_the_last_resort_cuts_history_then_output_then_task_then_question():
    request = SteeringRequest("ann", "Which box is next? " * 4, "First. " * 20 + "Last.")
    history = tuple(Exchange(f"Old {n}?", Urgency.LOW, f"Yes {n}.") for n in range(6))
    context = FocusContext("ann", "Sort the mail of all the streets", request, history)
    builder = ContextBuilder(Words(), 10**4)
    stages = []
    for budget in range(builder.build("focus", "ann", [context], ()).tokens, 30, -1):
        builder.budget = budget
        built = builder.build("focus", "ann", [context], ())
        assert built.tokens <= budget
        stages.append(len(built.reductions))
        if stages[-1] == 1:
            shown = re.findall(r"Old (\d)", built.text)
            assert shown == [str(n) for n in range(6)][6 - len(shown) :]  # the newest
            assert built.history_turns == len(shown)
        elif stages[-1] == 2:
            assert "Old" not in built.text
            output = re.search(r"Recent output:\n…(.*)\nOpen", built.text, re.S)
            assert output is None or request.relevant_context.endswith(output[1])
            assert "Sort the mail of all the streets" in built.text
        elif stages[-1] == 3:
            assert "Recent output" not in built.text
            assert request.question.strip() in built.text
        elif stages[-1] == 4:
            assert "Task" not in built.text
    assert stages == sorted(stages)
    assert set(stages) == {0, 1, 2, 3, 4}


def test_only_the_last_exchanges_are_shown():
    history = tuple(Exchange(f"Old {n}?", Urgency.LOW, "Yes.") for n in range(12))
    context = FocusContext("ann", "Sort", REQUEST, history)
    for most in (10, 0):
        built = ContextBuilder(Words(), 10**4, most).build("focus", "ann", [context], ())
        assert built.history_turns == most
        assert re.findall(r"Old (\d+)", built.text) == [str(n) for n in range(12 - most, 12)]


BOB = FocusContext("bob", "Weigh parcels", None, output="Scale is on.")
CID = FocusContext("cid", "Stamp", SteeringRequest("cid", "Which stamp?", urgency=Urgency.LOW))


def test_the_flat_text_names_who_asks_at_the_top_and_the_fair_one_repeats_the_request():
    builder = ContextBuilder(Words(), 10**4)
    flat = builder.build("flat", "ann", [BOB, CONTEXT, CID], ())
    assert flat.text.startswith("# All agents. Steering is asked for by agent ann\n\n## Agent bob")
    assert "Scale is on.\nOpen request: none\n\n---\n\n## Agent ann\n" in flat.text
    assert flat.text.endswith("Open request [LOW]: Which stamp?")
    assert flat.text[slice(*flat.focus)] == FOCUS_TEXT.replace("In focus: agent", "Agent")
    fair = builder.build("fair_flat", "ann", [BOB, CONTEXT, CID], ())
    assert fair.text == (
        flat.text + "\n\n## The request to answer now\nAgent ann asks [HIGH]: Which box is next?"
    )
    soft = builder.build("soft", "ann", [BOB, CONTEXT, CID], ())
    assert (soft.text, soft.focus) == (flat.text, flat.focus)


@settings(deadline=None, max_examples=50)
@given(teams(), spare, st.sampled_from(["flat", "fair_flat", "soft"]))
def test_a_flat_focus_span_is_the_agents_own_block(team, spare, mode):
    entries, contexts = team
    built = builder_of(Words(), spare).build(mode, "agent-0", contexts, entries)
    block = built.text[slice(*built.focus)]
    assume("the frame" not in built.reductions)
    assert block.startswith("## Agent agent-0\n") and block.count("\n## Agent ") == 0
    assert "Open request [" in block
    assert len(re.findall(r"^## Agent agent-\d$", built.text, re.M)) == built.agents + 1
    if "all agents" not in built.reductions:
        whole = ContextBuilder(Words(), 10**6).build(mode, "agent-0", contexts, entries)
        assert block == whole.text[slice(*whole.focus)]  # the others go before it is touched


def test_a_flat_context_that_is_too_long_loses_the_others_first():
    others = [
        FocusContext(name, "Weigh parcels", None, CONTEXT.history * 3, "Scale is on. " * 9)
        for name in ("bob", "cid", "dan")
    ]
    builder = ContextBuilder(Words(), 10**4)
    seen = []
    for budget in range(builder.build("flat", "ann", [CONTEXT, *others], ()).tokens, 60, -1):
        builder.budget = budget
        reductions = builder.build("flat", "ann", [CONTEXT, *others], ()).reductions
        if not seen or seen[-1] != reductions:
            seen.append(reductions)
    stripped = ("histories of the others", "outputs of the others")
    assert seen[:7] == [
        (),
        stripped[:1],
        stripped,
        (*stripped, "1 agents"),
        (*stripped, "2 agents"),
        (*stripped, "3 agents"),
        (*stripped, "all agents", "oldest steering history"),
    ]


def test_the_least_budget_is_an_error_at_construction():
    least = ContextBuilder(Words(), 10**4).minimum_budget
    assert ContextBuilder(Words(), least).budget == least
    for budget in (least - 1, 0, 2.5, None):
        with pytest.raises(ValueError, match=f"at least {least}"):
            ContextBuilder(Words(), budget)
    with pytest.raises(ValueError, match="history"):
        ContextBuilder(Words(), least, -1)


@pytest.mark.parametrize("mode", MODES)
def test_with_the_least_budget_the_longest_name_and_the_start_of_the_question_show(smollm2, mode):
    name = "a1" * 8  # 16 tokens: this tokenizer splits digits
    assert TokenCounter(smollm2.tokenizer).count(name) == 16
    least = ContextBuilder(smollm2.tokenizer, 10**4).minimum_budget
    assert least < 120
    question = "Which of the boxes should I take after this one? " * 20
    context = FocusContext(name, "Sort " * 40, SteeringRequest(name, question, "Full. " * 50))
    built = ContextBuilder(smollm2.tokenizer, least).build(mode, name, [context], ())
    assert f"gent {name}\n" in built.text
    assert "Open request [MEDIUM]: Which of the" in built.text


def test_a_name_over_its_limit_leaves_the_question_alone():
    name = "n" * 500
    context = FocusContext(name, "Sort", SteeringRequest(name, "Which box? " * 100))
    built = ContextBuilder(Characters(), 300).build("focus", name, [context], ())
    assert built.text == ("Which box? " * 100)[:300]
    assert built.reductions[-1] == "the frame"


@settings(deadline=None, max_examples=25)
@given(team=teams(), spare=spare, mode=modes)
def test_contexts_fit_in_the_models_own_tokens(smollm2, team, spare, mode):
    entries, contexts = team
    builder = builder_of(smollm2.tokenizer, spare)
    built = builder.build(mode, "agent-0", contexts, entries)
    tokens = smollm2.tokenizer(built.text, add_special_tokens=False)["input_ids"]
    assert built.tokens == len(tokens) <= builder.budget


def test_unknown_modes_and_agents_are_refused():
    builder = ContextBuilder(Words(), 10**4)
    with pytest.raises(ValueError, match="'fair_flat'"):
        builder.build("fair", "ann", [CONTEXT], ())
    with pytest.raises(ValueError, match="one focus context of 'bob', with a request"):
        builder.build("flat", "bob", [CONTEXT, BOB], ())
