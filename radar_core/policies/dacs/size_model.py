"""How large contexts get, as the published model has it.

Source: DACS, arXiv 2604.07911, section 3.6.
"""

from __future__ import annotations

from radar_core.checks import check_whole

__all__ = ["efficiency_ratio", "flat_size", "focus_size", "registry_size"]


def registry_size(agents: int, entry: float) -> float:
    """Return |C_reg| = N·|r|, in tokens.

    Args:
        agents: N, at least 1.
        entry: |r|, tokens of a registry entry.
    """
    return _checked(agents) * entry


def focus_size(agents: int, focus: float, entry: float) -> float:
    """Return |C_focus| = |F| + (N - 1)·|r|, in tokens.

    Args:
        agents: N, at least 1.
        focus: |F|, tokens of a focus context.
        entry: |r|, tokens of a registry entry.
    """
    return focus + (_checked(agents) - 1) * entry


def flat_size(agents: int, focus: float) -> float:
    """Return |C_flat| = N·|F|, in tokens.

    Args:
        agents: N, at least 1.
        focus: |F|, tokens of a focus context.
    """
    return _checked(agents) * focus


def efficiency_ratio(agents: int, focus: float, entry: float) -> float:
    """Return rho(N) = N·|F| / (|F| + N·|r|), which tends to |F| / |r|.

    As published, the denominator counts N entries, one more than `focus_size` does, so that it is
    a little below `flat_size / focus_size`.

    Args:
        agents: N, at least 1.
        focus: |F|, tokens of a focus context.
        entry: |r|, tokens of a registry entry.
    """
    return flat_size(agents, focus) / (focus + _checked(agents) * entry)


def _checked(agents: int) -> int:
    check_whole("agents", agents, 1)
    return agents
