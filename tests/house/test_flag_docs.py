"""The tables of docs/cli.md, and the help of a command."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from actorium.actors.config import sources as settings
from actorium.actors.config.flag_names import OF_TESTS
from actorium.tools.cli import flag_docs, main
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.flags import shown_flags
from actorium.tools.cli.serve_command import ServeOptions

DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"
ENGINES = ("vllm", "sglang", "llama-cpp")
HELP_SECONDS = 0.5
"""Of a processor: others may use the machine as well."""


def test_the_tables_are_those_of_the_configuration() -> None:
    text = DOCUMENT.read_text()
    assert flag_docs.filled(text) == text, \
        "docs/cli.md is stale: python -m actorium.tools.cli.flag_docs docs/cli.md"
    for field in settings.fields().values():
        shown = any(f"`--{form}{field.names[0]}`" in text for form in ("", "no-"))
        assert shown == (field.name not in OF_TESTS), field.key


def test_the_table_of_calls_is_that_of_their_formats() -> None:
    text = DOCUMENT.with_name("tools.md").read_text()
    assert flag_docs.filled(text) == text, \
        "docs/tools.md is stale: python -m actorium.tools.cli.flag_docs docs/tools.md"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_page_says_what_becomes_of_each_flag_of_an_engine(engine: str) -> None:
    page = DOCUMENT.parent / f"from-{engine}.md"
    text = page.read_text()
    assert flag_docs.with_outcomes(text) == text, \
        f"{page.name} is stale: python -m actorium.tools.cli.flag_docs docs/from-*.md"
    rows = flag_docs.ROW.findall(text)
    assert len(rows) > 30
    for outcome in ("the same", "no effect", "refused"):
        assert f" | {outcome} | " in text


def test_outcomes_of_foreign_flags() -> None:
    assert flag_docs.outcome("--max-running-requests 3")[0] == "the same, or `--max-num-seqs`"
    assert flag_docs.outcome("--cache-ram 2048")[0] == "`--host-cache 2GiB`"
    assert flag_docs.outcome("--swap-space 4") == (
        "no effect", "what is preempted is computed again, or found in the prefix cache; nothing "
        "is swapped")
    assert flag_docs.outcome("--pp-size 2") == (
        "refused", "an engine is one group of ranks (--tp) on one machine")
    with pytest.raises(ValueError, match="--nonsense: no such flag"):
        flag_docs.outcome("--nonsense 1")


def test_flags_of_tests_are_taken_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    parsed = parse("actorium serve [MODEL]", ["--null-worker", "--force-preempt-every=3"],
                   ServeOptions)
    assert parsed.config.device.null_worker and parsed.config.scheduler.force_preempt_every == 3
    text = helped(capsys, "--help")
    assert not any(f"--{name.replace('_', '-')}" in text for name in OF_TESTS)


def test_a_missing_marker_is_reported() -> None:
    with pytest.raises(ValueError, match="no marks around settings"):
        flag_docs.filled("# nothing")


def helped(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parse("actorium serve [MODEL]", argv, ServeOptions, "Start an engine.")
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_shows_every_name_in_a_readable_width(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = helped(capsys, "--help")
    assert all(f"--{name}" in text or f"--enable-{name}" in text or f"--disable-{name}" in text
               for flag in shown_flags(ServeOptions) for name in flag.names)
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"\n[{section}]" in text for section in ("serve", "model", "memory", "gateway"))
    assert helped(capsys, "--help=all") == text == helped(capsys, "--help", "all")


def test_help_of_a_section_and_of_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (("--help=scheduler",), ("--help", "scheduler"), ("-h", "scheduler")):
        text = helped(capsys, *argv)
        assert text.startswith("[scheduler]") and "--max-num-seqs, --max-running-requests" in text
        assert "--port" not in text
    text = helped(capsys, "--help=radix")
    assert "--disable-radix-cache" in text and "--radix-eviction-policy" in text
    assert "--port" not in text
    assert main(["serve", "--help=nonsense"]) == 2
    assert "--help: no section and no flag is called 'nonsense'" in capsys.readouterr().err


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = ("import sys\nfrom actorium.tools.cli import main\ntry:\n    main(['serve', '--help'])\n"
            "except SystemExit:\n    pass\n"
            "print(sorted({'torch', 'rich', 'numpy', 'jinja2', 'zmq'} & set(sys.modules)))")
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.stdout.decode().splitlines()[-1] == "[]"
    assert min(seconds) < HELP_SECONDS


def test_the_last_of_several_counts() -> None:
    argv = ["--max-num-seqs", "3", "--enforce-eager", "--max-running-requests=5",
            "--no-enforce-eager"]
    config = parse("actorium serve [MODEL]", argv, ServeOptions).config
    assert config.scheduler.max_num_seqs == 5
    assert not config.device.enforce_eager
