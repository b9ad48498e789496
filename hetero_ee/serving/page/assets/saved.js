// Chats that the browser keeps for this page, the latest first, and the export of one to a file.

const KEY = "hetero-ee.chats";
const MOST = 100;
const TITLE = 80; // characters of the first message

export class SavedChats {
  // storage: the browser's, or null if it allows none.
  constructor(storage) {
    this.storage = storage;
  }

  // Returns the chats: id (when it began, in ms), model, system, messages.
  list() {
    try {
      const found = JSON.parse(this.storage?.getItem(KEY) ?? "[]");
      return Array.isArray(found) ? found.filter((each) => Array.isArray(each?.messages)) : [];
    } catch {
      return []; // this page did not write it
    }
  }

  // Returns whether the chat was kept. If storage is full, the oldest chats are deleted.
  keep(chat) {
    const said = chat.messages.filter(({ text, thought }) => text || thought);
    const messages = said.map(({ role, text, thought = "" }) => ({ role, text, thought }));
    const others = this.list().filter((each) => each.id !== chat.id);
    for (let n = Math.min(MOST - 1, others.length); n >= 0; n -= 1) {
      if (this.write([{ ...chat, messages }, ...others.slice(0, n)])) return true;
    }
    return false;
  }

  remove(id) {
    this.write(this.list().filter((each) => each.id !== id));
  }

  write(chats) {
    try {
      this.storage.setItem(KEY, JSON.stringify(chats));
      return true;
    } catch {
      return false; // full, or not allowed
    }
  }
}

export const titleOf = (chat) => chat.messages[0]?.text.trim().slice(0, TITLE) || "(empty)";

// Returns the chat's file, as `hetero-ee chat` reads it with /load.
export function fileOf({ model, system, messages }, { max_tokens, ...sampling }) {
  const told = system ? [{ role: "system", content: system }] : [];
  const said = messages.map(({ role, text }) => ({ role, content: text }));
  const length = max_tokens === undefined ? {} : { max_new_tokens: max_tokens };
  return JSON.stringify({ version: 1, model, sampling: { ...sampling, ...length }, messages: [...told, ...said] }, null, 1);
}
