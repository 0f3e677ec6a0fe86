"""The benchmark of long answers: its rows, its plot, and what it says of a wrong contender."""

from __future__ import annotations

import json

import pytest

from benchmarks import long_generation, machine
from radar_core import SPA


def test_every_method_is_timed_by_position_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "read_bytes_beyond_cache", lambda: 1 << 22)
    path = tmp_path / "long.json"
    outputs = ["--json", str(path), "--plots", str(tmp_path / "plots")]
    assert long_generation.main(["--tokens", "40", "--rounds", "1", *outputs]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 16 * len(long_generation.methods())
    assert all(row["median_ms"] and row["checked"].startswith("8 tokens") for row in rows)
    assert rows[0]["work"].endswith("tokens=257..258") and rows[-1]["work"].endswith("..295")
    assert (tmp_path / "plots" / "long-generation.png").read_bytes().startswith(b"\x89PNG")
    assert "unsteered" in capsys.readouterr().out


def test_a_wrong_contender_is_not_timed(monkeypatch):
    own = long_generation.generate

    def wrong(model, method, tokens, **options):
        out = own(model, method, tokens, **options)
        return out + 1 if isinstance(method, SPA) and "use_cache" in options else out

    monkeypatch.setattr(long_generation, "generate", wrong)
    rows = long_generation.run(3, 1)
    failed = {row.provider for row in rows if row.failed}
    assert failed == {"radar-spa"} and all(row.median_ms is None for row in rows if row.failed)


def test_answers_too_short_to_time_are_refused():
    with pytest.raises(ValueError, match="tokens is 1"):
        long_generation.run(1, 1)
