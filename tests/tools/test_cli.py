"""What the command line says without starting an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_text import FakeEngine, write_model

import actorium
from actorium.actors.config.tree import Config, RecoveryConfig, SchedulerConfig
from actorium.tools import cli
from actorium.tools.cli import COMMANDS, main
from actorium.tools.cli.engines import for_batches
from actorium.tools.cli.ps_command import memory, table


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("ACTORIUM_"):
            monkeypatch.delenv(name)


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("actorium: error: ")
    return lines[0].removeprefix("actorium: error: ")


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{actorium.__version__}\n" * 2
    assert main(["version", "--verbose"]) == 2
    assert error_of(capsys) == "--verbose: unexpected argument"


def test_version_loads_nothing_heavy() -> None:
    code = ("import sys; from actorium.tools.cli import main; main(['version']); "
            "print(sorted({'argparse', 'zmq', 'msgspec', 'torch', 'rich', 'asyncio'} "
            "& set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.decode().splitlines()[-1] == "[]"


def test_parsing_loads_nothing_heavy() -> None:
    code = ("import sys; from actorium.tools.cli.command_line import parse; "
            "from actorium.tools.cli.generate_command import GenerateOptions; "
            "parse('actorium generate', ['--prompt', 'x', '--max-num-seqs', '3'], "
            "GenerateOptions); "
            "print(sorted({'torch', 'rich', 'numpy', 'zmq', 'jinja2'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.decode().splitlines()[-1] == "[]"


BAD = [
    (["sevre"], "sevre: no such command (did you mean serve"),
    (["serve", "--max-num-seqs", "0"], "--max-num-seqs: must be between 1 and 32768, got 0"),
    (["generate", "--prompt", "x", "--block-size", "3"], "--block-size: must be a power of two"),
    (["chat", "--mem-fraction-static", "7"], "--mem-fraction-static: must be between"),
    (["eval", "demo", "--device", "gpu"], "--device: must be auto, cpu or cuda, got 'gpu'"),
    (["bench", "offline", "--chunked-prefill-size", "0"], "--chunked-prefill-size: must be"),
    (["ps", "--jso"], "--jso: no such flag (did you mean --json"),
    (["ps", "extra"], "extra: unexpected argument"),
    (["flush-cache", "one", "two"], "two: unexpected argument"),
    (["generate", "--prompt", "x", "--tenant-weights", "a=0"], "--tenant-weights: every weight"),
    (["generate"], "--prompt: one of --prompt TEXT and --input FILE is needed"),
    (["generate", "--prompt", "x", "--input", "-"], "--prompt: one of"),
    (["generate", "--input", "/nowhere.jsonl"], "--input: cannot read /nowhere.jsonl: No such"),
    (["generate", "--prompt", "x", "--output", "/nowhere/x"], "--output: cannot write /nowhere/x"),
    (["generate", "--prompt", "x", "--temperature", "-1"], "--temperature: must be between"),
    (["generate", "--prompt", "x", "--temperature", "nan"], "--temperature: must be between"),
    (["generate", "--prompt", "x", "--temperature", "hot"], "--temperature: must be a number"),
    (["generate", "--prompt", "x", "--top-p", "1.5"], "--top-p: must be between 0.0 and 1.0"),
    (["generate", "--prompt", "x", "--top-k", "-2"], "--top-k: must be between -1"),
    (["generate", "--prompt", "x", "--n", "1025"],
     "--n: must be between 1 and 1024, got 1025"),
    (["generate", "--prompt", "x", "--stop", ""], "--stop: a string must have"),
    (["generate", "--prompt", "x", "--logprobs", "21"], "--logprobs: must be between 0 and 20"),
    (["generate", "--prompt", "x", "--seed", "-1"], "--seed: must be between 0"),
    (["generate", "--prompt", "x", "--max-tokens", "0"], "--max-tokens: must be between 1"),
    (["generate", "--prompt", "x", "--model", "/nowhere"], "model: no such directory: /nowhere"),
    (["serve", "/nowhere"], "model: no such directory: /nowhere (`actorium models` lists"),
    (["serve", "/nowhere.gguf"], "model: no such file: /nowhere.gguf (`actorium models` lists"),
    (["xyzzy"], "xyzzy: no such command; actorium --help lists them"),
    (["serve", "--xyzzyxx"], "--xyzzyxx: no such flag; --help lists them"),
    (["serve", "org/unknown-model"], "model: 'org/unknown-model' is neither a directory nor"),
    (["chat", "--n", "2"], "--n: a conversation has one answer a turn"),
    (["eval"], "eval: which evaluation? mmlu, questions, needle, perplexity, demo"),
    (["eval", "mmlu"], "--data: MMLU's folder or a file of JSON lines is needed"),
    (["eval", "mmlu", "--data", "/nowhere"], "--data: cannot read /nowhere: No such file"),
    (["eval", "mmlu", "--data", "x", "--method", "guess"], "--method: must be logits, generate, "),
    (["eval", "questions", "--data", "x"], "--data: is for `actorium eval mmlu`"),
    (["eval", "questions", "--shots", "2"], "--shots: no examples are there"),
    (["eval", "questions", "--subjects", "magic"], "--subjects: 'magic' is none of"),
    (["eval", "questions", "--html", "/nowhere/x"], "--html: no such directory: /nowhere"),
    (["eval", "questions", "--min-score", "60"], "--min-score: must be between 0 and 1, got 60"),
    (["eval", "needle", "--depths", "2"], "--depths: must be between 0 and 1"),
    (["eval", "needle", "--style", "hay"], "--style: must be text, chat, pairs, got 'hay'"),
    (["eval", "perplexity"], "--data: a file of text is needed"),
    (["eval", "perplexity", "--window", "1"], "--window: must be at least 2, got 1"),
    (["eval", "demo", "--count", "0"], "--count: must be at least 1, got 0"),
    (["bench"], "bench: `actorium bench offline`"),
    (["bench", "offline", "--works", "W9"], "--works: must be some of W1, W2, W3, got 'W9'"),
    (["bench", "offline", "--runs", "0"], "--runs: must be at least 1"),
    (["bench", "offline", "--peer", "vllm"], "--peer: must be transformers"),
    (["bench", "offline", "--shape", "HUGE"], "--shape: HUGE: neither one of HYB, S06, TINY nor"),
    (["bench", "offline", "x", "--shape", "TINY"], "--shape: cannot be combined with a model"),
]


@pytest.mark.parametrize(("argv", "message"), BAD)
def test_a_bad_command_line_exits_2_with_one_line(
        argv: list[str], message: str, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main(argv) == 2
    assert error_of(capsys).startswith(message)


def test_a_model_behind_the_prompts_is_noticed(capsys: pytest.CaptureFixture[str],
                                               tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["generate", "--prompt", "x", str(tmp_path)]) == 2
    assert error_of(capsys).startswith("--prompt: the model goes before it")


def test_a_bad_variable_and_a_bad_file_exit_2(capsys: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch,
                                              tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text("[memory]\npage_size = 17\n")
    assert main(["serve", "--config", str(file)]) == 2
    assert error_of(capsys).startswith(f"{file}: memory.page_size: must be a power of two")
    monkeypatch.setenv("ACTORIUM_PAGESIZE", "16")
    assert main(["serve"]) == 2
    assert error_of(capsys).startswith("ACTORIUM_PAGESIZE: no such setting")


NO_GHOST = ("no engine named 'ghost' is running; `actorium ps` lists those that do, "
            "`actorium serve --name ghost` starts one")


def test_engines_that_do_not_run(capsys: pytest.CaptureFixture[str],
                                 monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACTORIUM_RUN_DIR", str(tmp_path))
    assert main(["ps", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"
    assert main(["ps"]) == 0
    assert capsys.readouterr().out == "no engine is running\n"
    assert main(["stop", "ghost"]) == 1
    assert error_of(capsys) == NO_GHOST
    assert main(["flush-cache", "ghost"]) == 1
    assert error_of(capsys) == NO_GHOST
    assert main(["chat", "--name", "ghost"]) == 1
    assert error_of(capsys) == NO_GHOST


def test_the_table_of_actors_shows_memory() -> None:
    row = {"name": "one", "role": "scheduler", "pid": 5, "epoch": 1, "phase": "idle", "step": 9,
           "step_age": 0.5, "detail": "",
           "gauges": {"free_pages": 90.0, "held_pages": 6.0, "cached_pages": 12.0,
                      "cache_hit_tokens": 30.0, "cache_lookup_tokens": 40.0,
                      "quarantined_pages": 0.0}}
    told = "pages: 90 free, 6 held, 12 cached, 75 % hits"
    assert table([row]).splitlines()[1].endswith(f"  {told}")
    head, line = table([row | {"memory": 41_600_000, "keeps": 105_000_000}]).splitlines()
    assert head.split()[-2:] == ["memory", "keeps"] and "  42 MB   105 MB  " in line
    assert memory(row["gauges"]) == told  # type: ignore[arg-type]
    assert memory({"quarantined_pages": 3.0}) == "pages: 3 quarantined"
    assert memory({"running": 3.0}) == ""


def test_flush_cache_prints_the_freed_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeEngine(write_model(tmp_path / "m"), "one") as engine:
        monkeypatch.setenv("ACTORIUM_RUN_DIR", engine.base)
        assert main(["flush-cache", "one"]) == 0
        assert capsys.readouterr().out == "7 pages freed, 2 cached pages still held\n"
        assert main(["flush-cache", "--name", "one", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"pages": 7, "kept": 2}


@pytest.mark.parametrize("command", [["serve"], ["generate"], ["chat"], ["eval", "demo"],
                                     ["eval", "questions"], ["eval", "needle"],
                                     ["bench", "offline"], ["ps"], ["stop"],
                                     ["flush-cache"]])
def test_every_command_helps(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert "--max-running-requests" in capsys.readouterr().out


def test_a_package_that_is_not_installed_is_named(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["top", "--once"]) == 2
    assert capsys.readouterr().err == (
        "actorium: error: this command needs rich.console; from a checkout: "
        "pip install -e '.[engine]'\n")


def test_batches_have_no_bound_on_gaps_between_tokens_and_no_fork_server_unless_asked() -> None:
    plain = for_batches(Config())
    assert plain.scheduler.target_itl == 0 and plain.recovery.fork_server == "off"
    asked = Config(scheduler=SchedulerConfig(target_itl=80.0),
                   recovery=RecoveryConfig(fork_server="on"))
    assert for_batches(asked) == asked


@pytest.mark.parametrize(("module", "extra"), [
    ("matplotlib", "bench"), ("av", "video"), ("ray", "cluster"), ("torch", "engine")])
def test_a_module_that_is_missing_names_its_extra(
        module: str, extra: str, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    def lacking(_command: str, _argv: list[str]) -> int:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(cli, "_command", lambda name: lacking)
    assert main(["bench"]) == 2
    assert error_of(capsys) == (f"this command needs {module}; from a checkout: "
                                f"pip install -e '.[{extra}]'")
