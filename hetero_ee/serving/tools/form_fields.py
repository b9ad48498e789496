"""Fields that constrain the output: OpenAI's response_format, and llama-server's and vLLM's equivalents."""

import json
from typing import Any

from hetero_ee.errors import shown
from hetero_ee.serving.body import Fields, json_in
from hetero_ee.serving.tools.chat import Form

ANY_OBJECT = '{"type": "object"}'
NAMES = ("response_format", "json_schema", "guided_json", "grammar", "guided_grammar", "guided_choice")


def asked_form(fields: Fields) -> Form | None:
    """Return the requested form, or None.

    Raises:
        RequestError: if a form is invalid or two are given.
    """
    found = [(name, form) for name in NAMES if (form := _FORMS[name](fields, name)) is not None]
    if len(found) > 1:
        fields.refuse(found[1][0], f"can't be combined with {found[0][0]}; leave one of them out")
    return found[0][1] if found else None


def schema_form(fields: Fields, kind: Any, schema_of: Fields, name: str) -> Form | None:
    """Return the form of type text, json_object or json_schema, whose schema is a field of `schema_of`.

    Raises:
        RequestError: if the type is unknown or the schema is missing.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return _schema(schema_of, "schema", name) or Form(ANY_OBJECT, field=name)
    if kind != "json_schema":
        fields.refuse("type", f"is {shown(kind)}; expected text, json_object or json_schema")
    found = _schema(schema_of, "schema", name)
    if found is None:
        schema_of.refuse("schema", "is missing; expected a JSON Schema")
    return found


def _response_format(fields: Fields, name: str) -> Form | None:
    if fields.values.get(name) is None:
        return None
    asked = fields.inner(name)
    kind = asked.values.get("type")
    return schema_form(asked, kind, asked.inner("json_schema") if kind == "json_schema" else asked, name)


def _schema(fields: Fields, name: str, field: str) -> Form | None:
    """Return the form of a schema, an object or its text. An empty object asks for nothing, as in llama-server."""
    value = fields.values.get(name)
    if value is None or value == {}:
        return None
    try:
        schema = json_in(value) if isinstance(value, str) else value
    except ValueError as error:
        fields.refuse(name, f"is {shown(value)}, which is not JSON ({error})")
    if not isinstance(schema, dict):
        fields.refuse(name, f"is {shown(value)}; expected a JSON Schema, an object")
    return Form(json.dumps(schema), field=field)


def _grammar(fields: Fields, name: str) -> Form | None:
    text = fields.text(name)
    return Form(grammar=text, field=name) if text else None


def _choice(fields: Fields, name: str) -> Form | None:
    choices = fields.texts(name)
    if not choices:
        return None
    texts = " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
    return Form(grammar=f"start: CHOICE\nCHOICE: {texts}", field=name)  # rules take ten times as long as a terminal


_FORMS = {
    "response_format": _response_format,
    "json_schema": lambda fields, name: _schema(fields, name, name),
    "guided_json": lambda fields, name: _schema(fields, name, name),
    "grammar": _grammar,
    "guided_grammar": _grammar,
    "guided_choice": _choice,
}
