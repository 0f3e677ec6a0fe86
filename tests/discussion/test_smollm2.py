"""A discussion with the real model and encoder, from notes to the anchored answer."""

from __future__ import annotations

import asyncio
import json

from radar_core import AttentionBias
from radar_core.discussion import Agent, ByLast, Discussion, SteeredModel, Task
from radar_core.policies.agent_radar import AgentRadarPolicy
from radar_core.schedule import Schedule

TASK = Task(
    "Which city is the meeting in?",
    notes={"reader": "The meeting is in Lisbon. Lunch is at noon. The hall has two doors."},
)


def test_what_one_agent_knows_is_anchored_for_the_next_and_answered(smollm2, tmp_path):
    agents = [
        Agent("reader", "reader", "Copy your notes, word by word."),
        Agent("solver", "solver", "Answer with the name of the city."),
    ]
    model = SteeredModel(smollm2.model, smollm2.tokenizer, AttentionBias(1.0))
    discussion = Discussion(
        agents,
        Schedule.chain(["reader", "solver"]),
        model,
        AgentRadarPolicy(top_k=1, anchor_query=False),
        rounds=1,
        decision=ByLast(),
        max_new_tokens=24,
        log=tmp_path / "log.jsonl",
    )
    outcome = asyncio.run(discussion.run(TASK))
    reader, solver = outcome.messages
    assert "Lisbon" in reader.text and "Lisbon" in outcome.answer
    assert reader.answer.anchor_tokens == 0 < solver.answer.anchor_tokens < 24
    assert solver.policy_seconds > 0

    again = asyncio.run(discussion.run(TASK))
    assert [said.answer for said in again.messages] == [reader.answer, solver.answer]
    assert all(said.from_log for said in again.messages) and again.seconds < 1
    header = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert " at 0x" not in json.dumps(header) and header["settings"]["policy"]["top_k"] == 1
