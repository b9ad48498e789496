// A tree of Markdown as elements. Text becomes text nodes alone; no markup is ever read.
import { parse } from "/page/markdown.js";

const INLINE = { strong: "strong", em: "em", del: "del" };

// leaf: makes nodes of a run of text, {text, at}.
export function render(page, source, leaf) {
  const made = page.createDocumentFragment();
  made.append(...parse(source).map((block) => rendered(page, block, leaf)));
  return made;
}

function element(page, name, ...children) {
  const made = page.createElement(name);
  made.append(...children);
  return made;
}

function rendered(page, block, leaf) {
  const spans = (inline) => inline.flatMap((each) => span(page, each, leaf));
  const all = (blocks) => blocks.map((each) => rendered(page, each, leaf));
  switch (block.kind) {
    case "heading":
      return element(page, `h${Math.min(6, block.level + 2)}`, ...spans(block.inline)); // below the page's own
    case "paragraph":
      return element(page, "p", ...spans(block.inline));
    case "quote":
      return element(page, "blockquote", ...all(block.blocks));
    case "list":
      return list(page, block, all);
    case "table":
      return table(page, block, spans);
    case "code":
      return code(page, block, leaf);
    default:
      return element(page, "hr");
  }
}

function list(page, block, all) {
  const made = element(page, block.ordered ? "ol" : "ul", ...block.items.map((item) => element(page, "li", ...all(item))));
  if (block.ordered && block.first !== 1) made.setAttribute("start", String(block.first));
  return made;
}

function table(page, { align, head, rows }, spans) {
  const cell = (kind, inline, n) => {
    const made = element(page, kind, ...spans(inline));
    made.className = align[n];
    return made;
  };
  const row = (kind, cells) => element(page, "tr", ...cells.map((each, n) => cell(kind, each, n)));
  const whole = element(
    page,
    "table",
    element(page, "thead", row("th", head)),
    element(page, "tbody", ...rows.map((each) => row("td", each))),
  );
  const scrolling = element(page, "div", whole);
  scrolling.className = "table";
  return scrolling;
}

function code(page, { language, runs }, leaf) {
  const copy = element(page, "button", "Copy");
  copy.type = "button";
  copy.className = "copy";
  copy.setAttribute("aria-label", "Copy the code");
  const name = element(page, "span", language || "code");
  const text = element(page, "code", ...runs.flatMap(leaf));
  const made = element(page, "figure", element(page, "figcaption", name, copy), element(page, "pre", text));
  copy.addEventListener("click", () => copied(page, text.textContent, text, copy));
  return made;
}

// Copies the text, and says so; where the browser forbids it, what shows it is selected for the user to copy.
export async function copied(page, text, shown, button) {
  const said = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    page.getSelection().selectAllChildren(shown);
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = said), 1500);
}

function span(page, node, leaf) {
  if (node.kind === "text") return node.runs.flatMap(leaf);
  if (node.kind === "code") return [element(page, "code", ...node.runs.flatMap(leaf))];
  const inside = node.inline.flatMap((each) => span(page, each, leaf));
  if (node.kind !== "link") return [element(page, INLINE[node.kind], ...inside)];
  const link = element(page, "a", ...inside);
  link.href = node.href;
  link.rel = "noopener noreferrer nofollow";
  link.target = "_blank";
  link.title = node.href;
  return [link];
}
