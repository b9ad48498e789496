// Puts the page together and handles keys and buttons.
import { props } from "/page/api.js";
import { Candidates } from "/page/candidates.js";
import { Chat } from "/page/chat.js";
import { Figures } from "/page/figures.js";
import { parameters, showDefaults, systemMessage } from "/page/parameters.js";
import { showPlacement } from "/page/placement.js";

const at = (id) => document.getElementById(id);
const figures = new Figures(document, at);
const candidates = new Candidates(document, at("candidates"));
const chat = new Chat(document, at("log"), asked, changed);
let server = { logprobs: false, n_layers: 0 }; // the server's properties

function asked(messages) {
  const nTop = Number(at("parameters").elements.candidates.value);
  const likely = server.logprobs && nTop > 0 ? { logprobs: true, top_logprobs: nTop } : {};
  const talk = [...systemMessage(at("parameters")), ...messages];
  const body = { messages: talk, stream: true, return_token_origins: true, ...likely, ...parameters(at("parameters")) };
  return { key: at("key").value, body };
}

function changed(what, said) {
  const isRunning = chat.running !== null;
  at("send").textContent = isRunning ? "Stop" : "Send";
  at("regenerate").disabled = isRunning || chat.messages.at(-1)?.role !== "assistant";
  if (what === "begun") figures.begin();
  if (what === "came") figures.add(said.tokens);
  if (what === "drawn") candidates.hide();
  if (what === "failed" && said.status === 401) greet();
  if (what !== "ended" || !said.timings) return;
  const { prompt_n: n, cache_n: cached, predicted_n: made, predicted_per_second: rate } = said.timings;
  figures.speed(rate);
  at("status").textContent = `${n} tokens read, ${cached} cached, ${made} generated, ${rate.toFixed(1)} tokens/s`;
  greet();
}

// Shows the server's properties, and the key field if the server requires a key.
async function greet() {
  try {
    server = await props(at("key").value);
  } catch (error) {
    at("key").hidden = error.status !== 401;
    at("status").textContent = error.message;
    return;
  }
  at("model").textContent = server.model_alias;
  at("mode").textContent = server.mode;
  at("key").hidden = !at("key").value;
  at("parameters").elements.candidates.disabled = !server.logprobs;
  [figures.nLayers, figures.expected] = [server.n_layers, server.placement?.expected.generated_tokens_per_s ?? null];
  figures.isEmulated = server.is_emulated;
  showDefaults(at("parameters"), server.default_generation_settings.params);
  showPlacement(document, at("placement"), server);
}

async function send() {
  const text = at("text").value.trim();
  if (chat.running || !text) return;
  at("text").value = "";
  at("status").textContent = "";
  await chat.say(text);
}

// The token of a reply under an event, with its span.
function pointed(target) {
  const span = target.closest?.(".token[data-token]");
  const said = span && chat.messages.find((each) => each.shown.contains(span));
  return said ? [span, said.tokens[Number(span.dataset.token)]] : null;
}

function showToken(found) {
  if (found) candidates.show(...found, server.n_layers);
  else candidates.hide();
}

// Arrows in a reply go from token to token.
function stepped(event) {
  const spans = [...event.target.querySelectorAll(".token[data-token]")];
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || !spans.length) return;
  event.preventDefault();
  const now = spans.indexOf(candidates.span);
  const next = now < 0 ? (step > 0 ? 0 : spans.length - 1) : Math.max(0, Math.min(spans.length - 1, now + step));
  spans[next].scrollIntoView({ block: "nearest" });
  showToken(pointed(spans[next]));
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.running) chat.stop();
  else send();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  candidates.hide();
  chat.stop();
});
at("log").addEventListener("mouseover", (event) => showToken(pointed(event.target)));
at("log").addEventListener("click", (event) => showToken(pointed(event.target)));
at("log").addEventListener("mouseleave", () => candidates.hide());
at("log").addEventListener("scroll", () => candidates.hide());
at("log").addEventListener("focusout", () => candidates.hide());
at("log").addEventListener("keydown", (event) => event.target.classList.contains("text") && stepped(event));
at("regenerate").addEventListener("click", () => chat.regenerate());
at("clear").addEventListener("click", () => {
  chat.clear();
  figures.begin();
  at("status").textContent = "";
  at("regenerate").disabled = true;
  at("text").focus();
});
at("key").addEventListener("change", greet);
at("coloured").addEventListener("change", (event) => at("log").classList.toggle("coloured", event.target.checked));
for (const name of ["engine", "settings"]) {
  at(`show-${name}`).addEventListener("click", (event) => {
    const isShown = at(name).classList.toggle("shown");
    event.currentTarget.setAttribute("aria-expanded", String(isShown));
  });
}
greet();
