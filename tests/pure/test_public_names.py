"""What `import hetero_ee` gives: each name once, and each type that a public signature names."""

import ast
import inspect
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import pytest

import hetero_ee
from hetero_ee import CalibrationRequest, Conversation, Engine, HardwareProfile, Limits, Plan, Reply, SamplingChanges
from hetero_ee.options.engine import ENGINE_OPTIONS
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.request import EngineOptions

MADE_BY_USERS = (SamplingParams, Limits, CalibrationRequest)
WITH_METHODS = (Engine, Conversation, Reply, Plan, HardwareProfile, hetero_ee.AsyncTokens, hetero_ee.GenerationResult)
PLAIN = {"builtins", "typing", "collections.abc", "pathlib", "types", "torch"}


def functions(owner: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods, class methods and properties of a class, and what makes one that users make."""
    for name, member in vars(owner).items():
        member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(member) and (not name.startswith("_") or (name == "__init__" and owner in MADE_BY_USERS)):
            yield f"{owner.__name__}.{name}", member


def named(annotation: Any) -> Iterator[Any]:
    """The types that it is made of."""
    if get_origin(annotation) is None:
        yield annotation
    for part in get_args(annotation):
        for each in part if isinstance(part, list) else [part]:
            yield from named(each)


@pytest.mark.parametrize(
    ("name", "function"), [each for owner in (*MADE_BY_USERS, *WITH_METHODS) for each in functions(owner)]
)
def test_the_types_of_public_signatures_are_exported(name: str, function: Callable[..., Any]) -> None:
    public = [getattr(hetero_ee, each) for each in hetero_ee.__all__]
    exported = {id(each) for each in public} | {id(base) for each in public for base in getattr(each, "__bases__", ())}
    for annotation in get_type_hints(function).values():
        for part in named(annotation):
            is_type = isinstance(part, type) and not isinstance(part, types.GenericAlias)
            if is_type and part.__module__ not in PLAIN:
                assert id(part) in exported, f"{name} names {part.__module__}.{part.__name__}"


def test_type_checkers_see_the_names_that_there_are() -> None:
    tree = ast.parse(Path(hetero_ee.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {*seen, "__version__"} == set(hetero_ee.__all__) == set(dir(hetero_ee))
    for name, (module, original) in seen.items():
        assert name == original and module == hetero_ee._HOME_OF[name] and getattr(hetero_ee, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Enigne'"):
        _ = hetero_ee.Enigne


def test_keyword_arguments_of_sampling_are_its_fields() -> None:
    assert is_typeddict(SamplingChanges)
    changes, params = get_type_hints(SamplingChanges), get_type_hints(SamplingParams)
    assert list(changes) == [field.name for field in fields(SamplingParams)]
    looser = {"stop", "stop_token_ids", "logit_bias", "json_schema"}  # more is taken than what it is kept as
    assert {name: kind for name, kind in changes.items() if name not in looser} == {
        name: kind for name, kind in params.items() if name not in looser
    }


def test_keyword_arguments_of_an_engine_are_its_options() -> None:
    assert set(EngineOptions.__annotations__) == {*ENGINE_OPTIONS, "progress"}
    explained = Engine.from_pretrained.__doc__ or ""
    assert not [name for name in EngineOptions.__annotations__ if not re.search(rf"\b{name}\b", explained)]
    misspelt: Any = {"thread": 2}
    with pytest.raises(TypeError, match=r"there is no option 'thread'; did you mean threads\?"):
        Engine.from_pretrained(**misspelt)
