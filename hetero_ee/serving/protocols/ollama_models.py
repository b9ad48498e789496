"""Ollama's paths that describe models and server: /api/tags, /api/ps, /api/show and /api/version."""

import hashlib
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetero_ee.decoding.channels import THINK
from hetero_ee.serving.models import Models
from hetero_ee.serving.protocols.body import read_body
from hetero_ee.serving.served_model import ServedModel

VERSION = "0.12.6"  # ollama version whose answers these follow; some clients require a minimum
NEVER = "9999-12-31T23:59:59Z"


async def tags(request: Request, models: Models) -> Response:
    return JSONResponse({"models": [_card(name, models.served(name), models.created_s) for name in models.names]})


async def running(request: Request, models: Models) -> Response:
    """Answer with the loaded models. They have no expiry: they stay loaded until others need their memory."""
    cards = [
        (_card(name, served, models.created_s), served) for name in models.names if (served := models.served(name))
    ]
    more = {"expires_at": NEVER, "size_vram": 0}
    return JSONResponse({"models": [{**card, **more, "context_length": each.most_tokens} for card, each in cards]})


async def version(request: Request, models: Models) -> Response:
    return JSONResponse({"version": VERSION})


async def show(request: Request, models: Models) -> Response:
    """Answer with a model's shape and capabilities. Most of these are empty while the model is not loaded."""
    fields = await read_body(request, models.settings)
    name, old_name = fields.text("model"), fields.text("name")
    served = models.served(models.named(name or old_name))
    template = "" if served is None else served.template or ""
    able = ["completion", *(["tools"] if template else []), *(["thinking"] if THINK in template else [])]
    card = {"modelfile": "", "parameters": "", "license": "", "template": template, "capabilities": able}
    known = {"details": {}, "model_info": {}} if served is None else _shape(served)
    return JSONResponse(card | known)


def _shape(served: ServedModel) -> dict[str, Any]:
    spec, kind = served.engine.spec, _family(served)
    info = {
        "general.architecture": kind,
        "general.parameter_count": served.engine.executor.weights.n_weights,
        f"{kind}.context_length": served.most_tokens,
        f"{kind}.block_count": spec.n_layers,
        f"{kind}.embedding_length": spec.hidden_size,
        f"{kind}.vocab_size": spec.vocab_size,
    }
    return {"details": _details(served), "model_info": info}


def timestamp(at_s: float | None = None) -> str:
    """Format a time as ollama does.

    Args:
        at_s: seconds since 1970; None for now.
    """
    at = datetime.now(UTC) if at_s is None else datetime.fromtimestamp(at_s, UTC)
    return at.isoformat().replace("+00:00", "Z")


def _family(served: ServedModel) -> str:
    return served.engine.spec.architecture.removesuffix("ForCausalLM").lower()


def _card(name: str, served: ServedModel | None, at_s: float) -> dict[str, Any]:
    """Return a model's entry in the list of models, with the size and details of its weights once it is loaded.

    The digest is a hash of the name, since nothing here is downloaded by digest.
    """
    n_bytes = 0 if served is None else served.engine.executor.weights.n_bytes
    head = {"name": name, "model": name, "modified_at": timestamp(at_s), "size": n_bytes}
    digest = hashlib.sha256(name.encode()).hexdigest()
    return {**head, "digest": digest, "details": {} if served is None else _details(served)}


def _details(served: ServedModel) -> dict[str, Any]:
    family, n_weights = _family(served), served.engine.executor.weights.n_weights
    return {
        "parent_model": "",
        "format": "hetero-ee",
        "family": family,
        "families": [family],
        "parameter_size": f"{n_weights / 1e6:.1f}M",
        "quantization_level": served.engine.quantizer,
    }
