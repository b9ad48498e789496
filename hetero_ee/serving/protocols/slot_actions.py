"""llama-server's /slots/ID?action=save, restore and erase."""

import asyncio
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hetero_ee.errors import shown
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.protocols.body import read_body
from hetero_ee.serving.served_model import ServedModel
from hetero_ee.serving.slot_files import SlotFiles, idle

ACTIONS = ("save", "restore", "erase")


async def slot_action(request: Request, served: ServedModel) -> Response:
    fields, action = await read_body(request, served.settings), request.query_params.get("action")
    scheduler, given = served.scheduler, request.path_params["number"]
    if not (given.isdecimal() and len(given) < 5 and int(given) < scheduler.n_slots):
        raise RequestError(f"there is no slot {shown(given)}; expected 0 to {scheduler.n_slots - 1}.", status=404)
    number, name, start_s = int(given), fields.text("filename"), time.monotonic()
    if action == "erase":
        n_tokens = await asyncio.wrap_future(scheduler.call(lambda slots: slots.erase(idle(slots, number))))
        return JSONResponse({"id_slot": number, "n_erased": n_tokens})
    if action not in ACTIONS:
        raise RequestError(f"action is {shown(action)}; expected {', '.join(ACTIONS)}.", "action")
    if name is None:
        fields.refuse("filename", "is missing; expected the slot file's name")
    files = SlotFiles(served.engine, served.settings.slot_save_path)
    if action == "save":
        content = await asyncio.wrap_future(scheduler.call(lambda slots: files.copy(slots, number)))
        await asyncio.to_thread(files.write, name, content)
        counts = {"n_saved": len(content.token_ids), "n_written": content.n_bytes}
    else:
        content = await asyncio.to_thread(files.read, name)
        await asyncio.wrap_future(scheduler.call(lambda slots: files.install(slots, number, content)))
        counts = {"n_restored": len(content.token_ids), "n_read": content.n_bytes}
    timings = {f"{action}_ms": 1000 * (time.monotonic() - start_s)}
    return JSONResponse({"id_slot": number, "filename": name, **counts, "timings": timings})
