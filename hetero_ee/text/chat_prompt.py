"""Convert a conversation to token ids such that only the chat template can write special tokens.

Messages may contain the text of a special token, such as <|im_end|>, with which a user or a tool's result could forge
turns. A mark, a character that occurs nowhere else, is inserted after every character of such a text, so that the
tokenizer reads plain characters. The marks' own tokens are then left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hetero_ee.errors import ModelError, UsageError, shown
from hetero_ee.text.chat_template import ChatTemplate, Message, changed_texts
from hetero_ee.text.tokenizer import Tokenizer

MARKS = range(0xE000, 0xF900)  # Unicode's private use area


def open_template(tokenizer: Tokenizer, source: str | None) -> ChatTemplate:
    """Return the chat template whose text is `source`, by default the model's own.

    Raises:
        UsageError: if `source` is not a string.
        ModelError: if there is no template.
    """
    if source is not None and not isinstance(source, str):
        raise UsageError(f"chat_template is {shown(source)}; expected a Jinja template's text.")
    source = tokenizer.chat_template if source is None else source
    if source is None:
        raise ModelError("this model has no chat template; give one with chat_template, or use generate.")
    return ChatTemplate(source, tokenizer.special_tokens)


def chat_ids(template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Return the token ids of a conversation. Special tokens come from the template only. Raises ModelError."""
    text, mark = chat_prompt(template, tokenizer, messages)
    ids = tokenizer.encode(text, with_special_tokens=False, mark=mark)
    if not ids:
        raise ModelError("the chat template makes no token of these messages; use hetero-ee generate.")
    return ids


def chat_prompt(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> tuple[str, str]:
    """Return the conversation's text, up to the beginning of the assistant's reply, and its mark for Tokenizer.encode.

    Args:
        tools, variables: see ChatTemplate.render.

    Raises:
        ModelError: if the template refuses the messages, or they leave no character to mark special tokens with.
    """
    special = tokenizer.special_texts
    texts = list[str]()

    def noted(text: str) -> str:
        texts.append(text)
        return text

    changed_texts([[each.as_variable() for each in messages], tools], noted)
    if special is None or not any(map(special.search, texts)):
        return template.render(messages, tools, variables), ""
    used = set().union(*texts)
    mark = next((each for each in map(chr, MARKS) if each not in used), None)
    if mark is None:
        raise ModelError("the messages have all characters of Unicode's private use area; leave one of them out.")

    def plain(text: str) -> str:
        return special.sub(lambda found: mark.join(found[0]) + mark, text)

    return template.render(messages, tools, variables, plain), mark
