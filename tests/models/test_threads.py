"""Random sequences of steering on two models: what is not steered stays as it is, bit for bit."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radar_core import SPA, AttentionBias, NoSteering, Steered, TargetMass
from tests.models.test_attachment import snapshot
from tests.models.tiny import FAMILIES, prompts, tiny_model

INPUTS = prompts([9, 6], [[3, 4], [2]])
ANCHORS = INPUTS.pop("anchors")
METHODS = [
    SPA(1.7),
    SPA(1.0),
    AttentionBias(2.0),
    AttentionBias(2.0, layers=[1], heads=[0, 3], queries="generated"),
    TargetMass(0.3),
    NoSteering(),
]
WHICH = st.integers(0, 1)


class Stop(Exception):
    """Raised inside a model."""


def fail(*_):
    raise Stop


def logits(model):
    with torch.no_grad():
        return model(**INPUTS).logits


class Steering(RuleBasedStateMachine):
    """Two models of one config object, entered, left, run and interrupted in any order."""

    def __init__(self):
        super().__init__()
        first = tiny_model("Llama", shape=FAMILIES["Llama"] | {"num_hidden_layers": 2})
        torch.manual_seed(3)
        second = type(first)(first.config).eval()
        second.generation_config = first.generation_config
        self.models = [first, second]
        self.blocks = [None, None]
        self.plain = [logits(model) for model in self.models]
        self.before = [snapshot(model)[2] for model in self.models]
        self.answers = {}

    @rule(which=WHICH, method=st.sampled_from(METHODS))
    def enter(self, which, method):
        block = method.applied_to(self.models[which], ANCHORS)
        if self.blocks[which] is None:
            block.__enter__()
            self.blocks[which] = (method, block)
            return
        with pytest.raises(RuntimeError, match="already steered"):
            block.__enter__()

    @precondition(lambda self: any(self.blocks))
    @rule(which=WHICH, error=st.sampled_from([None, Stop, KeyboardInterrupt]))
    def leave(self, which, error):
        if self.blocks[which] is not None:
            _, block = self.blocks[which]
            self.blocks[which] = None
            block.__exit__(error, None, None)

    @rule(which=WHICH)
    def generate(self, which):
        """The same method on the same model gives the same, whatever came between."""
        method = self.blocks[which] and self.blocks[which][0]
        out = self.models[which].generate(**INPUTS, max_new_tokens=2, do_sample=False)
        assert torch.equal(out, self.answers.setdefault((which, str(method)), out))

    @rule(which=WHICH)
    def interrupt(self, which):
        """An error in the middle of a forward pass."""
        layer = self.models[which].model.layers[1]
        handle = layer.register_forward_pre_hook(fail)
        with pytest.raises(Stop):
            self.models[which].generate(**INPUTS, max_new_tokens=2)
        handle.remove()

    @rule(which=WHICH, method=st.sampled_from(METHODS))
    def call_steered(self, which, method):
        steered = Steered(self.models[which], method=method)
        if self.blocks[which] is not None:
            with pytest.raises(RuntimeError, match="already steered"):
                steered.generate(**INPUTS, anchors=ANCHORS, max_new_tokens=1)
            return
        out = steered.generate(**INPUTS, anchors=ANCHORS, max_new_tokens=2, do_sample=False)
        assert torch.equal(out, self.answers.setdefault((which, str(method)), out))

    @precondition(lambda self: any(self.blocks))
    @rule(which=WHICH)
    def enter_from_another_thread(self, which):
        if self.blocks[which] is None:
            return
        caught = []

        def enter():
            try:
                AttentionBias(1.0).applied_to(self.models[which], ANCHORS).__enter__()
            except RuntimeError as error:
                caught.append(str(error))

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert "in another thread" in caught[0]

    @invariant()
    def untouched_models_are_as_they_were(self):
        for which, model in enumerate(self.models):
            if self.blocks[which] is None:
                assert snapshot(model)[2] == self.before[which]
                assert torch.equal(logits(model), self.plain[which])

    def teardown(self):
        for which in (1, 0):
            self.leave(which, None)
        self.untouched_models_are_as_they_were()


TestSteering = Steering.TestCase
TestSteering.settings = settings(max_examples=8, stateful_step_count=12, deadline=None)


def test_two_threads_each_with_a_model_of_one_config():
    """Entering, running and leaving at the same time; each result is that of the model alone."""
    first = tiny_model("Llama")
    torch.manual_seed(3)
    second = type(first)(first.config).eval()
    models, failed = [first, second], []
    steered = [SPA(1.7), AttentionBias(2.0)]

    def once(model, method):
        with method.applied_to(model, ANCHORS):
            during = logits(model)
        return during, logits(model)

    alone = [once(*pair) for pair in zip(models, steered, strict=True)]

    def work(which):
        for _ in range(12):
            both = once(models[which], steered[which])
            failed.extend(not torch.equal(*pair) for pair in zip(both, alone[which], strict=True))

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failed) == 48 and not any(failed)


@pytest.mark.parametrize("method", METHODS)
def test_blocks_one_after_another_leave_nothing(method):
    """Names, hooks and memory do not grow with the number of blocks."""
    model = tiny_model("Llama")
    before, plain = snapshot(model), logits(model)
    for _ in range(20):
        with method.applied_to(model, ANCHORS):
            logits(model)
    assert snapshot(model) == before and torch.equal(logits(model), plain)
