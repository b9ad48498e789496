// Puts the page together and handles keys and buttons.
import { models, props } from "/page/api.js";
import { Candidates } from "/page/candidates.js";
import { Chat } from "/page/chat.js";
import { Figures } from "/page/figures.js";
import { parameters, showDefaults, systemMessage } from "/page/parameters.js";
import { showPlacement } from "/page/placement.js";
import { SavedChats, fileOf, titleOf } from "/page/saved.js";

const LOADING = "Loading";
const at = (id) => document.getElementById(id);
const figures = new Figures(document, at);
const candidates = new Candidates(document, at("candidates"));
const chat = new Chat(document, at("log"), asked, changed);
const saved = new SavedChats(storage());
let server = { logprobs: false, n_layers: 0 }; // properties of the server and its chosen model
let chatId = Date.now();
let draft = null; // what the message field held before an earlier message was edited

function storage() {
  try {
    return window.localStorage;
  } catch {
    return null; // not allowed by the user
  }
}

const system = () => systemMessage(at("parameters"))[0]?.content ?? "";
const current = () => ({ id: chatId, model: server.model_alias ?? "", system: system(), messages: chat.messages });
const sampling = () => parameters(at("parameters"), server.page_temperature);

function asked(messages) {
  const nTop = Number(at("parameters").elements.candidates.value);
  const likely = server.logprobs && nTop > 0 ? { logprobs: true, top_logprobs: nTop } : {};
  const talk = [...systemMessage(at("parameters")), ...messages];
  const body = { messages: talk, stream: true, return_token_origins: true, ...likely, ...sampling() };
  if (!at("models").hidden) body.model = at("models").value;
  return { key: at("key").value, body };
}

function changed(what, said) {
  const isRunning = chat.running !== null;
  at("send").textContent = isRunning ? "Stop" : "Send";
  at("regenerate").disabled = isRunning || !chat.messages.length;
  at("export").disabled = at("regenerate").disabled;
  if (what === "edited") showEdit(said);
  if (what === "begun") figures.begin();
  if (what === "came") figures.add(said.tokens);
  if (what === "drawn") candidates.hide();
  if (what === "failed" && said.status === 401) greet();
  if (what === "ended") keep();
  if (what !== "ended" || !said.timings) return;
  const { prompt_n: n, cache_n: cached, predicted_n: made, predicted_per_second: rate } = said.timings;
  figures.speed(rate);
  at("status").textContent = `${n} tokens read, ${cached} cached, ${made} generated, ${rate.toFixed(1)} tokens/s`;
  greet();
}

// Puts a message into the message field, or takes it out again.
function showEdit(message) {
  if (message) draft ??= at("text").value;
  at("text").value = message ? message.text : draft;
  if (!message) draft = null;
  at("status").textContent = message ? "Editing: sending replaces this message and all that follow; Esc cancels." : "";
  at("text").focus();
}

// Saves the chat in this browser.
function keep() {
  if (!chat.messages.length) return;
  const isKept = saved.keep(current());
  showSaved(isKept ? "" : "This browser does not save chats for this page.");
}

function showSaved(problem = "") {
  const chats = saved.list();
  at("kept").textContent = problem || (chats.length ? "Saved in this browser only." : "No saved chats.");
  const button = (name, said, click) => {
    const made = document.createElement("button");
    [made.type, made.className, made.textContent] = ["button", name, said];
    made.addEventListener("click", click);
    return made;
  };
  const rows = chats.map((each) => {
    const row = document.createElement("li");
    const title = `${titleOf(each)} (${new Date(each.id).toLocaleString()})`;
    const remove = button("delete", "Delete", () => {
      saved.remove(each.id);
      showSaved();
    });
    remove.setAttribute("aria-label", `Delete ${title}`);
    row.append(button("open", title, () => begin(each)), remove);
    return row;
  });
  at("saved").replaceChildren(...rows);
}

// Begins a new chat, or continues a saved one. The current one is saved.
function begin(found = null) {
  keep();
  chat.open(found?.messages ?? []);
  chatId = found?.id ?? Date.now();
  if (found) at("parameters").elements.system.value = found.system ?? "";
  figures.begin();
  at("status").textContent = "";
  changed("opened");
  at("text").focus();
}

function exportChat() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([fileOf(current(), sampling())], { type: "application/json" }));
  link.download = `chat-${new Date(chatId).toISOString().slice(0, 19).replaceAll(":", "-")}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// Shows the chosen model's properties, and the key field if the server requires a key.
async function greet() {
  try {
    const chosen = showModels(await models(at("key").value));
    server = await props(at("key").value, chosen);
  } catch (error) {
    at("key").hidden = error.status !== 401;
    at("status").textContent = error.message;
    return;
  }
  if (at("status").textContent.startsWith(LOADING)) at("status").textContent = "";
  at("model").textContent = server.model_alias;
  at("mode").textContent = server.mode;
  at("key").hidden = !at("key").value;
  at("parameters").elements.candidates.disabled = !server.logprobs;
  [figures.nLayers, figures.expected] = [server.n_layers, server.placement?.expected.generated_tokens_per_s ?? null];
  figures.isEmulated = server.is_emulated;
  at("notice").hidden = server.chat_template !== "";
  at("send").disabled = server.chat_template === "";
  showDefaults(at("parameters"), server.default_generation_settings.params, server.page_temperature);
  showPlacement(document, at("placement"), server);
}

// Offers the models, if there are several, and returns the chosen one.
function showModels(found) {
  const list = at("models");
  const isLoaded = ({ status }) => status?.value === "loaded";
  const chosen = list.value || (found.find(isLoaded) ?? found[0]).id;
  list.replaceChildren(...found.map(({ id }) => new Option(id, id, false, id === chosen)));
  list.hidden = found.length < 2;
  at("model").hidden = !list.hidden;
  if (!found.some((each) => each.id === chosen && isLoaded(each))) at("status").textContent = `${LOADING} ${chosen} ...`;
  return chosen;
}

async function send() {
  const text = at("text").value.trim();
  if (chat.running || !text || at("send").disabled) return;
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
  chat.edit(null);
});
at("log").addEventListener("mouseover", (event) => showToken(pointed(event.target)));
at("log").addEventListener("click", (event) => showToken(pointed(event.target)));
at("log").addEventListener("mouseleave", () => candidates.hide());
at("log").addEventListener("scroll", () => candidates.hide());
at("log").addEventListener("focusout", () => candidates.hide());
at("log").addEventListener("keydown", (event) => event.target.classList.contains("text") && stepped(event));
at("regenerate").addEventListener("click", () => chat.regenerate());
at("clear").addEventListener("click", () => begin());
at("export").addEventListener("click", exportChat);
at("models").addEventListener("change", greet);
at("key").addEventListener("change", greet);
at("coloured").addEventListener("change", (event) => at("log").classList.toggle("coloured", event.target.checked));
for (const name of ["chats", "engine", "settings"]) {
  at(`show-${name}`).addEventListener("click", (event) => {
    const isShown = at(name).classList.toggle("shown");
    event.currentTarget.setAttribute("aria-expanded", String(isShown));
  });
}
showSaved();
greet();
