"""The program that renders chat templates in its own process, since templates are untrusted code.

It imports jinja2 and nothing of hetero_ee. It prints {} when it is ready. Then it answers each line of standard input,
a JSON document with template, variables, seconds and characters (the limits), with one line: {"text"}, {"refusal"} if
the template rejects the messages, or {"defect"}. It ends at the end of standard input.
"""

import json
import math
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_REASON_CHARACTERS = 200


class RefusalError(Exception):
    """The template called raise_exception(...)."""


class OutputTooLongError(Exception):
    """The rendered text exceeds the limit."""


class GenerationBlock(Extension):
    """Renders the body of {% generation %}, which marks the assistant's text for training, as if it weren't marked."""

    tags = {"generation"}  # noqa: RUF012 - as declared in jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class PublicNamespace(Namespace):
    """jinja2's namespace() without names that begin with an underscore, which are Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # without a parameter self, so that namespace(self=...) works
        values = dict(*args[1:], **kwargs)
        for name in values:
            _require_public(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace() does not accept the name {name!r}")


def _refuse(message: Any) -> None:
    raise RefusalError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Convert a value to plain JSON. jinja2's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


@lru_cache(maxsize=1)
def _compiled(template: str) -> Template:
    """Compile a template with the functions that transformers provides to chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now, "namespace": PublicNamespace}
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)  # the type has methods, this has none
    return environment.from_string(template)


def _rendered(template: str, variables: dict[str, Any], max_characters: int) -> Iterator[str]:
    """Yield the rendered text in pieces, so that endless output stops at the limit before memory is used up."""
    n_characters = 0
    for piece in _compiled(template).generate(**variables):
        n_characters += len(piece)
        if n_characters > max_characters:
            raise OutputTooLongError
        yield piece


def answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": "".join(_rendered(request["template"], request["variables"], request["characters"]))}
    except RefusalError as refusal:
        return {"refusal": _reason(refusal)}
    except OutputTooLongError:
        return {"defect": f"it turns this conversation into more than {request['characters']} characters"}
    except MemoryError:
        return {"defect": "it needs too much memory"}
    except TemplateSyntaxError as error:
        return {"defect": f"line {error.lineno}: {_reason(error)}"}
    except TemplateError as error:
        return {"defect": _reason(error)}
    except Exception as error:  # anything Python raises in a template: a TypeError, a ZeroDivisionError
        return {"defect": f"{type(error).__name__}: {_reason(error)}"}


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:MAX_REASON_CHARACTERS].rstrip(" .")


def _limit_memory(max_bytes: int) -> None:
    """Limit the process's memory if the operating system can; otherwise only the time limit applies."""
    try:
        import resource
    except ImportError:
        return
    for kind, limit in ((resource.RLIMIT_AS, max_bytes), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (limit, limit))


def _end_after(seconds: float) -> None:
    """Let the operating system end this process after `seconds`, even if its parent was killed; 0 cancels that."""
    if hasattr(signal, "alarm"):
        signal.alarm(math.ceil(seconds))


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer requests until standard input ends. The program's argument is the largest address space in bytes."""
    _limit_memory(int(sys.argv[1]))
    _write("{}")
    for line in sys.stdin:
        request = json.loads(line)
        _end_after(request["seconds"] + 1)
        answered = json.dumps(answer(request))
        _end_after(0)
        _write(answered)


if __name__ == "__main__":
    main()
