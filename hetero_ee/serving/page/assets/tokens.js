// The tokens of a reply: where each stands in its text, where it came from, what might have stood there instead.

export const ORIGINS = {
  full: { word: "full depth", mark: "full" },
  exit: { word: "early exit", mark: "exit" },
  "draft head": { word: "draft head", mark: "head" },
  "n-grams": { word: "n-grams", mark: "ngram" },
};

// Of an origin that this page does not know by name.
export const originOf = (name) => ORIGINS[name] ?? { word: name, mark: "other" };

// Adds what an event's choice says to the tokens of a reply.
export function addTokens(tokens, choice) {
  const likely = choice.logprobs?.content ?? [];
  (choice.token_origins ?? []).forEach((each, n) => {
    const { logprob = null, top_logprobs: top = [], token: name = each.text } = likely[n] ?? {};
    tokens.push({ ...each, name, logprob, top, start: 0, end: 0 });
  });
}

// Finds each token's place in the text behind the thoughts. What the server keeps back, as marks around thoughts and
// spaces beside them, has none.
export function align(tokens, thought, text) {
  const whole = thought + text;
  let at = 0;
  for (const token of tokens) {
    const found = [token.text, token.text.trimStart(), token.text.trimEnd()].find((each) => whole.startsWith(each, at)) ?? "";
    [token.start, token.end] = [at, at + found.length].map((each) => Math.max(0, each - thought.length));
    at += found.length;
  }
}

// What makes of a run of text a span for each of its tokens.
export function leafOf(page, tokens) {
  return ({ text, at }) => {
    if (!tokens.length) return [page.createTextNode(text)];
    const nodes = [];
    for (let from = 0, n = firstEndingBehind(tokens, at); from < text.length; n += 1) {
      const token = tokens[n];
      const to = token ? Math.min(text.length, token.end - at) : text.length;
      if (to <= from) continue; // adds nothing here
      const span = page.createElement("span");
      span.textContent = text.slice(from, to);
      if (token) {
        span.className = `token ${originOf(token.origin).mark}`;
        span.dataset.token = String(n);
      }
      nodes.push(span);
      from = to;
    }
    return nodes;
  };
}

function firstEndingBehind(tokens, at) {
  let [low, high] = [0, tokens.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tokens[middle].end > at) high = middle;
    else low = middle + 1;
  }
  return low;
}
