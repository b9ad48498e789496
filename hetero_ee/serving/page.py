"""The chat at `/`: two static files, which ask for nothing but what this server answers."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from hetero_ee.serving.served_model import ServedModel

FOLDER = Path(__file__).parent
HEADERS = {
    # Nothing from elsewhere, and no other page around this one.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


async def page(request: Request, served: ServedModel) -> Response:
    """The page itself."""
    return FileResponse(FOLDER / "page.html", headers=HEADERS, media_type="text/html")


async def script(request: Request, served: ServedModel) -> Response:
    """What it runs."""
    return FileResponse(FOLDER / "page.js", headers=HEADERS, media_type="text/javascript")
