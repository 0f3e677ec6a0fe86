"""Systems that others are held against: one agent, self-consistency, a chain, a debate.

Each is a `Discussion`, so it is logged and resumed as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from radar_core.checks import check_number, check_whole
from radar_core.discussion.agent import Agent, names_of
from radar_core.discussion.decision import ByLast, ByMajority
from radar_core.discussion.model import Model
from radar_core.discussion.runner import Discussion
from radar_core.policies.full import FullContext
from radar_core.policies.policy import Ask, Context, Policy, Turn
from radar_core.schedule import Schedule
from radar_core.topology import Topology

__all__ = ["DebatePolicy", "chain", "debate", "self_consistency", "single_agent"]

Parse = Callable[[str], str | None]

SOLVER = Agent(
    name="solver",
    role="solver",
    system="You solve tasks carefully.",
    instruction="Think step by step, then give your final answer.",
)
REVISION = (
    "Compare these with your own answer, keep what holds up, and give your answer anew, complete "
    "and in the same form as before."
)


@dataclass(frozen=True)
class DebatePolicy:
    """Shows each debater its own conversation: the task, its answers, and after each the others'.

    Source: multi-agent debate (Du et al., arXiv 2305.14325); the wording is Radar's own. What the
    others said is the user's message that follows one's own answer, without names and without what
    anybody said in rounds before. Only what was said in earlier rounds is read.

    Args:
        revision: what to do with the others' answers; stands below them.
    """

    revision: str = REVISION

    async def context(self, turn: Turn, ask: Ask) -> Context:
        """Write the receiver's prompt; see `Policy.context`."""
        hops = turn.topology.hops_to(turn.receiver)
        messages = [] if turn.system is None else [{"role": "system", "content": turn.system}]
        messages.append({"role": "user", "content": turn.query})
        said = [message for message in turn.transcript if message.round < turn.round]
        for round in sorted({message.round for message in said}):
            others = ""
            for message in said:
                if message.round == round and message.sender == turn.receiver:
                    messages.append({"role": "assistant", "content": message.text})
                elif message.round == round and hops[message.sender] == 1:
                    others += f"Another agent answered:\n{message.text}\n\n"
            if others:
                messages.append({"role": "user", "content": others + self.revision})
        return Context(messages)


def single_agent(model: Model, agent: Agent = SOLVER, **options: Any) -> Discussion:
    """Build one agent that answers once.

    Args:
        model: answers the prompts.
        agent: the agent.
        **options: of `Discussion`, such as max_new_tokens, seed and log.

    Returns:
        The discussion.
    """
    usual: dict[str, Any] = {"policy": FullContext(), "rounds": 1, "decision": ByLast()}
    return Discussion([agent], Topology([], names_of([agent])), model, **(usual | options))


def self_consistency(
    model: Model, parse: Parse, samples: int = 8, agent: Agent = SOLVER, **options: Any
) -> Discussion:
    """Build chain of thought with self-consistency (Wang et al., arXiv 2203.11171).

    One agent's answer is sampled several times, each time with a seed of its own, and the most
    frequent answer wins.

    Args:
        model: answers the prompts.
        parse: finds the answer in a text, as in `ByMajority`.
        samples: how many.
        agent: the agent; its samples are named after it, "solver 1" and so on.
        **options: of `Discussion`; the temperature is 0.7 unless given.

    Returns:
        The discussion.

    Raises:
        ValueError: a value is unusable, or the temperature is 0, which would draw the same answer
            every time.
    """
    usual: dict[str, Any] = {"policy": FullContext(), "rounds": 1, "temperature": 0.7} | options
    check_number("temperature", usual["temperature"])
    if usual["temperature"] == 0:
        raise ValueError("temperature is 0, so all samples would be the same; expected such as 0.7")
    check_whole("samples", samples, 1)
    names_of([agent])  # which refuses what is no agent
    agents = [replace(agent, name=f"{agent.name} {number + 1}") for number in range(samples)]
    nobody = Topology([], [one.name for one in agents])
    return Discussion(agents, nobody, model, decision=ByMajority(parse), **usual)


def chain(
    agents: Sequence[Agent], model: Model, policy: Policy | None = None, **options: Any
) -> Discussion:
    """Build a chain, in which each agent hears those before it and the last one's word counts.

    Args:
        agents: in the order in which they speak.
        model: answers the prompts.
        policy: what the agents are shown; None for everything that reaches them.
        **options: of `Discussion`; there is one round unless given.

    Returns:
        The discussion.
    """
    usual: dict[str, Any] = {"rounds": 1, "decision": ByLast()}
    schedule = Schedule.chain(names_of(agents))
    return Discussion(agents, schedule, model, policy or FullContext(), **(usual | options))


def debate(
    model: Model,
    parse: Parse,
    agents: int | Sequence[Agent] = 3,
    rounds: int = 2,
    policy: Policy | None = None,
    **options: Any,
) -> Discussion:
    """Build a multi-agent debate (Du et al., arXiv 2305.14325), and the majority decides.

    All debaters answer at the same time. From the second round on each is shown what the others
    answered in the round before, and answers anew. An answer that cannot be parsed has no vote.

    Args:
        model: answers the prompts.
        parse: finds the answer in a text, as in `ByMajority`.
        agents: how many, all alike and told apart by their seeds, or the agents themselves.
        rounds: how many.
        policy: what the agents are shown; None for `DebatePolicy()`, the paper's.
        **options: of `Discussion`; agents that are all alike have the temperature 0.7 unless given.

    Returns:
        The discussion.
    """
    if isinstance(agents, int):
        names = Topology.debate(agents).agents
        agents = [replace(SOLVER, name=name) for name in names]
        options.setdefault("temperature", 0.7)
    options.setdefault("decision", ByMajority(parse))
    schedule = Schedule.debate(names_of(agents))
    return Discussion(agents, schedule, model, policy or DebatePolicy(), rounds, **options)
