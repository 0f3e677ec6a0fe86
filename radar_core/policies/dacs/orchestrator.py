"""The orchestrator: one model that answers many agents, one at a time, and the user in between.

Three states. REGISTRY: nothing is being answered. FOCUS: one agent's request is. USER: a message of
the user is, from the registry alone. What happens in which order:

- Messages of the user come before requests that wait, urgent ones first. Requests follow
  `SteeringQueue`: HIGH, MEDIUM, LOW in batches, first in, first out in each.
- A HIGH request of another agent interrupts a focus session of lower urgency, and an urgent message
  of the user any. The session keeps its place in the queue, its turns and the time it has left; a
  model call under way goes on and its answer is taken up on return: no call is made twice.
- A session has several turns if the agent follows up on an answer. It ends as abandoned, with a
  text that sends the agent down its default path, when it takes too long or too many turns.
- A failed model call is tried again from the request's place in the queue, a few times; then the
  request is abandoned with the error's name.

Everything runs in one asyncio event loop, without polling; only the model may use threads.

Source: DACS, arXiv 2604.07911, section 3.2. The published implementation only logs interrupts; the
saved and resumed sessions here follow the paper's text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, Self

from radar_core.anchors import Anchor
from radar_core.checks import check_has, check_whole, is_number
from radar_core.discussion.model import (
    Answer,
    Model,
    Request,
    answer_of,
    check_model,
    check_sampling,
)
from radar_core.methods import Method
from radar_core.policies.dacs.context import MODES, BuiltContext, ContextBuilder, Mode
from radar_core.policies.dacs.log import EventLog
from radar_core.policies.dacs.queue import SteeringQueue, Ticket
from radar_core.policies.dacs.registry import Registry, RegistryEntry, Status, Urgency
from radar_core.policies.dacs.requests import (
    Exchange,
    FocusContext,
    SteeringRequest,
    SteeringResponse,
    check_text,
)
from radar_core.policies.dacs.tokens import TokenCounter
from radar_core.policies.tokens import Tokenizer
from radar_core.transcript import check_unicode

__all__ = ["DEFAULT_PATH", "FollowUp", "Orchestrator", "State"]

logger = logging.getLogger("radar_core")

DEFAULT_PATH = "[no decision was reached: go on along your default path]"
STEERING_PROMPT = (
    "You coordinate several agents that work at the same time. One of them asks you for a "
    "decision. Decide for that agent alone, from what the context says about it, name what you "
    "decided, and answer in one or two sentences."
)
USER_PROMPT = (
    "You coordinate several agents that work at the same time. Answer the user's message from the "
    "list of agents, briefly. Say so if the list does not tell."
)

FollowUp = Callable[[SteeringResponse], Awaitable[str | None]]


class State(StrEnum):
    """What the orchestrator is doing."""

    REGISTRY = "REGISTRY"
    FOCUS = "FOCUS"
    USER = "USER"


class Orchestrator:
    """Answers the requests of registered agents and the messages of the user.

    Use it as `async with Orchestrator(...) as orchestrator:`. Leaving answers what still waits;
    leaving through an exception abandons it, and whoever waits gets the default-path text.

    Args:
        model: an async callable that answers a `Request` with an `Answer`.
        tokenizer: the model's own; see `TokenCounter`.
        budget: the most tokens of a context, system prompt and answer not counted.
        mode: "focus" is DACS; "flat" and "fair_flat" are baselines; "soft" steers a flat context
            towards F(a_i) by anchors. See `ContextBuilder`.
        log: gets every event; None makes one in memory, `orchestrator.log`.
        method: the steering method of "soft"; None leaves it to the model.
        max_new_tokens: length limit of an answer.
        max_turns: the most model calls that may answer one request.
        max_seconds: the longest that a request may be in focus, in seconds; time in which others
            are answered does not count. Also the limit of an answer to the user.
        attempts: how many failed model calls end a request, at least 1.
        history: how many exchanges of an agent its contexts show at most.
        temperature: 0 answers greedily.
        seed: of sampled answers.
        steering_prompt: the system prompt of requests; Radar's own by default.
        user_prompt: the system prompt of messages of the user.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        budget: int,
        mode: Mode = "focus",
        log: EventLog | None = None,
        method: Method | None = None,
        max_new_tokens: int = 512,
        max_turns: int = 3,
        max_seconds: float = 60.0,
        attempts: int = 3,
        history: int = 10,
        temperature: float = 0.0,
        seed: int = 0,
        steering_prompt: str = STEERING_PROMPT,
        user_prompt: str = USER_PROMPT,
    ) -> None:
        check_sampling(max_new_tokens, temperature, seed)
        check_whole("max_turns", max_turns, 1)
        check_whole("attempts", attempts, 1)
        if not is_number(max_seconds) or not max_seconds > 0:  # math.inf is no limit
            raise ValueError(f"max_seconds is {max_seconds!r}; expected a time above 0")
        check_text("steering_prompt", steering_prompt, blank=True)
        check_text("user_prompt", user_prompt, blank=True)
        if log is not None:
            check_has("log", log, "write", 'EventLog("events.jsonl")')
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; expected one of {', '.join(map(repr, MODES))}")
        if method is not None and mode != "soft":
            raise ValueError(f'method is for mode="soft", which steers; the mode is {mode!r}')
        check_model(model)
        if mode == "soft" and not getattr(model, "can_steer", True):
            raise ValueError(
                f'mode="soft" steers, which a {type(model).__name__} cannot; expected '
                'SteeredModel(model, tokenizer), or mode="focus"'
            )
        self.builder = ContextBuilder(tokenizer, budget, history)
        self.mode: Mode = mode
        self.log = EventLog() if log is None else log
        self.registry = Registry(tokenizer, self.log)
        self.max_turns, self.max_seconds, self.attempts = max_turns, max_seconds, attempts
        self._model = model
        self._counter = TokenCounter(tokenizer)
        self._method = method
        self._settings: dict[str, Any] = dict(
            max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
        )
        self._prompts = {State.FOCUS: steering_prompt, State.USER: user_prompt}
        self._state = State.REGISTRY
        self._agent_in_focus: str | None = None
        self._queue: SteeringQueue[_Session] = SteeringQueue()
        self._messages: list[_Message] = []
        self._message_ids = count(1)
        self._open: list[_Session] = []  # asked and not answered, oldest first
        self._histories: dict[str, tuple[Exchange, ...]] = {}
        self._outputs: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._closing = False
        self._loop: asyncio.Task[None] | None = None
        self.log.write("RUN_START", mode=mode, budget=budget, max_new_tokens=max_new_tokens)

    @property
    def state(self) -> State:
        """What the orchestrator is doing."""
        return self._state

    @property
    def agent_in_focus(self) -> str | None:
        """The agent whose request is being answered; None outside FOCUS."""
        return self._agent_in_focus

    def register(self, agent_id: str, task: str) -> RegistryEntry:
        """Add an agent; see `Registry.register`."""
        entry = self.registry.register(agent_id, task)
        self._histories[agent_id], self._outputs[agent_id] = (), ""
        return entry

    def heartbeat(
        self,
        agent_id: str,
        *,
        status: Status | str | None = None,
        summary: str | None = None,
        urgency: Urgency | str | None = None,
        output: str | None = None,
    ) -> RegistryEntry:
        """Take in what is new about an agent, on every step or change of status.

        Args:
            agent_id: its name.
            status: as in `Registry.update`, as are the next two.
            summary: its last output in a line, for the registry.
            urgency: how much it needs an answer.
            output: its partial output in full, for its own focus context.

        Returns:
            The new registry entry.

        Raises:
            ValueError: the agent is unknown or a value is none of its kind.
        """
        entry = self.registry.update(agent_id, status=status, summary=summary, urgency=urgency)
        if output is not None:
            self._outputs[agent_id] = FocusContext(agent_id, entry.task, output=output).output
        return entry

    async def steer(
        self, request: SteeringRequest, follow_up: FollowUp | None = None
    ) -> SteeringResponse:
        """Ask for a decision and wait for it.

        An agent may ask again before it is answered: both requests are kept and answered in their
        order, the later one with the earlier one's answer in its history. Cancelling the wait
        withdraws the request.

        Args:
            request: what an agent asks.
            follow_up: called with every answer; what it returns is asked next, in the same session,
                None ends the session. None accepts the first answer.

        Returns:
            The decision; `abandoned` says why if there is none.

        Raises:
            ValueError: the agent is unknown or has ended, the request's id is waiting already, or
                an argument is none of its kind.
            RuntimeError: the orchestrator does not run.
            Exception: what `follow_up` raised, or what ended the orchestrator.
        """
        self._check_running()
        if not isinstance(request, SteeringRequest):
            raise ValueError(f"request is {request!r}; expected a SteeringRequest")
        if follow_up is not None:
            check_has("follow_up", follow_up, "__call__", "an async function of a response")
        if self.registry.entry(request.agent_id).status.ended:
            raise ValueError(f"agent {request.agent_id!r} has ended; a heartbeat may set it going")
        if any(session.request.request_id == request.request_id for session in self._open):
            raise ValueError(f"request {request.request_id!r} is waiting already")
        future = asyncio.get_running_loop().create_future()
        session = _Session(request, follow_up, future)
        if request.relevant_context.strip():
            self._outputs[request.agent_id] = request.relevant_context
        self.log.write(
            "STEERING_REQUEST",
            agent_id=request.agent_id,
            request_id=request.request_id,
            urgency=request.urgency,
            blocking=request.blocking,
            question=request.question,
        )
        self._open.append(session)
        session.ticket = self._queue.put(session, request.urgency)
        self._show_waiting(request.agent_id)
        self._wake.set()
        try:
            return await future
        finally:
            if session in self._open:  # the wait was cancelled
                self._withdraw(session)

    async def ask(self, message: str, *, urgent: bool = False) -> str:
        """Answer a message of the user from the registry.

        Args:
            message: what the user says; not blank.
            urgent: whether it may interrupt a focus session; else it waits for the session's end.

        Returns:
            The answer.

        Raises:
            ValueError: the message is blank, or holds half a surrogate pair; `urgent` is no bool.
            RuntimeError: the orchestrator does not run, was closed, or the model failed as often as
                it may; the cause is its last error.
        """
        self._check_running()
        if not isinstance(message, str) or not message.strip():
            raise ValueError(f"message is {message!r}; expected a text")
        check_unicode("message", message)
        if not isinstance(urgent, bool):
            raise ValueError(f"urgent is {urgent!r}; expected True or False")
        future = asyncio.get_running_loop().create_future()
        waiting = _Message(f"user-{next(self._message_ids)}", message, urgent, future)
        # Written first: a message that the log refuses must not be answered later to nobody.
        self.log.write("USER_MESSAGE", message_id=waiting.message_id, urgent=urgent, text=message)
        self._messages.append(waiting)
        self._messages.sort(key=lambda message: not message.urgent)
        self._wake.set()
        try:
            return await waiting.future
        finally:
            if waiting in self._messages:
                self._messages.remove(waiting)

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise RuntimeError("an orchestrator runs once; make another one")
        self._loop = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._loop is not None
        reason = "done" if error is None else _named(error)
        self._closing = True
        self._wake.set()
        try:
            if error is None:
                await self._loop  # what still waits is answered first
        except BaseException as failed:
            reason = _named(failed)
            raise
        finally:
            _drop(self._loop)
            self._abandon_all("closed")
            self.log.write("RUN_END", reason=reason)

    async def _run(self) -> None:
        try:
            while True:
                if self._messages:
                    await self._answer(self._messages[0])
                elif (ticket := self._queue.take()) is not None:
                    await self._serve(ticket.item)
                elif self._closing:
                    return
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except asyncio.CancelledError:  # who cancels sees to those that wait
            raise
        except BaseException as error:  # a fault here must not leave anybody waiting for ever
            self._fail_all(error)
            raise

    async def _serve(self, session: _Session) -> None:
        """Hold a session, or go on with one, until it ends or is interrupted."""
        request = session.request
        self._enter(State.FOCUS, request.agent_id)
        if session.interrupted:
            session.interrupted = False
            self.log.write("RESUME", **session.about, turns=session.turns, used=session.seconds)
        self.registry.update(request.agent_id, pending=True)
        try:
            response = await self._converse(session)
        except _Interrupted as interrupted:
            session.interrupted = True
            self.log.write(
                "INTERRUPT",
                **session.about,
                by=interrupted.by,
                turns=session.turns,
                used=session.seconds,
            )
            self._queue.put_back(session.place)
            return  # still in focus, until what interrupted it is
        except _Withdrawn:
            pass  # `steer` saw to it
        except _Expired as expired:
            used = session.seconds
            self.log.write("FOCUS_TIMEOUT", **session.about, reason=expired.reason, used=used)
            self._deliver(session, self._abandoned(session, expired.reason))
        except _FollowUpFailed as failed:
            self.log.write("STEERING_ABANDONED", **session.about, reason=_named(failed.error))
            self._close(session)
            session.future.set_exception(failed.error)
        except _CallFailed as failed:
            session.failures += 1
            reason = _named(failed.error)
            self.log.write("CALL_FAILED", **session.about, error=reason, attempt=session.failures)
            if session.failures < self.attempts:
                self._queue.put_back(session.place)
            else:
                logger.warning(
                    "%s gets no decision, as the model failed: %s", request.agent_id, reason
                )
                self._deliver(session, self._abandoned(session, reason))
        else:
            self._deliver(session, response)
        self._enter(State.REGISTRY)

    async def _converse(self, session: _Session) -> SteeringResponse:
        while True:
            if session.response is None:
                answer = await self._within(session, partial(self._turn, session), _CallFailed)
                self._take_answer(session, answer)
            response, follow_up = session.response, session.follow_up
            assert response is not None
            if follow_up is None:
                return response
            start = partial(_followed_up, follow_up, response)
            question = await self._within(session, start, _FollowUpFailed)
            if question is None:
                return response
            if session.turns >= self.max_turns:
                raise _Expired("turns")
            try:
                session.request = replace(session.request, question=question)
            except ValueError as error:
                raise _FollowUpFailed(error) from error
            session.response = None

    def _turn(self, session: _Session) -> Coroutine[Any, Any, Answer]:
        """Build the context now and return the call that answers it."""
        agent_id = session.request.agent_id
        contexts = [
            self._focus_context(entry, session)
            for entry in self.registry.entries
            if self.mode != "focus" or entry.agent_id == agent_id
        ]
        built = self.builder.build(self.mode, agent_id, contexts, self.registry.entries)
        session.context = built
        return self._call(State.FOCUS, built, session.about)

    def _take_answer(self, session: _Session, answer: Answer) -> None:
        request, built = session.request, session.context
        assert built is not None
        session.turns += 1
        exchange = Exchange(request.question, request.urgency, answer.text)
        self._histories[request.agent_id] += (exchange,)
        session.response = SteeringResponse(
            request.request_id,
            request.agent_id,
            answer.text,
            answer.prompt_tokens or built.tokens,
            self.mode,
            session.turns,
        )

    async def _answer(self, message: _Message) -> None:
        """Answer a message of the user; it stays the next one until it is answered."""
        self._enter(State.USER)
        about = {"message_id": message.message_id}
        call: asyncio.Task[Answer] | None = None
        try:
            built = self.builder.registry(self.registry.entries, message.text)
            call = asyncio.ensure_future(self._call(State.USER, built, about))
            awaited: set[asyncio.Future[Any]] = {call, message.future}
            await asyncio.wait(
                awaited,
                timeout=self.max_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if message.future.done():  # the wait was cancelled, and `ask` saw to it
                return
            if not call.done():
                raise TimeoutError(f"no answer within {self.max_seconds:g} seconds")
            answer = _result(call)
        except Exception as error:
            message.failures += 1
            self.log.write("CALL_FAILED", **about, error=_named(error), attempt=message.failures)
            if message.failures >= self.attempts:
                self._messages.remove(message)
                failed = RuntimeError(f"the model failed to answer the user: {_named(error)}")
                failed.__cause__ = error
                message.future.set_exception(failed)
        else:
            self._messages.remove(message)
            self.log.write("USER_RESPONSE", **about, text=answer.text)
            message.future.set_result(answer.text)
        finally:
            if call is not None:
                _drop(call)
            self._enter(State.REGISTRY)

    async def _within(
        self,
        session: _Session,
        start: Callable[[], Coroutine[Any, Any, Any]],
        failure: Callable[[Exception], Exception],
    ) -> Any:
        """Await something for a session, which may be interrupted, run out of time or be withdrawn.

        What an interrupted session awaits goes on; the session comes back to the same awaitable.
        """
        began = time.monotonic()
        used = session.seconds
        try:
            while session.awaited is None or not session.awaited.done():
                if session.future.done():
                    raise _Withdrawn
                if (by := self._interrupter(session)) is not None:
                    raise _Interrupted(by)
                if session.awaited is None:
                    try:
                        started = start()  # a context is built here, by the tokenizer's count
                    except Exception as error:
                        raise failure(error) from error
                    session.awaited = asyncio.ensure_future(started)
                self._wake.clear()
                left = self.max_seconds - used - (time.monotonic() - began)
                if left <= 0:
                    raise _Expired("time")
                await self._woken({session.awaited, session.future}, left)
            if session.future.done():
                raise _Withdrawn
            awaited, session.awaited = session.awaited, None
            try:
                return _result(awaited)
            except Exception as error:
                raise failure(error) from error
        finally:
            session.seconds = used + time.monotonic() - began

    async def _woken(self, awaited: set[asyncio.Future[Any]], timeout: float) -> None:
        wake = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait(
                {*awaited, wake}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            wake.cancel()

    def _interrupter(self, session: _Session) -> str | None:
        """Who may interrupt a session now; an agent never interrupts itself."""
        if any(message.urgent for message in self._messages):
            return "user"
        if session.request.urgency is Urgency.HIGH:
            return None
        for ticket in self._queue.waiting:
            asking = ticket.item.request
            if asking.urgency is Urgency.HIGH and asking.agent_id != session.request.agent_id:
                return asking.agent_id
        return None

    async def _call(self, state: State, built: BuiltContext, about: dict[str, str]) -> Answer:
        self.log.write(
            "CONTEXT_BUILT",
            **about,
            mode=built.mode.upper(),
            token_count=built.tokens,
            registry_entries=built.agents,
            steering_history_turns=built.history_turns,
            reductions=list(built.reductions),
        )
        messages = [
            {"role": "system", "content": self._prompts[state]},
            {"role": "user", "content": built.text},
        ]
        steered: dict[str, Any] = {}
        if built.mode == "soft" and built.focus is not None:
            start, end = built.focus
            steered = dict(anchors=[Anchor(1, start, end)], method=self._method)
        began = time.perf_counter()
        answer = await answer_of(self._model, Request(messages, **self._settings, **steered))
        check_unicode("the model's answer", answer.text)  # it is part of later prompts
        self.log.write(
            "LLM_CALL",
            **about,
            context_tokens=answer.prompt_tokens or built.tokens,
            response_tokens=answer.completion_tokens or self._counter.count(answer.text),
            anchor_tokens=answer.anchor_tokens,
            latency_ms=1000 * (time.perf_counter() - began),
        )
        return answer

    def _focus_context(self, entry: RegistryEntry, session: _Session) -> FocusContext:
        """F of an agent: with the request in session, or the one it has waited with the longest."""
        agent_id = entry.agent_id
        open_requests = [s.request for s in self._open if s.request.agent_id == agent_id]
        own = session.request.agent_id == agent_id
        request = session.request if own else next(iter(open_requests), None)
        history = self._histories[agent_id]
        return FocusContext(agent_id, entry.task, request, history, self._outputs[agent_id])

    def _deliver(self, session: _Session, response: SteeringResponse) -> None:
        if response.abandoned is not None:
            self.log.write("STEERING_ABANDONED", **session.about, reason=response.abandoned)
        self.log.write(
            "STEERING_RESPONSE",
            **session.about,
            text=response.text,
            context_tokens=response.context_tokens,
            mode=response.mode.upper(),
            turns=response.turns,
            abandoned=response.abandoned,
        )
        self._close(session)
        if not session.future.done():
            session.future.set_result(response)

    def _abandoned(self, session: _Session, reason: str) -> SteeringResponse:
        tokens = 0 if session.context is None else session.context.tokens
        request = session.request
        return SteeringResponse(
            request.request_id,
            request.agent_id,
            DEFAULT_PATH,
            tokens,
            self.mode,
            session.turns,
            reason,
        )

    def _withdraw(self, session: _Session) -> None:
        self.log.write("STEERING_ABANDONED", **session.about, reason="withdrawn")
        self._close(session)

    def _abandon_all(self, reason: str) -> None:
        """Let nobody wait for what will not come."""
        for session in list(self._open):
            self._deliver(session, self._abandoned(session, reason))
        self._fail_all(RuntimeError(f"the orchestrator was {reason} before it answered"))

    def _fail_all(self, error: BaseException) -> None:
        """As `_abandon_all`, but with an error, and with no use of what may have failed."""
        futures: list[asyncio.Future[Any]] = [waiting.future for waiting in self._open]
        futures += [waiting.future for waiting in self._messages]
        for future in futures:
            if not future.done():
                future.set_exception(error)
        for session in self._open:
            if session.awaited is not None:
                _drop(session.awaited)
        self._open.clear()
        self._messages.clear()

    def _close(self, session: _Session) -> None:
        """Forget a session and say in the registry what its agent is doing now."""
        self._open.remove(session)
        self._queue.remove(session.place)
        if session.awaited is not None:
            _drop(session.awaited)
        agent_id = session.request.agent_id
        self.registry.update(agent_id, pending=False)
        self._show_waiting(agent_id)

    def _show_waiting(self, agent_id: str) -> None:
        requests = [s.request for s in self._open if s.request.agent_id == agent_id]
        urgency = max((r.urgency for r in requests), key=lambda u: u.rank, default=Urgency.LOW)
        status = self.registry.entry(agent_id).status
        if any(request.blocking for request in requests):
            status = Status.WAITING_STEERING if not status.ended else status
        elif status is Status.WAITING_STEERING:
            status = Status.RUNNING
        self.registry.update(agent_id, status=status, urgency=urgency)

    def _enter(self, state: State, agent_id: str | None = None) -> None:
        if (state, agent_id) == (self._state, self._agent_in_focus):
            return
        self.log.write(
            "TRANSITION",
            **{"from": self._state, "to": state},
            from_agent=self._agent_in_focus,
            agent_id=agent_id,
        )
        self._state, self._agent_in_focus = state, agent_id

    def _check_running(self) -> None:
        if self._loop is None or self._loop.done() or self._closing:
            raise RuntimeError(
                "the orchestrator does not run; call it inside `async with Orchestrator(...)`"
            )


@dataclass(eq=False)
class _Session:
    """A request from its arrival to its answer, with all that an interrupt has to save."""

    request: SteeringRequest
    follow_up: FollowUp | None
    future: asyncio.Future[SteeringResponse]
    ticket: Ticket[_Session] | None = None
    context: BuiltContext | None = None
    response: SteeringResponse | None = None
    awaited: asyncio.Task[Any] | None = None
    turns: int = 0
    seconds: float = 0.0
    failures: int = 0
    interrupted: bool = False

    @property
    def place(self) -> Ticket[_Session]:
        assert self.ticket is not None
        return self.ticket

    @property
    def about(self) -> dict[str, str]:
        return {"agent_id": self.request.agent_id, "request_id": self.request.request_id}


@dataclass(eq=False)
class _Message:
    """A message of the user."""

    message_id: str
    text: str
    urgent: bool
    future: asyncio.Future[str]
    failures: int = 0


class _Interrupted(Exception):
    """Somebody more urgent has to be served."""

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.by = by


class _Withdrawn(Exception):
    """Nobody waits for the answer any more."""


class _Expired(Exception):
    """The session took too long ("time") or too many turns ("turns")."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Failed(Exception):
    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _CallFailed(_Failed):
    """The model raised, or the tokenizer as the context was built."""


class _FollowUpFailed(_Failed):
    """The agent's own `follow_up` raised."""


async def _followed_up(follow_up: FollowUp, response: SteeringResponse) -> str | None:
    return await follow_up(response)


def _result(task: asyncio.Task[Any]) -> Any:
    """A finished task's result; its being cancelled is a failure of the task, not of the reader."""
    if task.cancelled():
        raise RuntimeError("the call was cancelled")
    return task.result()


def _drop(task: asyncio.Task[Any]) -> None:
    """Cancel a task that nobody waits for, and have its error, if any, count as seen."""
    task.cancel()
    task.add_done_callback(lambda task: task.cancelled() or task.exception())


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
