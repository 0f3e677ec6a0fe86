"""`radar eval` on a tiny model: it reports, goes on, and says what is wrong in one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from radar_core import embedded
from radar_core.commands import app
from radar_core.evaluation import command
from radar_core.evaluation.evidence import Evidence
from radar_core.evaluation.runs import ROWS
from tests.core.test_cli import Words, refused
from tests.evaluation.conftest import SECRET, TOPICS, question, write


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "load_encoder", lambda *arguments, **keywords: Words())


@pytest.fixture
def arguments(questions_file: Path, model_folder: Path, tmp_path: Path) -> list[str]:
    return [
        "--data", str(questions_file), "--model", str(model_folder), "--dtype", "float32",
        "--out", str(tmp_path / "run"),
    ]  # fmt: skip


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["eval", *map(str, words)])


def items(folder: Path) -> list[str]:
    return [json.loads(line)["item"] for line in (folder / ROWS).read_text().splitlines()[1:]]


def test_a_run_is_reported_and_goes_on(arguments: list[str], tmp_path: Path):
    folder = tmp_path / "run"
    first = run("evidence", *arguments, "--limit", 2, "--seed", 3)
    assert first.exit_code == 0, first.output
    assert "hotpotqa: " in first.stdout and " SPA 1.4 " in first.stdout
    assert "2 items" in first.stdout and "read the intervals" in first.stdout
    assert items(folder) == ["hotpotqa/q0", "hotpotqa/q1"]
    assert {path.name for path in folder.iterdir()} == {
        ROWS, "summary.json", "report.md", "evidence-hotpotqa.png",
    }  # fmt: skip
    header = json.loads((folder / ROWS).read_text().splitlines()[0])
    assert header["seed"] == 3 and header["settings"]["arms"] == "quick"
    assert header["model"]["name"].endswith("/tiny") and header["model"]["dtype"] == "float32"
    assert list(header["data"]) == ["questions.jsonl"]
    assert {"radar-kernels", "torch", "transformers"} <= header["versions"].keys()
    second = run("evidence", *arguments, "--limit", 3, "--seed", 3, "--json")
    found = json.loads(second.stdout)
    assert items(folder) == ["hotpotqa/q0", "hotpotqa/q1", "hotpotqa/q2"]
    assert found["items"] == 3 and found["tables"][0]["rows"][0][0] == "unsteered"
    assert "[2/3] done before" in second.stderr


def test_the_report_can_be_had_again_from_the_rows(arguments: list[str], tmp_path: Path):
    folder = tmp_path / "run"
    done = run("evidence", *arguments, "--limit", 2, "--json")
    for path in folder.iterdir():
        if path.name != ROWS:
            path.unlink()
    again = run("report", folder, "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout) == json.loads(done.stdout)
    assert (folder / "report.md").is_file()
    assert " target mass 0.35, last third + question " in run("report", folder).stdout


def test_no_text_of_the_data_is_written(arguments: list[str], conflicts_file: Path, tmp_path: Path):
    result = run(
        "evidence", *arguments, "--data", conflicts_file, "--limit", 1, "--set", "replies=yes",
        "--set", "reply_tokens=2", "--set", "anchors=gold,dense",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    texts = [result.output, *(p.read_text() for p in (tmp_path / "run").glob("*.[jm]*"))]
    assert len(texts) == 4
    for text in texts:
        assert "dense" in text and "SPA 1.4" in text
        for word in (SECRET, "Person", "Oslo", "Delhi", *TOPICS):
            assert word not in text


def test_without_out_every_setting_has_a_folder_of_its_own(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for more in ([], ["--seed", 1], ["--set", "top_k=3"], []):
        assert run("evidence", *arguments[:-2], "--limit", 1, *more).exit_code == 0
    folders = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert len(folders) == 3
    assert all(re.fullmatch(r"evidence-models\d-tiny-[0-9a-f]{8}", name) for name in folders)


def test_another_setting_in_the_same_folder_is_refused(arguments: list[str]):
    assert run("evidence", *arguments, "--limit", 1).exit_code == 0
    error = refused_after_start(run("evidence", *arguments, "--limit", 1, "--set", "top_k=3"))
    assert "settings.top_k is 5 there and 3 here" in error and "--out" in error
    assert run("evidence", *arguments, "--limit", 1, "--set", "top_k=3", "--fresh").exit_code == 0


def refused_after_start(result: Any) -> str:
    """Return the one line of an error that came after the run's folder was named."""
    assert result.exit_code == 2 and result.stdout == ""
    first, *errors = result.stderr.splitlines()
    assert first.startswith("Run: ") and len(errors) == 1
    return errors[0].removeprefix("radar: error: ")


def test_a_changed_data_file_is_another_run(arguments: list[str], tmp_path: Path):
    file = write(tmp_path / "own.jsonl", [question(0)])
    own = ["--data", str(file), *arguments[2:]]
    assert run("evidence", *own).exit_code == 0
    write(file, [question(1)])
    assert "data.own.jsonl is" in refused_after_start(run("evidence", *own))


def test_a_changed_model_is_another_run(
    arguments: list[str], model: Any, tokenizer: Any, tmp_path: Path
):
    import copy

    folder = tmp_path / "own"
    other = copy.deepcopy(model)
    other.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    own = [*arguments[:3], str(folder), *arguments[4:], "--limit", "1"]
    assert run("evidence", *own).exit_code == 0
    other.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    other.save_pretrained(folder)
    assert "model.fingerprint is" in refused_after_start(run("evidence", *own))


def test_ctrl_c_says_how_to_go_on(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    measure = Evidence.measure

    def interrupted(self: Evidence, item: Any) -> Any:
        if item.id == "q2":
            raise KeyboardInterrupt
        return measure(self, item)

    with monkeypatch.context() as patch:
        patch.setattr(Evidence, "measure", interrupted)
        words = ["evidence", *arguments, "--limit", "4", "--set", "top_k=3", "--fresh"]
        result = run(*words)
    assert result.exit_code == 130 and "2 items" in result.stdout
    (said,) = re.findall(
        r"Stopped after 2 of 4 items, which are kept. To go on: (.*)", result.stderr
    )
    *_, typed = said.partition("eval ")
    assert sorted(shlex.split(typed)) == sorted(words[:-1])
    assert run(*shlex.split(typed)).exit_code == 0
    assert items(tmp_path / "run") == [f"hotpotqa/q{number}" for number in range(4)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--data", "none.jsonl"], "--data: no file none.jsonl"),
        (["--set", "top_k"], "--set is 'top_k'; expected NAME=VALUE"),
        (["--set", "top_k=1", "--set", "top_k=2"], "--set gives 'top_k' twice"),
        (["--device", "abacus"], "--device 'abacus' cannot be used here"),
        (["--model", "/none/such.gguf"], "--model: no file '/none/such.gguf'"),
    ],
)
def test_mistakes_are_said_in_one_line(words: list[str], expected: str, questions_file: Path):
    error = refused(run("evidence", "--data", str(questions_file), *words))
    assert expected in error or expected.removeprefix("--") in error


def test_an_unknown_option_lists_those_there_are(arguments: list[str]):
    error = refused(run("evidence", *arguments, "--set", "power=2"))
    assert "no option power" in error and "top_k=5" in error


def test_an_experiment_that_is_not_there_is_said(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(command.EXPERIMENTS, "dacs", ("radar_core.evaluation.none", ""))
    assert "'dacs' is not part of this installation" in refused(run("dacs", *arguments))


def test_a_package_that_is_missing_is_named(arguments: list[str], monkeypatch: pytest.MonkeyPatch):
    real = command.importlib.import_module

    def absent(path: str, *more: Any) -> Any:
        if path == command.EXPERIMENTS["evidence"][0]:
            raise ModuleNotFoundError("No module named 'scipy'", name="scipy")
        return real(path, *more)

    monkeypatch.setattr(command.importlib, "import_module", absent)
    error = refused(run("evidence", *arguments))
    assert "needs the package scipy" in error and "radar-kernels[eval]" in error


def test_what_is_no_run_cannot_be_reported(tmp_path: Path):
    assert "holds no run" in refused(run("report", tmp_path))
    (tmp_path / ROWS).write_text('{"radar_rows": 1, "name": "evidence"}\n')
    assert "is done yet" in refused(run("report", tmp_path))
    (tmp_path / ROWS).write_text(
        '{"radar_rows": 1, "name": "others"}\n{"item": "a", "rows": [{"arm": "b"}]}\n'
    )
    assert "is a run of 'others'" in refused(run("report", tmp_path))


def test_a_killed_run_goes_on_without_losing_an_item(arguments: list[str], tmp_path: Path):
    path = tmp_path / "run" / ROWS
    words = ["evidence", *arguments, "--limit", "12"]
    process = subprocess.Popen(
        [sys.executable, "-m", "radar_core.cli", "eval", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = path.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert 3 <= kept.count(b"\n") < 13, "it was to be killed half-way"
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(kept)
    assert items(tmp_path / "run") == [f"hotpotqa/q{number}" for number in range(12)]
