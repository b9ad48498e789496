// Requests to this server and its streamed answers.

// An error answer with its status.
export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// The documents in a stream of server-sent events, from pieces of its text.
export async function* documents(pieces) {
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

async function asked(path, key, options = {}) {
  const authorization = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { ...options, headers: { "Content-Type": "application/json", ...authorization } });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new Refusal(said.error?.message ?? `the server answered with status ${answer.status}.`, answer.status);
}

// The models of the server: id and status. Throws Refusal.
export async function models(key) {
  return (await (await asked("/v1/models", key)).json()).data;
}

// What the server runs and how. Loads the model if necessary. Throws Refusal.
export async function props(key, model) {
  return (await asked(`/props?model=${encodeURIComponent(model)}`, key)).json();
}

// The events of a reply: `choices`, at the end `timings`. Throws Refusal, and Error where it breaks off.
export async function* reply(body, key, signal) {
  const answer = await asked("/v1/chat/completions", key, { method: "POST", body: JSON.stringify(body), signal });
  for await (const found of documents(textOf(answer.body))) {
    if (found.error) throw new Error(found.error.message);
    yield found;
  }
}
