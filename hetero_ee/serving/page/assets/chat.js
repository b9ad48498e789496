// The messages of a chat: send, stream, stop, edit, regenerate.
import { reply } from "/page/api.js";
import { copied, render } from "/page/render.js";
import { addTokens, align, leafOf } from "/page/tokens.js";

export class Chat {
  // asked: returns a request's fields for its messages. changed: called when a reply begins, grows, ends or changes, and
  // when editing a message begins or ends.
  constructor(page, log, asked, changed) {
    [this.page, this.log, this.asked, this.changed] = [page, log, asked, changed];
    [this.messages, this.running] = [[], null]; // running: stops the current reply
    this.editing = null; // the message that the next one replaces, together with all that follow
  }

  async say(text) {
    if (this.running || !text) return;
    const edited = this.editing;
    this.edit(null);
    if (edited) this.takeBack(this.messages.indexOf(edited));
    this.add({ role: "user", text, tokens: [] });
    await this.answer();
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.edit(null);
    this.messages = [];
    this.log.replaceChildren();
  }

  // Shows an earlier chat in place of this one.
  open(messages) {
    this.clear();
    for (const { role, text, thought } of messages) {
      const message = this.add({ role, text, thought, tokens: [] });
      if (role === "assistant") this.draw(message);
    }
  }

  edit(message) {
    if (this.running || message === this.editing) return;
    this.editing?.shown.classList.remove("editing");
    this.editing = message;
    message?.shown.classList.add("editing");
    this.changed("edited", message);
  }

  // Removes all messages after the first n, and all errors.
  takeBack(n) {
    for (const each of this.messages.splice(n)) each.shown.remove();
    for (const each of this.log.querySelectorAll(".error")) each.remove();
  }

  // Removes the last reply, if there is one, and requests a new one.
  async regenerate() {
    if (this.running || !this.messages.length) return;
    this.edit(null);
    this.takeBack(this.messages.length - (this.messages.at(-1).role === "assistant"));
    await this.answer();
  }

  async answer() {
    const { messages } = this;
    const said = this.add({ role: "assistant", thought: "", text: "", tokens: [] });
    const stop = (this.running = new AbortController());
    this.changed("begun", said);
    try {
      await this.listen(said, stop.signal);
    } catch (error) {
      if (!stop.signal.aborted) this.failed(error);
    }
    this.running = null;
    if (messages === this.messages && !said.text && !said.thought) this.messages.pop().shown.remove(); // nothing was said
    this.draw(said);
    this.changed("ended", said);
  }

  async listen(said, signal) {
    const messages = this.messages.slice(0, -1).map(({ role, text }) => ({ role, content: text }));
    const { key, body } = this.asked(messages);
    for await (const found of reply(body, key, signal)) {
      const choice = found.choices[0];
      if (choice) {
        addTokens(said.tokens, choice);
        said.thought += choice.delta.reasoning_content ?? "";
        said.text += choice.delta.content ?? "";
        this.draw(said);
      }
      if (found.timings) said.timings = found.timings;
      this.changed("came", said);
    }
  }

  add(message) {
    const shown = this.page.createElement("article");
    shown.className = message.role;
    shown.setAttribute("aria-label", message.role === "user" ? "You" : "The model");
    if (message.role === "user") this.withEdit(shown, message);
    else this.withTools(shown, message);
    message.shown = shown;
    this.messages.push(message);
    this.log.append(shown);
    shown.scrollIntoView({ block: "end" });
    return message;
  }

  withEdit(shown, message) {
    const [edit, text] = ["button", "span"].map((name) => this.page.createElement(name));
    edit.type = "button";
    edit.className = "edit";
    edit.textContent = "Edit";
    edit.setAttribute("aria-label", "Edit the message");
    edit.addEventListener("click", () => this.edit(message));
    text.className = "said";
    text.textContent = message.text;
    shown.append(edit, text);
  }

  withTools(shown, message) {
    const make = (name) => this.page.createElement(name);
    const [thoughts, summary, thought, text, copy] = ["details", "summary", "p", "div", "button"].map(make);
    summary.textContent = "Thoughts";
    thought.className = "thought";
    thoughts.hidden = true;
    thoughts.append(summary, thought);
    text.className = "text";
    text.tabIndex = 0; // arrows go from token to token
    copy.type = "button";
    copy.className = "copy";
    copy.textContent = "Copy";
    copy.setAttribute("aria-label", "Copy the reply");
    copy.addEventListener("click", () => copied(this.page, message.text, text, copy));
    shown.append(thoughts, text, copy);
  }

  draw(message) {
    if (message.isDue) return;
    message.isDue = true; // at most once a frame, however fast tokens come
    requestAnimationFrame(() => {
      message.isDue = false;
      const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 80;
      const [text, thought] = [".text", ".thought"].map((each) => message.shown.querySelector(each));
      thought.textContent = message.thought;
      thought.parentElement.hidden = message.thought === "";
      align(message.tokens, message.thought, message.text);
      text.replaceChildren(render(this.page, message.text, leafOf(this.page, message.tokens)));
      if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
      this.changed("drawn", message);
    });
  }

  failed(error) {
    const shown = this.page.createElement("p");
    shown.className = "error";
    shown.setAttribute("role", "alert");
    shown.textContent = error.message;
    this.log.append(shown);
    shown.scrollIntoView({ block: "end" });
    this.changed("failed", error);
  }
}
