"""Which backend runs, what refuses a call and what is said about it."""

import logging
import types

import pytest
import torch

from radar_kernels import (
    anchor_attention,
    available_backends,
    backends,
    blend_logits,
    explain,
)
from radar_kernels.anchor_attention import cpp


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("RADAR_BACKEND", raising=False)
    monkeypatch.setattr(backends, "_logged", set())


@pytest.fixture
def call():
    key = torch.randn(1, 2, 8, 16)
    return torch.randn(1, 4, 12, 16), key, key, torch.ones(1, 8, dtype=torch.bool)


@pytest.fixture
def stand_in(monkeypatch):
    """Puts a made-up module in the place of the C++ backend."""

    def put(absent=None, unsupported=None):
        module = types.SimpleNamespace(
            run=lambda arguments: ("stand-in", None),
            unsupported=lambda arguments: unsupported,
        )
        real_module, real_absence = backends._module, backends._absence

        def is_cpp(operator, backend):
            return (operator, backend) == ("anchor_attention", "cpp")

        def module_of(operator, backend):
            return module if is_cpp(operator, backend) else real_module(operator, backend)

        def absence_of(operator, backend):
            return absent if is_cpp(operator, backend) else real_absence(operator, backend)

        def unsupported_of(operator, backend):
            return getattr(module_of(operator, backend), "unsupported", None)

        # The shortcut past the choice is the real module's.
        monkeypatch.setattr(cpp, "attend_at_once", lambda *call: None)
        monkeypatch.setattr(backends, "_module", module_of)
        monkeypatch.setattr(backends, "_absence", absence_of)
        monkeypatch.setattr(backends, "_unsupported", unsupported_of)

    return put


def test_lists_every_backend_with_why_it_is_not_there():
    listed = available_backends(anchor_attention)
    assert list(listed) == ["triton", "cpp", "sdpa", "reference"]
    assert listed == available_backends("anchor_attention")
    assert listed["sdpa"] is None and listed["reference"] is None
    if not torch.cuda.is_available():
        assert listed["triton"]
    with pytest.raises(ValueError, match="blend_logits"):
        available_backends("attention")


def test_the_best_that_can_serve_the_call_runs(call, stand_in):
    stand_in()
    assert anchor_attention(*call, bias=1.0) == "stand-in"
    explanation = explain(anchor_attention, *call, bias=1.0)
    assert explanation.chosen == "cpp"
    assert "cuda" in explanation.refused["triton"]
    assert "'cpp'" in str(explanation) and "not 'triton'" in str(explanation)


def test_an_explicit_backend_never_falls_back(call, stand_in):
    stand_in(unsupported="the moon is full")
    with pytest.raises(ValueError, match=r"backend='cpp'.*the moon is full"):
        anchor_attention(*call, bias=1.0, backend="cpp")
    with pytest.raises(ValueError, match="the moon is full"):
        explain(anchor_attention, *call, bias=1.0, backend="cpp")
    with pytest.raises(ValueError, match="triton, cpp, sdpa, reference"):
        anchor_attention(*call, bias=1.0, backend="sycl")
    with pytest.raises(ValueError, match="blend_logits's backends: triton, cpp, reference"):
        blend_logits(torch.zeros(1, 3), torch.zeros(1, 3), 1.4, backend="sdpa")


def test_falling_back_is_logged_once_with_the_reason(call, stand_in, caplog):
    stand_in(absent="no compiler was found")
    with caplog.at_level(logging.INFO, "radar_kernels"):
        for _ in range(3):
            assert isinstance(anchor_attention(*call, bias=1.0), torch.Tensor)
    said = [record for record in caplog.records if "cpp" in record.getMessage()]
    assert len(said) == 1
    assert said[0].levelno == logging.WARNING
    assert "no compiler was found" in said[0].getMessage()
    assert not [record for record in caplog.records if "triton" in record.getMessage()]


def test_a_call_meant_for_another_backend_is_no_warning(call, stand_in, caplog):
    stand_in(unsupported="query has 12 tokens")
    with caplog.at_level(logging.INFO, "radar_kernels"):
        anchor_attention(*call, bias=1.0)
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_the_environment_puts_one_backend_first(call, monkeypatch, stand_in):
    stand_in()
    monkeypatch.setenv("RADAR_BACKEND", "reference")
    assert explain(anchor_attention, *call, bias=1.0).chosen == "reference"
    assert isinstance(anchor_attention(*call, bias=1.0), torch.Tensor)
    # An argument outranks the environment.
    assert anchor_attention(*call, bias=1.0, backend="cpp") == "stand-in"
    # Operators without that backend are served as usual.
    monkeypatch.setenv("RADAR_BACKEND", "sdpa")
    assert blend_logits(torch.zeros(1, 3), torch.ones(1, 3), 1.4).shape == (1, 3)
    monkeypatch.setenv("RADAR_BACKEND", "fpga")
    with pytest.raises(ValueError, match="RADAR_BACKEND"):
        anchor_attention(*call, bias=1.0)


def test_an_environment_that_cannot_be_followed_is_a_warning(call, monkeypatch, caplog):
    monkeypatch.setenv("RADAR_BACKEND", "sdpa")
    with caplog.at_level(logging.INFO, "radar_kernels"):
        anchor_attention(*call, bias=1.0, softcap=2.0)
    said = [record for record in caplog.records if "sdpa" in record.getMessage()]
    assert len(said) == 1 and said[0].levelno == logging.WARNING
    assert "softcap" in said[0].getMessage()


def test_inputs_that_need_a_gradient_are_refused_by_kernels(call, stand_in):
    stand_in()
    query, *others = call
    query.requires_grad_()
    explanation = explain(anchor_attention, query, *others, bias=1.0)
    assert explanation.chosen == "sdpa" and "gradient" in explanation.refused["cpp"]
    with pytest.raises(ValueError, match="gradient"):
        anchor_attention(query, *others, bias=1.0, backend="cpp")
    with torch.no_grad():
        assert anchor_attention(query, *others, bias=1.0) == "stand-in"
    # Forward mode: a tangent counts, not only requires_grad.
    key = others[0]
    _, tangent = torch.func.jvp(
        lambda one: anchor_attention(one, key[:, :, :8], key[:, :, :8], bias=1.0),
        (query.detach()[:, :, :2],),
        (torch.ones(1, 4, 2, 16),),
    )
    assert bool(tangent.abs().sum() > 0)
    # A bias that is learned counts as well.
    bias = torch.zeros(4, requires_grad=True)
    assert anchor_attention(*call, bias=bias).requires_grad
