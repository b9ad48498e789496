// Markdown as a tree of plain objects, never as HTML. Every piece of text knows where it stands in the source, so that
// what is shown can be told apart token by token. All searches are bounded: no text takes more than a moment.

const MAX_DEPTH = 12; // of lists, quotes and emphasis within each other
const MAX_SPAN = 1000; // characters that emphasis or a link may hold
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)[ \t]*/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}>[ \t]?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const TABLE_RULE = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/; // of a line without the blanks around it
const ADDRESS = /^https?:\/\/[^\s<>"'`]+/;

// The blocks of a text: heading, paragraph, code, list, quote, table, rule.
export function parse(source) {
  const lines = [];
  let at = 0;
  for (const text of source.split("\n")) {
    lines.push({ text, at });
    at += text.length + 1;
  }
  return blocks(lines, 0);
}

// Whether a link may lead there: to the web or to a mail address, and nowhere else.
export function isSafe(href) {
  try {
    return ["http:", "https:", "mailto:"].includes(new URL(href).protocol);
  } catch {
    return false; // relative, or no address at all
  }
}

const isBlank = (line) => line.text.trim() === "";
const without = (line, n) => ({ text: line.text.slice(n), at: line.at + Math.min(n, line.text.length) });
const indentOf = (line) => line.text.length - line.text.trimStart().length;

function blocks(lines, depth) {
  const found = [];
  for (let i = 0; i < lines.length; ) {
    if (isBlank(lines[i])) i += 1;
    else {
      const [block, next] = begun(lines, i, depth);
      found.push(block);
      i = next;
    }
  }
  return found;
}

// The block that begins in this line, and the line behind it.
function begun(lines, i, depth) {
  const line = lines[i].text;
  if (depth >= MAX_DEPTH) return paragraph(lines, i, depth);
  if (FENCE.test(line)) return fenced(lines, i);
  if (HEADING.test(line)) return [heading(lines[i]), i + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, i + 1];
  if (QUOTE.test(line)) return quoted(lines, i, depth);
  if (ITEM.test(line)) return list(lines, i, depth);
  if (isTable(lines, i)) return table(lines, i);
  return paragraph(lines, i, depth);
}

const interrupts = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(line.text));
const isTable = (lines, i) =>
  lines[i].text.includes("|") && i + 1 < lines.length && lines[i + 1].text.includes("-") && TABLE_RULE.test(lines[i + 1].text.trim());

function paragraph(lines, i, depth) {
  let end = i + 1;
  while (end < lines.length && !isBlank(lines[end]) && (depth >= MAX_DEPTH || !interrupts(lines[end])) && !isTable(lines, end)) end += 1;
  return [{ kind: "paragraph", inline: inline(flat(lines.slice(i, end)), 0) }, end];
}

function fenced(lines, i) {
  const [, fence, language] = FENCE.exec(lines[i].text);
  const indent = indentOf(lines[i]);
  let end = i + 1;
  const closes = (text) => text.trim().length >= fence.length && [...text.trim()].every((each) => each === fence[0]);
  while (end < lines.length && !closes(lines[end].text)) end += 1;
  const inside = lines.slice(i + 1, end).map((line) => without(line, Math.min(indent, indentOf(line))));
  return [{ kind: "code", language, runs: runs(flat(inside)) }, end + 1];
}

function heading(line) {
  const [all, marks] = HEADING.exec(line.text);
  let end = line.text.trimEnd().length;
  while (end > all.length && line.text[end - 1] === "#") end -= 1;
  const text = { text: line.text.slice(0, end).trimEnd(), at: line.at };
  return { kind: "heading", level: marks.length, inline: inline(flat([without(text, all.length)]), 0) };
}

function quoted(lines, i, depth) {
  let end = i;
  while (end < lines.length && QUOTE.test(lines[end].text)) end += 1;
  const inside = lines.slice(i, end).map((line) => without(line, QUOTE.exec(line.text)[0].length));
  return [{ kind: "quote", blocks: blocks(inside, depth + 1) }, end];
}

function list(lines, i, depth) {
  const isOrdered = (line) => /\d/.test(ITEM.exec(line.text)[2]);
  const ordered = isOrdered(lines[i]);
  const first = ordered ? parseInt(ITEM.exec(lines[i].text)[2], 10) : null;
  const items = [];
  while (i < lines.length && ITEM.test(lines[i].text) && !RULE.test(lines[i].text) && isOrdered(lines[i]) === ordered) {
    const width = ITEM.exec(lines[i].text)[0].length;
    const inside = [without(lines[i], width)];
    const least = Math.min(width, 2); // models often indent by two under "1. "
    for (i += 1; i < lines.length; i += 1) {
      const isInside = isBlank(lines[i]) ? goesOn(lines, i, least) : indentOf(lines[i]) >= least;
      const isLazy = !isBlank(lines[i]) && !isBlank(lines[i - 1]) && !interrupts(lines[i]);
      if (!isInside && !isLazy) break;
      inside.push(without(lines[i], Math.min(width, indentOf(lines[i]))));
    }
    items.push(blocks(inside, depth + 1));
    let next = i;
    while (next < lines.length && isBlank(lines[next])) next += 1;
    if (next < lines.length && ITEM.test(lines[next].text)) i = next; // a loose list
  }
  return [{ kind: "list", ordered, first, items }, i];
}

// Whether an item goes on behind blank lines.
function goesOn(lines, i, least) {
  while (i < lines.length && isBlank(lines[i])) i += 1;
  return i < lines.length && indentOf(lines[i]) >= least;
}

function table(lines, i) {
  const align = cells(lines[i + 1]).map(({ text }) => {
    const [left, right] = [text.startsWith(":"), text.endsWith(":")];
    return left && right ? "center" : right ? "right" : "left";
  });
  const row = (line) => {
    const own = cells(line);
    return align.map((_, n) => inline(flat([own[n] ?? { text: "", at: line.at }]), 0));
  };
  const rows = [];
  let end = i + 2;
  for (; end < lines.length && !isBlank(lines[end]) && lines[end].text.includes("|"); end += 1) rows.push(row(lines[end]));
  return [{ kind: "table", align, head: row(lines[i]), rows }, end];
}

function cells(line) {
  const found = [];
  let start = 0;
  const text = line.text;
  const add = (end) => {
    const piece = text.slice(start, end);
    found.push({ text: piece.trim(), at: line.at + start + piece.length - piece.trimStart().length });
    start = end + 1;
  };
  for (let n = 0; n < text.length; n += 1) {
    if (text[n] === "\\") n += 1;
    else if (text[n] === "|") add(n);
  }
  add(text.length);
  if (text.trimStart().startsWith("|")) found.shift();
  if (found.length > 1 && found.at(-1).text === "" && text.trimEnd().endsWith("|")) found.pop();
  return found;
}

// Lines as one text, with the place of each of its characters in the source.
function flat(lines) {
  const at = [];
  lines.forEach((line, n) => {
    if (n) at.push(lines[n - 1].at + lines[n - 1].text.length); // the end of the line before
    for (let k = 0; k < line.text.length; k += 1) at.push(line.at + k);
  });
  return { text: lines.map((line) => line.text).join("\n"), at };
}

const part = ({ text, at }, start, end) => ({ text: text.slice(start, end), at: at.slice(start, end) });

// Pieces that are contiguous in the source.
function runs({ text, at }) {
  const found = [];
  for (let start = 0, n = 1; n <= text.length; n += 1) {
    if (n < text.length && at[n] === at[n - 1] + 1) continue;
    found.push({ text: text.slice(start, n), at: at[start] });
    start = n;
  }
  return found;
}

// What a paragraph holds: text, code, strong, em, del, link.
function inline(whole, depth) {
  const found = [];
  const { text } = whole;
  let plain = 0;
  for (let i = 0; i < text.length; ) {
    const special = depth < MAX_DEPTH ? specialAt(whole, i, depth) : null;
    if (special === null) {
      i += 1;
      continue;
    }
    if (plain < i) found.push({ kind: "text", runs: runs(part(whole, plain, i)) });
    if (special.node) found.push(special.node);
    [i, plain] = [special.end, special.plain ?? special.end];
  }
  if (plain < text.length) found.push({ kind: "text", runs: runs(part(whole, plain, text.length)) });
  return found;
}

// What begins at this character, if it is more than text; plain: where text goes on, if not behind it.
function specialAt(whole, i, depth) {
  const { text } = whole;
  const one = text[i];
  if (one === "\\" && PUNCTUATION.test(text[i + 1] ?? "")) return { end: i + 2, plain: i + 1 };
  if (one === "`") return codeAt(whole, i);
  if (one === "*" || one === "_" || one === "~") return emphasisAt(whole, i, depth);
  if (one === "[" || (one === "!" && text[i + 1] === "[")) return linkAt(whole, i, depth);
  if (one === "h" && !/\w/.test(text[i - 1] ?? "")) return addressAt(whole, i);
  return null;
}

function codeAt(whole, i) {
  const { text } = whole;
  let n = 1;
  while (text[i + n] === "`") n += 1;
  for (let end = i + n; end < Math.min(text.length, i + MAX_SPAN); ) {
    let m = 0;
    while (text[end + m] === "`") m += 1;
    if (m === n) return { node: { kind: "code", runs: runs(part(whole, i + n, end)) }, end: end + n };
    end += Math.max(m, 1);
  }
  return { end: i + n, plain: i };
}

function emphasisAt(whole, i, depth) {
  const { text } = whole;
  const one = text[i];
  const mark = text[i + 1] === one ? one + one : one;
  const n = mark.length;
  const isWord = (each) => /\w/.test(each ?? "");
  if (mark === "~" || /^\s?$/.test(text[i + n] ?? "") || (one === "_" && isWord(text[i - 1]))) return { end: i + n, plain: i };
  for (let end = i + n + 1; end <= Math.min(text.length - n, i + MAX_SPAN); end += 1) {
    if (text[end - 1] === "\\") continue;
    const isDouble = text[end] === one && text[end + 1] === one;
    if (n === 1 && isDouble) end += 1; // of strong text inside
    else if (text.startsWith(mark, end) && !/\s/.test(text[end - 1]) && !(one === "_" && isWord(text[end + n]))) {
      const kind = one === "~" ? "del" : n === 2 ? "strong" : "em";
      return { node: { kind, inline: inline(part(whole, i + n, end), depth + 1) }, end: end + n };
    }
  }
  return { end: i + n, plain: i };
}

// [text](address), and ![text](address) too: images are not loaded, but linked.
function linkAt(whole, i, depth) {
  const { text } = whole;
  const start = text[i] === "!" ? i + 2 : i + 1;
  const limit = Math.min(text.length, i + MAX_SPAN);
  if (!text.slice(start, limit).includes("](")) return null;
  let close = start;
  for (let open = 1; close < limit; close += 1) {
    if (text[close] === "\\") close += 1;
    else if (text[close] === "[") open += 1;
    else if (text[close] === "]" && (open -= 1) === 0) break;
  }
  if (close >= limit || text[close + 1] !== "(") return null;
  let end = close + 2;
  for (let open = 1; end < limit; end += 1) {
    if (text[end] === "(") open += 1;
    else if (text[end] === ")" && (open -= 1) === 0) break;
  }
  if (end >= limit) return null;
  const href = text.slice(close + 2, end).trim().split(/\s/)[0];
  if (!isSafe(href)) return null;
  return { node: { kind: "link", href, inline: inline(part(whole, start, close), depth + 1) }, end: end + 1 };
}

function addressAt(whole, i) {
  const found = ADDRESS.exec(whole.text.slice(i, i + MAX_SPAN));
  if (found === null) return null;
  const href = found[0].replace(/[.,;:!?)\]*_~]{1,20}$/, "");
  if (!isSafe(href)) return null;
  const end = i + href.length;
  return { node: { kind: "link", href, inline: [{ kind: "text", runs: runs(part(whole, i, end)) }] }, end };
}
