// The tokens of a reply: position in its text, origin, alternatives.

export const ORIGINS = {
  full: { word: "full depth", mark: "full" },
  exit: { word: "early exit", mark: "exit" },
  "draft head": { word: "draft head", mark: "head" },
  "n-grams": { word: "n-grams", mark: "ngram" },
};

// An origin's name and style, also for unknown origins.
export const originOf = (name) => ORIGINS[name] ?? { word: name, mark: "other" };

// Adds the tokens of an event's choice to those of a reply.
export function addTokens(tokens, choice) {
  const likely = choice.logprobs?.content ?? [];
  (choice.token_origins ?? []).forEach((each, n) => {
    const { logprob = null, top_logprobs: top = [], token: name = each.text } = likely[n] ?? {};
    tokens.push({ ...each, name, logprob, top, start: 0, end: 0 });
  });
}

// Finds each token's position in the text after the thoughts. Tokens that the server removes, such as thought markers and
// the spaces around them, have none.
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
