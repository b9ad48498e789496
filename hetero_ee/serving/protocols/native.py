"""Paths of llama-server and vLLM, and /v1/models, which report the model and the state of the server."""

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetero_ee import __version__
from hetero_ee.errors import shown
from hetero_ee.planning.plan import Plan
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.models import Models
from hetero_ee.serving.protocols.body import read_body
from hetero_ee.serving.served_model import ServedModel

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OWNER = "hetero-ee"
EMBEDDINGS = ("/v1/embeddings", "/embeddings", "/embedding", "/api/embed", "/api/embeddings")
NOT_OFFERED = (*EMBEDDINGS, "/v1/rerank", "/infill")


async def models(request: Request, models: Models) -> Response:
    return JSONResponse({"object": "list", "data": [_card(name, models) for name in models.names]})


async def model(request: Request, models: Models) -> Response:
    return JSONResponse(_card(request.path_params["name"], models))


async def unload(request: Request, models: Models) -> Response:
    """Close a model once its requests have ended, as in llama-server."""
    fields = await read_body(request, models.settings)
    name = fields.text("model")
    if name is None:
        fields.refuse("model", "is missing; expected a model's name")
    if models.is_single:
        fields.refuse("model", f"is {shown(name)}, the only model, which stays loaded")
    await models.unload(name)
    return JSONResponse({"success": True})


async def health(request: Request, models: Models) -> Response:
    if models.problem is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "error", "reason": models.problem}, 503)


async def metrics(request: Request, models: Models) -> Response:
    return Response(models.families.text(), media_type=METRICS_TYPE)


async def props(request: Request, served: ServedModel) -> Response:
    """Answer with llama-server's properties, followed by this server's own, from `plan` on."""
    engine, usual = served.engine, asdict(served.usual)
    plan = engine.plan
    return JSONResponse(
        {
            "default_generation_settings": {"n_ctx": engine.context_tokens, "params": usual},
            "total_slots": served.scheduler.n_slots,
            "model_alias": served.settings.model_name,
            "chat_template": served.template or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"hetero-ee {__version__}",
            "plan": None if plan is None else str(plan),
            "mode": "full" if plan is None else plan.mode,
            "n_layers": engine.spec.n_layers,
            "logprobs": engine.exits is None,
            "page_temperature": served.page_temperature,
            "is_emulated": engine.plan_request is not None and engine.plan_request.emulates,
            "placement": None if plan is None else _placement(plan),
            "memory": served.scheduler.memory,
        }
    )


def _placement(plan: Plan) -> dict[str, object]:
    """Return the placement and the memory of each part, and the expected speed."""
    parts = [
        {
            "name": each.name,
            "layer": each.layer,
            "placement": each.decode_placement,
            "prompt_placement": each.prefill_placement,
            "weight_bytes": each.weight_bytes,
        }
        for each in plan.parts
    ]
    expected = {
        "generated_tokens_per_s": plan.prediction.generated_tokens_per_s,
        "prompt_tokens_per_s": plan.prediction.prompt_tokens_per_s,
        "tokens_per_pass": plan.prediction.tokens_per_pass,
    }
    memory = [asdict(each) for each in plan.memory]
    decided = {"exit_layer": plan.exit_layer, "draft_length": plan.draft_length}
    return {"hardware": plan.hardware, **decided, "parts": parts, "expected": expected, "memory": memory}


async def tokenizer_info(request: Request, served: ServedModel) -> Response:
    """Answer with the special tokens and the chat template, as vLLM does and lm-evaluation-harness needs."""
    special = served.engine.tokenizer.special_tokens
    names = ("bos_token", "eos_token", "pad_token")
    return JSONResponse({name: special.get(name) for name in names} | {"chat_template": served.template})


async def tokenize(request: Request, served: ServedModel) -> Response:
    """Answer with the token ids of llama-server's `content`, or of vLLM's `prompt`, which gets a begin token."""
    fields = await read_body(request, served.settings)
    content, prompt = fields.text("content"), fields.text("prompt")
    if content is None and prompt is None:
        fields.refuse("content", "is missing; expected the text")
    flags = {name: fields.flag(name) for name in ("add_special", "add_special_tokens") if name in fields.values}
    special = flags.get("add_special" if prompt is None else "add_special_tokens", prompt is not None)
    text = prompt if content is None else content
    ids = await served.encode(text or "", with_special_tokens=special)
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": served.most_tokens})


async def detokenize(request: Request, served: ServedModel) -> Response:
    fields = await read_body(request, served.settings)
    text = await served.decode(fields.items("tokens") or [])
    return JSONResponse({"content": text, "prompt": text})


async def not_offered(request: Request, models: Models) -> Response:
    """Refuse a path that other servers offer and this one does not."""
    path = request.url.path
    why = "no model here gives embeddings; " if path in EMBEDDINGS else ""
    raise RequestError(
        f"{path} is not offered: {why}this server generates text, at /v1/chat/completions, /v1/completions, "
        "/v1/responses and /v1/messages.",
        code="unsupported_endpoint",
    )


def _card(name: str, models: Models) -> dict[str, object]:
    """Return a model's entry in the list of models. Its shape is included only while it is loaded."""
    served = models.served(name)
    card = {"id": name, "object": "model", "created": models.created_s, "owned_by": OWNER}
    card["status"] = {"value": models.status(name)}
    if served is None:
        return card
    spec = served.engine.spec
    meta = {"n_vocab": spec.vocab_size, "n_ctx": served.most_tokens, "n_ctx_train": spec.max_context_tokens}
    return {**card, "max_model_len": served.most_tokens, "meta": meta}
