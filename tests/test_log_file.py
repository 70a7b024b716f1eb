"""Which file a process logs to, and that lines of several processes do not mix."""

from __future__ import annotations

import json
import multiprocessing
import os

import pytest

from smart_autotune import log_file


def test_the_process_number_stands_in_the_path(tmp_path):
    assert log_file.path_of(f"{tmp_path}/log-%p.jsonl") == tmp_path / f"log-{os.getpid()}.jsonl"


@pytest.mark.parametrize("text", ["{folder}", "{folder}/new/"])
def test_in_a_folder_each_process_has_a_file_of_its_own(tmp_path, text):
    path = log_file.path_of(text.format(folder=tmp_path))
    assert path.suffix == ".jsonl" and str(os.getpid()) in path.name


def test_a_home_folder_is_understood(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert log_file.path_of("~/log") == tmp_path / "log"


def write(path, letter, count, gate):
    gate.wait(60)
    for _ in range(count):
        log_file.append(path, json.dumps({"text": letter * 50_000}))


def test_lines_of_several_processes_do_not_mix(tmp_path):
    context = multiprocessing.get_context("spawn")
    gate, path = context.Event(), tmp_path / "log.jsonl"
    writers = [context.Process(target=write, args=(str(path), letter, 100, gate)) for letter in "abcd"]
    for writer in writers:
        writer.start()
    gate.set()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    found = [line["text"] for line in map(json.loads, path.read_text().splitlines())]
    assert len(found) == 400 and all(text == text[0] * 50_000 for text in found)
