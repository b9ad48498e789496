"use strict";
// The chat at `/`: messages are kept in this page alone, and shown as text, never as HTML.

// The documents of a stream of server-sent events, from the pieces of text in which it arrives.
async function* documents(pieces) {
  let rest = "";
  for await (const piece of pieces) {
    rest += piece;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue; // a comment: the server lives
      const data = block.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
  throw new Error("the connection ended before the reply did.");
}

// Text as it arrives in a response's body.
async function* textOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

function begin(page) {
  const at = (id) => page.getElementById(id);
  const messages = [];
  let running = null; // what stops the reply that is being written

  const headers = () => {
    const key = at("key").value;
    return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  };

  function show(kind, text) {
    const shown = page.createElement("article");
    shown.className = kind;
    shown.textContent = text;
    at("log").append(shown);
    shown.scrollIntoView({ block: "end" });
    return shown;
  }

  async function greet() {
    const answer = await fetch("/v1/models", { headers: headers() });
    at("key").hidden = answer.ok && !at("key").value;
    if (answer.ok) at("model").textContent = (await answer.json()).data[0].id;
  }

  async function reply(shown, stop) {
    const body = JSON.stringify({ messages, stream: true });
    const answer = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body, signal: stop.signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const found of documents(textOf(answer.body))) {
      if (found.error) throw new Error(found.error.message);
      shown.textContent += found.choices[0]?.delta.content ?? "";
      shown.scrollIntoView({ block: "end" });
      if (found.timings) {
        const { prompt_n, cache_n, predicted_n, predicted_per_second } = found.timings;
        const rate = predicted_per_second.toFixed(1);
        at("status").textContent = `${prompt_n} tokens read, ${cache_n} cached, ${predicted_n} generated, ${rate} tokens/s`;
      }
    }
  }

  async function send() {
    const text = at("text").value.trim();
    if (running || !text) return;
    at("text").value = "";
    at("status").textContent = "";
    messages.push({ role: "user", content: text });
    show("user", text);
    const shown = show("assistant", "");
    const stop = (running = new AbortController());
    at("send").textContent = "Stop";
    try {
      await reply(shown, stop);
    } catch (error) {
      if (!stop.signal.aborted) show("error", error.message);
    } finally {
      running = null;
      at("send").textContent = "Send";
    }
    if (!messages.length) return; // a new chat has begun meanwhile
    if (shown.textContent) messages.push({ role: "assistant", content: shown.textContent });
    else messages.pop(); // nothing was said to it
  }

  at("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else send();
  });
  at("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  at("clear").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    at("log").replaceChildren();
    at("status").textContent = "";
  });
  at("key").addEventListener("change", greet);
  greet();
  return send;
}

if (typeof document !== "undefined") begin(document);
