"""The server under load: time to the first token and between tokens, tokens a second, beside one client alone.

    PYTHONPATH=. python tests/bench/bench_server.py --json                     # clients 1, 8, 32, 128
    PYTHONPATH=. python tests/bench/bench_server.py --json --rival llama-cpp   # and llama-cpp-python's own server

Each client streams completions of the demo model, one after the other, with prompts that begin differently. All of it
runs on this machine, the clients too, who take a part of its time. The rival (pip install
"llama-cpp-python[server]") is llama.cpp behind Python, which takes one text at a time; it runs the demo model as a
GGUF file in Q4_0. The last line is JSON.
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetero_ee.config import demo_model_folder

WORDS = ("dog", "cat", "boat", "tree", "girl", "boy", "bear", "king", "bird", "fish", "ball", "house", "car", "duck")
Q4_0 = 2  # llama.cpp's number of the type
START_S = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a server."""

    n_clients: int
    n_requests: int  # of each client
    n_tokens: int  # of each text


@dataclass(frozen=True, slots=True)
class Heard:
    """One text as its client heard it."""

    asked_s: float
    token_s: tuple[float, ...]  # when each piece came


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--tokens", type=int, default=32, help="of each text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parallel", type=int, default=16, help="texts at a time")
    parser.add_argument("--rival", choices=("llama-cpp",))
    parser.add_argument("--json", action="store_true", help="the last line alone")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for name in ("hetero-ee", *([arguments.rival] if arguments.rival else [])):
        with tempfile.TemporaryDirectory() as folder:
            words = ours(arguments) if name == "hetero-ee" else rival(arguments, Path(folder))
            with running(words) as port:
                loads = [Load(n, arguments.requests, arguments.tokens) for n in arguments.clients]
                asyncio.run(under(port, Load(1, 1, arguments.tokens)))  # what is done once is done
                found[name] = [row(each, asyncio.run(under(port, each))) for each in loads]
        for each in found[name] if not arguments.json else ():
            print(name, {key: round(value, 4) for key, value in each.items()}, flush=True)
    print(json.dumps({"threads": arguments.threads, "parallel": arguments.parallel, "servers": found}))


def ours(arguments: argparse.Namespace) -> list[str]:
    serve = [sys.executable, "-m", "hetero_ee_cli", "serve", "-t", str(arguments.threads)]
    return [*serve, "--parallel", str(arguments.parallel), "--queue", "1000", "--mode", "full", "--port"]


def rival(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """llama-cpp-python's server on the demo model in Q4_0."""
    import llama_cpp
    import torch
    import transformers

    from tests.gguf_models import write_gguf

    demo = demo_model_folder()
    model = transformers.AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    write_gguf(model, folder / "F16.gguf", lambda _: "F16", tokenizer=demo)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = Q4_0
    file = folder / "Q4_0.gguf"
    llama_cpp.llama_model_quantize(str(folder / "F16.gguf").encode(), str(file).encode(), params)
    words = [sys.executable, "-m", "llama_cpp.server", "--model", str(file), "--n_ctx", "512", "--verbose", "false"]
    return [*words, "--n_threads", str(arguments.threads), "--interrupt_requests", "false", "--port"]


@contextmanager
def running(words: list[str]) -> Iterator[int]:
    """The port of a server that answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    process = subprocess.Popen([*words, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + START_S
        while not answers(port):
            if process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"{' '.join(words)} does not answer.")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def under(port: int, load: Load) -> list[Heard]:
    """All texts of so many clients at once."""

    async def client(number: int) -> list[Heard]:
        return [await text(port, load, number * load.n_requests + each) for each in range(load.n_requests)]

    async with asyncio.timeout(600):
        found = await asyncio.gather(*(client(number) for number in range(load.n_clients)))
    return [each for texts in found for each in texts]


async def text(port: int, load: Load, number: int) -> Heard:
    """One, heard without a library, whose time would be the machine's."""
    about = " and a ".join(WORDS[(number // len(WORDS) ** place) % len(WORDS)] for place in range(4))
    asked = {"prompt": f"There was a {about}. Once upon a time", "max_tokens": load.n_tokens, "stream": True}
    body = json.dumps(asked | {"seed": number, "ignore_eos": True, "temperature": 0.8}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reading, writing = await asyncio.open_connection("127.0.0.1", port)
    asked_s, heard = time.perf_counter(), list[float]()
    writing.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    try:
        status = await reading.readline()
        if b" 200 " not in status:
            raise SystemExit(f"the server answered {status!r}.")
        async for line in reading:
            if line.startswith(b"data: {"):
                heard.append(time.perf_counter())
    finally:
        writing.close()
    return Heard(asked_s, tuple(heard))


def row(load: Load, texts: list[Heard]) -> dict[str, float]:
    """Percentiles over all texts, and the rate from the first request to the last token."""
    first = [1000 * (each.token_s[0] - each.asked_s) for each in texts]
    between = np.concatenate([1000 * np.diff(each.token_s) for each in texts])
    n_tokens = sum(len(each.token_s) for each in texts)
    took_s = max(each.token_s[-1] for each in texts) - min(each.asked_s for each in texts)
    quantiles = {
        f"{name}_p{p}_ms": float(np.percentile(values, p))
        for name, values in (("first", first), ("between", between))
        for p in (50, 99)
    }
    return {"clients": load.n_clients, "texts": len(texts), "tokens_per_s": n_tokens / took_s, **quantiles}


if __name__ == "__main__":
    main()
