"""What a caller can hand over for a model, a revision, a text or a template: wrong types end in UsageError."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import Engine, UsageError
from hetero_ee.hub.resolve import resolve_model

NO_TEXTS: list[Any] = [3, 2.5, b"text", [], ["text"], {}, object()]


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(tiny, quantizer="none", threads=1) as opened:
        yield opened


@pytest.mark.parametrize("value", NO_TEXTS, ids=lambda value: type(value).__name__)
def test_a_model_a_revision_a_text_or_a_template_of_another_type(engine: Engine, value: Any) -> None:
    with pytest.raises(UsageError, match="the model is"):
        resolve_model(value)
    with pytest.raises(UsageError, match="revision is"):
        resolve_model("org/name", revision=value)
    with pytest.raises(UsageError, match=r"text is .*; expected a string"):
        engine.count_tokens(value)
    with pytest.raises(UsageError, match=r"chat_template is .*; expected a Jinja template"):
        engine.chat(chat_template=value)
    with pytest.raises(UsageError, match=r"messages (are|have) "):
        engine.chat(value, chat_template="{{ messages }}")
    with engine.chat(chat_template="{{ messages }}") as chat:
        with pytest.raises(UsageError, match="a message is a string"):
            chat.send(value)
        with pytest.raises(UsageError, match="a message is a string"):
            chat.system = value
        assert chat.system is None


def test_no_text_at_all(engine: Engine) -> None:
    with pytest.raises(UsageError, match="text is None; expected a string"):
        engine.count_tokens(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1, 0, "yes", "no", None, []])
def test_offline_is_a_truth_value(value: Any) -> None:
    with pytest.raises(UsageError, match=r"offline is .*; expected True or False"):
        resolve_model("org/name", offline=value)
