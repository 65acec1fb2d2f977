"""The command line: `actorium <command>`, or `python -m actorium.tools.cli <command>`.

Exit codes: 0 done (or drained), 1 a fault, 2 a bad configuration, 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from actorium import __version__
from actorium.actors.errors import ActoriumError, BadConfig, BadModel

LINE = 2000
"""Characters of an error's line: files of strangers can make it long."""
EXTRA_OF = {"matplotlib": "bench", "psutil": "bench", "av": "video", "ray": "cluster"}
"""Module -> the extra that installs it, where that is not the engine's."""
COMMANDS = {
    "serve": ("serve", "[MODEL]: start an engine and keep it running"),
    "ps": ("ps", "engines and their actors (--json)"),
    "top": ("top", "[NAME]: engines, live: actors, queues, pages, tokens a second (--once)"),
    "stop": ("ps", "[NAME]: stop a running engine"),
    "upgrade": ("upgrade", "[NAME] [FLAGS]: a running engine goes over to this version and these "
                "flags"),
    "cluster": ("cluster", "status | scale | drain | up | join ...: replicas that come and go, on "
                "one machine or several"),
    "sleep": ("sleep", "[NAME]: a running engine gives back the memory of weights and pages"),
    "wake": ("sleep", "[NAME]: an engine that sleeps loads its model again"),
    "adapters": ("adapters", "[NAME]: the LoRA adapters of a running engine (--load, --unload)"),
    "flush-cache": ("ps", "[NAME]: let a running engine forget its cached prefixes"),
    "generate": ("generate", "[MODEL] --prompt TEXT ... | --input FILE.jsonl: an offline batch"),
    "embed": ("embed", "[MODEL] --text TEXT ... | --input FILE.jsonl: vectors of texts"),
    "run-batch": ("run_batch", "-i IN.jsonl -o OUT.jsonl [MODEL]: requests in OpenAI's batch "
                  "format"),
    "chat": ("chat", "[MODEL]: talk to a model (--name: one that runs already)"),
    "eval": ("eval", "mmlu | questions | needle | perplexity | demo: what a model gets right, of "
             "an engine or of any server"),
    "compare": ("compare", "A B [MODEL]: two configurations, or servers, on the same prompts"),
    "verify": ("verify", "[MODEL]: tries to make an engine, or any server, contradict itself"),
    "bench": ("bench", "serve | offline | compare: latency under load, throughput of a batch, runs "
              "side by side"),
    "simulate": ("simulate", "what replicas behind a router would do with a load, on a virtual "
                 "clock"),
    "pull": ("models", "NAME: fetch a model, or bring it up to date"),
    "models": ("models", "[FOLDER]: the models on this machine, and which of them fit it"),
    "doctor": ("doctor", "[MODEL]: what this machine can serve with, what is off, and what to do"),
    "plan": ("plan", "[MODEL_OR_CONFIG_JSON]: where every byte goes, and how many tokens fit"),
    "passes": ("backends", "[MODEL]: which operations of its layers are joined, and what that "
               "gains"),
    "backends": ("backends", "[MODEL]: what can attend over pages here, and what else would need"),
    "plugins": ("plugins", "what installed packages add: models, parsers, logits processors"),
    "keys": ("keys", "server | client | authorise | revoke | list: who may connect over tcp"),
    "replay": ("replay", "FILE: play a flight recording of the scheduler once more"),
    "trace": ("replay", "DIR: when the device idled, and why (of an engine run with --trace DIR)"),
    "version": ("", "the version"),
}
"""Command -> (which `..._command` module runs it, what it does)."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        return _help()
    if words[0] == "--version":
        words[0] = "version"
    if argv is None:
        signal.signal(signal.SIGTERM, _terminated)
    try:
        return _command(words[0])(words[0], words[1:])
    except (BadConfig, BadModel) as error:
        return _fail(error.message, 2)
    except ActoriumError as error:
        return _fail(error.message, 1)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("actorium"):
            raise
        extra = EXTRA_OF.get(error.name or "", "engine")
        return _fail(f"this command needs {error.name}; from a checkout: "
                     f"pip install -e '.[{extra}]'", 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _terminated(*_: object) -> None:
    """SIGTERM unwinds the command, so that its engine drains and its files go."""
    raise SystemExit(128 + signal.SIGTERM)


def _command(name: str) -> Callable[[str, list[str]], int]:
    if name not in COMMANDS:
        from actorium.actors.config.sources import suggestion

        raise BadConfig(f"{name}: no such command"
                        f"{suggestion(name, COMMANDS) or '; actorium --help lists them'}", name)
    if name == "version":
        return _version
    module = import_module(f"actorium.tools.cli.{COMMANDS[name][0]}_command")
    run: Callable[[str, list[str]], int] = module.run
    return run


def _version(_command: str, words: list[str]) -> int:
    """Print the version; nothing else is imported."""
    if words:
        raise BadConfig(f"{words[0]}: unexpected argument", words[0])
    print(__version__)
    return 0


def _help() -> int:
    lines = ["usage: actorium COMMAND [FLAGS]", ""]
    lines += [f"  {name:<11} {about}" for name, (_, about) in COMMANDS.items()]
    lines += ["", "MODEL: a directory in HF format, ORG/NAME of the Hugging Face hub, or nothing = "
              "the demo model.", "actorium COMMAND --help lists the flags of a command."]
    print("\n".join(lines))
    return 0


def _fail(message: str, code: int) -> int:
    line = "".join(c if c.isprintable() else "?" for c in " ".join(message.split()))
    print(f"actorium: error: {line if len(line) <= LINE else line[:LINE] + '...'}",
          file=sys.stderr)
    return code
