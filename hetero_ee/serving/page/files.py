"""Serves the files of the chat page, each at its own path."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from hetero_ee.serving.models import Models

FOLDER = Path(__file__).parent / "assets"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
# By path: the page itself, its style, and one noun a script.
SCRIPTS = (
    *("main.js", "api.js", "candidates.js", "chat.js", "figures.js", "markdown.js"),
    *("parameters.js", "placement.js", "render.js", "saved.js", "tokens.js"),
)
FILES = {"/": "index.html"} | {f"/page/{name}": name for name in ("style.css", *SCRIPTS)}
HEADERS = {
    # Nothing from elsewhere, no styles or scripts in the page itself, and no other page around this one.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def file(request: Request, models: Models) -> Response:
    found = FOLDER / FILES[request.url.path]
    return FileResponse(found, headers=HEADERS, media_type=TYPES[found.suffix])
