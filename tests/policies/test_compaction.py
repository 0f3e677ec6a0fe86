"""A summary in place of the conversation, for one call of the model."""

import asyncio

import pytest

from radar_core.policies import Compaction, FullContext
from tests.policies.turns import context, no_model, turn

SAID = [
    ("far", 0, "The first message. " * 20),
    ("solver", 0, "The second message. " * 20),
    ("after", 0, "Unheard."),
    ("near", 1, "The last message."),
]


class Summary:
    def __init__(self, text="  They agreed.\n"):
        self.text = text
        self.asked = []

    async def __call__(self, messages, max_new_tokens):
        self.asked.append((messages, max_new_tokens))
        return self.text


def test_the_summary_stands_in_the_place_of_the_conversation():
    ask = Summary()
    shown = context(Compaction(max_new_tokens=99, threshold=0), turn(SAID, system="You."), ask)
    assert [message["content"] for message in shown.messages] == [
        "You.",
        "A summary of the conversation so far:\n\nThey agreed.\n\n"
        "Your task, solver:\nWhat is the budget?",
    ]
    assert shown.anchors == ()
    (((message,), length),) = ask.asked
    assert length == 99 and message["role"] == "user"
    said = message["content"]
    for heard in (SAID[0], SAID[1], SAID[3]):
        assert f"[{heard[0]}, round {heard[1]}]\n{heard[2].strip()}" in said
    assert "Unheard" not in said and "budget" not in said  # the query is not looked at


def test_the_last_messages_stay_as_they_are():
    ask = Summary()
    shown = context(Compaction(keep_last=2, threshold=0), turn(SAID), ask)
    assert shown.messages[0]["content"] == (
        "A summary of the conversation so far:\n\nThey agreed.\n\nWhat was said since:\n\n"
        f"[solver (you), round 0]\n{SAID[1][2]}\n\n[near, round 1]\nThe last message.\n\n"
        "Your task, solver:\nWhat is the budget?"
    )
    assert "last message" not in ask.asked[0][0][0]["content"]
    full = context(Compaction(keep_last=3, threshold=0), turn(SAID), no_model)
    assert full == context(FullContext(), turn(SAID))


def test_short_histories_are_left_as_they_are():
    class Words:
        def encode(self, text):
            return text.split()

    now = turn([("near", 0, "one two three")])  # and eight words around it
    assert context(Compaction(threshold=10, tokenizer=Words()), now) == context(FullContext(), now)
    ask = Summary()
    context(Compaction(threshold=9, tokenizer=Words()), now, ask)
    assert len(ask.asked) == 1
    for policy in (Compaction(), Compaction(threshold=0)):
        assert context(policy, turn([])) == context(FullContext(), turn([]))


def test_a_blank_summary_is_not_used_and_said_once(caplog):
    policy = Compaction(threshold=0)
    for _ in range(2):
        shown = context(policy, turn(SAID), Summary("  \n"))
        assert shown == context(FullContext(), turn(SAID))
    assert caplog.text.count("The model's summary for 'solver' in round 2 is blank") == 1


@pytest.mark.parametrize(
    "arguments", [dict(max_new_tokens=0), dict(keep_last=-1), dict(threshold=0.5)]
)
def test_unusable_settings_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Compaction(**arguments)


def test_a_real_model_summarises(smollm2):
    from radar_core.steered import Steered

    steered = Steered(smollm2.model, smollm2.tokenizer)
    written = []

    async def ask(messages, max_new_tokens):
        reply = await asyncio.to_thread(
            steered.chat, list(messages), anchors=[], max_new_tokens=max_new_tokens
        )
        written.append(reply.text.strip())
        return reply.text

    shown = context(Compaction(max_new_tokens=8, threshold=0), turn(SAID[3:]), ask)
    assert written[0] and f"so far:\n\n{written[0]}\n\nYour task" in shown.messages[0]["content"]
